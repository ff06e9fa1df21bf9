"""Whether the compiled readings of a healthy step are there (compiled.c). Without them everything is read by NumPy and
PyTorch, with the same result."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger("trimtab")
VERSION = 5
"""Of what the compiled functions take and return."""


def _load() -> Any:
    """The compiled module; None where it was not built, does not fit this Python, or is not wanted."""
    if os.environ.get("TRIMTAB_NATIVE", "1") == "0":
        return None
    try:
        from trimtab.sample.measure import compiled as module
    except ImportError as error:
        log.debug("the compiled readings are not there (%s); NumPy and PyTorch are used", error)
        return None
    if module.VERSION != VERSION:  # built from another state of the source, and not installed again since
        log.debug("the compiled readings are of version %d, not %d; they are not used", module.VERSION, VERSION)
        return None
    module.begin(Tensor, torch.float32, torch.int64, torch.autograd.graph.increment_version)
    return module


native: Any = _load()
"""The compiled module (its functions are in compiled.pyi), or None."""

_WAYS = ((8, 4), (8, 0), (8, 1), (4, 4), (4, 0), (4, 1), (16, 4), (16, 8), (16, 0), (16, 1))
"""How PyTorch's builds have been seen, or may be expected, to add up squares: number of sums, handling of the rest."""


@functools.cache
def clips_as_torch() -> bool:
    """Whether the compiled norm is, bit for bit, the one of this PyTorch on this processor, tried on many tensors.

    A trajectory must not depend on who clips it: where no way of adding up is found to be PyTorch's, PyTorch clips.
    """
    if native is None:
        return False
    source = np.random.default_rng(0)
    sizes = [*range(1, 50), 64, 333, 1000, 4099]
    sound = [source.standard_normal(n, np.float32) * scale for scale in (1.0, 1e-21, 1e9) for n in sizes]
    tensors = [torch.from_numpy(values.astype(np.float32)) for values in sound]
    tensors += [tensors[0].reshape(()), tensors[39].reshape(5, 8), torch.zeros(3, dtype=torch.float32, device="cpu")]
    want = torch.stack(torch._foreach_norm(tensors, 2.0)).numpy().tobytes()
    out = np.empty(len(tensors), np.float32)
    return any(native.imitate(*way, tensors, out) and out.tobytes() == want for way in _WAYS)
