"""Every generator of random numbers that training draws from, those of loader workers included: taken, and put back."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info

from trimtab.checkpoint.quarantine import Quarantine
from trimtab.core.errors import CheckpointError

log = logging.getLogger("trimtab")

PYTHON_WORDS = 625
"""Numbers in the state of Python's generator: 624 words and the place among them."""


def capture() -> dict[str, Any]:
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
    state = capture_host()
    if _cuda_in_use():
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Put back what `capture` took; a device that is not here, or was not there, is told by name.

    The state is checked before the first generator is touched.
    """
    check(state)
    restore_host(state)
    _restore_cuda(list(state.get("cuda", ())))
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"].cpu())


def capture_host() -> dict[str, Any]:
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


def restore_host(state: Mapping[str, Any]) -> None:
    """Put back what `capture_host` took."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(int(word) for word in python["words"]), python["gauss"]))
    place, has_gauss = int(numpy["place"]), int(numpy["has_gauss"])
    np.random.set_state((numpy["kind"], np.asarray(numpy["keys"], np.uint32), place, has_gauss, numpy["cached"]))
    # A copy: a mapped file cannot be handed over.
    torch.set_rng_state(torch.tensor(np.asarray(state["torch"], np.uint8), device="cpu"))


def check(state: Mapping[str, Any]) -> None:
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


try:
    from torch.utils.data._utils.worker import _generate_state
except ImportError:  # a version that seeds numpy in another way, or not at all
    _generate_state = None  # type: ignore[assignment]


class Delivery(NamedTuple):
    """A batch as it comes from the inner loader: the data, who made it, and its generators if they moved."""

    data: Any
    worker: int
    generators: dict[str, Any] | None
    dropped: bool


class Deliver:
    """Makes a batch as the loader's own `collate_fn` does, and says what random numbers were left afterwards.

    Samples whose content is in quarantine are left out before; where nothing remains, there is no batch.
    """

    def __init__(self, collate: Callable[[Any], Any], quarantine: Quarantine, in_lists: bool) -> None:
        self._collate, self._quarantine, self._in_lists = collate, quarantine, in_lists
        self._last: dict[str, Any] | None = None

    def __call__(self, samples: Any) -> Delivery:
        """One batch, or one sample where the loader makes no batches."""
        if self._in_lists and self._quarantine.hashes:
            kept = [one for one in samples if not self._quarantine.hides(one)]
            dropped = bool(samples) and not kept
        else:
            kept, dropped = samples, not self._in_lists and self._quarantine.hides(samples)
        data = None if dropped else self._collate(kept)
        info = get_worker_info()
        if info is None:
            return Delivery(data, -1, None, dropped)
        return Delivery(data, info.id, self._moved(), dropped)

    def _moved(self) -> dict[str, Any] | None:
        """The generators of this process, or None where they are as they were told last."""
        now = capture_host()
        now["torch"] = now["torch"].numpy()  # a tensor would cost a file of shared memory per batch
        if self._last is not None and _same(now, self._last):
            return None
        self._last = now
        return now


class Begin:
    """Starts a worker in the place of an earlier one: with its number, and the random numbers it had left."""

    def __init__(
        self,
        own: Callable[[int], Any] | None,
        generators: Mapping[int, Any],
        base_seed: int | None,
        shift: int,
    ) -> None:
        self._own, self._generators, self._base_seed, self._shift = own, dict(generators), base_seed, shift

    def __call__(self, worker: int) -> None:
        """Called in the new process, before its first sample."""
        info: Any = get_worker_info()
        former = (worker + self._shift) % info.num_workers
        # The next batch was due from that worker, and goes to the first of these.
        object.__setattr__(info, "id", former)  # its own refuses any change
        if self._base_seed is not None:
            object.__setattr__(info, "seed", self._base_seed + former)
            _seed(self._base_seed, former)
        if self._own is not None:
            self._own(former)
        if former in self._generators:
            restore_host(self._generators[former])


def _seed(base_seed: int, worker: int) -> None:
    """As a loader seeds its workers."""
    random.seed(base_seed + worker)
    torch.manual_seed(base_seed + worker)
    if _generate_state is not None:
        np.random.seed(_generate_state(base_seed, worker))  # type: ignore[no-untyped-call]


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (
        np.array_equal(one["torch"], other["torch"])
        and np.array_equal(one["python"]["words"], other["python"]["words"])
        and one["python"]["gauss"] == other["python"]["gauss"]
        and np.array_equal(one["numpy"]["keys"], other["numpy"]["keys"])
        and all(one["numpy"][key] == other["numpy"][key] for key in ("place", "has_gauss", "cached"))
    )
