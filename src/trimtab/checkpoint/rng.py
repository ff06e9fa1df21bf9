"""Every generator of random numbers that training draws from: taken, and put back."""

from __future__ import annotations

import logging
import random
from typing import Any, TypedDict

import numpy as np
import torch

from trimtab.core.errors import CheckpointError

log = logging.getLogger("trimtab")

PYTHON_WORDS = 625
"""Numbers in the state of Python's generator: 624 words and the place among them."""


class PythonState(TypedDict):
    """Of Python's generator."""

    version: int
    words: np.ndarray[Any, np.dtype[np.uint32]]
    gauss: float | None


class NumpyState(TypedDict):
    """Of numpy's global generator."""

    kind: str
    keys: np.ndarray[Any, np.dtype[np.uint32]]
    place: int
    has_gauss: int
    cached: float


class HostState(TypedDict):
    """The generators of one process that live on the CPU."""

    python: PythonState
    numpy: NumpyState
    torch: torch.Tensor | np.ndarray[Any, np.dtype[np.uint8]]


class RngState(HostState, total=False):
    """Those of the devices too."""

    cuda: list[torch.Tensor]
    mps: torch.Tensor


def capture() -> RngState:
    """The state of Python's, numpy's and torch's generators, on the CPU and on every device in use.

    Example:
        >>> import torch
        >>> from trimtab.checkpoint import rng
        >>> state = rng.capture()
        >>> first = torch.rand(2)
        >>> rng.restore(state)
        >>> bool((torch.rand(2) == first).all())
        True
    """
    host = capture_host()
    state: RngState = {"python": host["python"], "numpy": host["numpy"], "torch": host["torch"]}
    if _cuda_in_use():
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore(state: RngState) -> None:
    """Put back what `capture` took; a number of devices that differs is warned about.

    The state is checked before the first generator is touched.
    """
    check(state)
    restore_host(state)
    _restore_cuda(list(state.get("cuda", ())))
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"].cpu())


def capture_host() -> HostState:
    """The generators of this process that live on the CPU; what samplers and workers of a loader draw from."""
    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": np.array(keys, dtype=np.uint32),
            "place": int(place),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }


def restore_host(state: HostState) -> None:
    """Put back what `capture_host` took."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(int(word) for word in python["words"]), python["gauss"]))
    place, has_gauss = int(numpy["place"]), int(numpy["has_gauss"])
    np.random.set_state((numpy["kind"], np.asarray(numpy["keys"], np.uint32), place, has_gauss, numpy["cached"]))
    # A copy: a mapped file cannot be handed over.
    torch.set_rng_state(torch.tensor(np.asarray(state["torch"], np.uint8), device="cpu"))


def check(state: RngState) -> None:
    """Raise a `CheckpointError` for a state that cannot be put back."""
    missing = [name for name in ("python", "numpy", "torch") if name not in state]
    if missing:
        raise CheckpointError(
            f"the saved random state lacks {', '.join(missing)}; expected python, numpy and torch: "
            "the rest of the run would draw other numbers; use another checkpoint"
        )
    words, size = len(state["python"]["words"]), len(state["torch"])
    here = len(torch.get_rng_state())
    if words != PYTHON_WORDS or size != here:
        raise CheckpointError(
            f"the saved random state has {words} words for Python and {size} bytes for torch; expected "
            f"{PYTHON_WORDS} and {here}: it was written by another version, or is damaged"
        )


def _cuda_in_use() -> bool:
    """Asking a device that sleeps would wake it up, and cost memory on it."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _restore_cuda(saved: list[torch.Tensor]) -> None:
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if saved and len(saved) != here:
        log.warning(
            "the checkpoint holds random states of %d CUDA devices, %d are here: random numbers on them may differ",
            len(saved),
            here,
        )
    for index, one in enumerate(saved[:here]):
        torch.cuda.set_rng_state(one.cpu(), index)
