"""Whether a state is fit to be resumed from: tensors that hold a NaN or an Inf, and their cleaning where wanted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.checkpoint.compare import joined
from trimtab.checkpoint.format.tensors import identity
from trimtab.checkpoint.state import to_host

WATCHED = ("model", "optimizer", "ema")
"""Sections that must be finite. Gradients need not be: a loss scaler makes them infinite now and then."""


@torch.no_grad()
def nonfinite(sections: Mapping[str, Any], *, allowed: Collection[str] = ()) -> tuple[str, ...]:
    """The names of the tensors in model, optimizer and average that hold a NaN or an Inf, in their order.

    `allowed` are names that may, such as a mask of -inf that was one from the beginning. One pass over the tensors and
    one wait per device; what looks wrong (a norm may overflow) is then looked at value by value.

    Example:
        >>> sections = {"model": {"good": torch.ones(2), "bad": torch.tensor([1.0, float("nan")])}}
        >>> nonfinite(sections)
        ('model.bad',)
        >>> nonfinite(sections, allowed={"model.bad"})
        ()
    """
    names: dict[Any, list[str]] = {}  # weights that layers share are looked at once
    asked: dict[Any, Tensor] = {}
    for name, tensor in named(sections):
        if name not in allowed:
            for dense in _values(tensor):
                names.setdefault(identity(tensor), []).append(name)
                asked.setdefault(identity(tensor), dense)
    known, tensors = list(asked), list(asked.values())
    suspects: set[int] = set()
    for places in _by_device(tensors).values():
        norms = torch.stack(_norms([tensors[place] for place in places]))
        finite = torch.isfinite(norms).tolist()
        suspects.update(place for place, fine in zip(places, finite, strict=True) if not fine)
    bad = {known[place] for place in suspects if not bool(torch.isfinite(tensors[place]).all())}
    told = {name for one in bad for name in names[one]}
    return tuple(dict.fromkeys(name for name, _ in named(sections) if name in told)) if told else ()


def named(sections: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the watched sections by a name that a reader knows: `optimizer.exp_avg.layer.weight`."""
    for section in WATCHED:
        if section == "optimizer":
            yield from _named_moments(sections.get(section) or {})
        else:
            yield from _walk(section, sections.get(section))


def _named_moments(optimizers: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for label, entry in optimizers.items():
        prefix = "optimizer" if len(optimizers) == 1 else joined("optimizer", label)
        state = entry.get("state") if isinstance(entry, Mapping) else entry
        if not isinstance(state, Mapping) or "param_groups" not in state:
            yield from _walk(prefix, state)
            continue
        names = _parameter_names(entry, state)
        for index, moments in state.get("state", {}).items():
            for key, value in moments.items() if isinstance(moments, Mapping) else ():
                name = names.get(index) or index
                yield from ((joined(joined(prefix, path), name), one) for path, one in _walk(str(key), value))
        yield from _walk(f"{prefix}.param_groups", state["param_groups"])


def _parameter_names(entry: Mapping[str, Any], state: Mapping[str, Any]) -> dict[Any, str]:
    names: dict[Any, str] = {}
    for group, told in zip(state["param_groups"], entry.get("names", ()), strict=False):
        names.update(zip(group["params"], told, strict=False))
    return names


def _walk(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _walk(joined(path, key), one)
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _walk(joined(path, index), one)


def _values(tensor: Tensor) -> Iterator[Tensor]:
    """The numbers of a tensor as one that norms can be taken of; none where there is nothing that can be bad."""
    tensor = tensor.detach()
    if tensor.is_meta or tensor.is_quantized or not (tensor.is_floating_point() or tensor.is_complex()):
        return
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.element_size() == 1:  # 8-bit floats know no arithmetic
        tensor = tensor.float()
    if tensor.numel():
        yield tensor


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Their L2 norms in at least float32, which any NaN or Inf makes non-finite."""
    norms: list[Tensor] = [tensors[0].new_empty(())] * len(tensors)
    kinds: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        kinds.setdefault(tensor.dtype, []).append(place)
    for dtype, places in kinds.items():
        wide = torch.promote_types(dtype, torch.float32)
        found = torch._foreach_norm([tensors[place] for place in places], 2, dtype=wide)
        for place, norm in zip(places, found, strict=True):
            norms[place] = norm.double() if norm.device.type != "mps" else norm.float()
    return norms


def _by_device(tensors: list[Tensor]) -> dict[torch.device, list[int]]:
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    return places


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
