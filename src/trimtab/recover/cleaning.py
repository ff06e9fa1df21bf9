"""The documented "clean on save", for whoever asks for it by name: zeros in the place of what is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.recover.state import to_host


def cleaned(sections: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the sections without a non-finite value; the live state is left alone."""
    copied = to_host(sections)
    for value in copied.values():
        _clean(value)
    return copied


def _clean(value: Any) -> None:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            torch.nan_to_num_(value, nan=0.0, posinf=0.0, neginf=0.0)
    elif isinstance(value, Mapping):
        for one in value.values():
            _clean(one)
    elif isinstance(value, list | tuple):
        for one in value:
            _clean(one)
