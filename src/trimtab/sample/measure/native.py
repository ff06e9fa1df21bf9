"""Whether the compiled readings of a healthy step are there (compiled.c). Without them everything is read by NumPy and
PyTorch, with the same result."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("trimtab")
VERSION = 4
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
    module.begin(Tensor, torch.float32, torch.int64)
    return module


native: Any = _load()
"""The compiled module (its functions are in compiled.pyi), or None."""
