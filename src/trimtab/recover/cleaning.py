"""The documented "clean on save", for whoever asks for it by name: zeros in the place of what is not finite."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.recover.state import to_host


def cleaned(sections: Mapping[str, Any], masks: Collection[str] = ()) -> dict[str, Any]:
    """A copy of the sections without a non-finite value, but for masks: without its -inf one masks nothing.

    The live state is left alone.
    """
    fresh = to_host(sections)
    for value in fresh.values():
        _clean(value)
    for name in masks:
        section, _, key = name.partition(".")
        if key in sections.get(section, {}):
            fresh[section][key] = to_host({"mask": sections[section][key]})["mask"]
    return fresh


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
