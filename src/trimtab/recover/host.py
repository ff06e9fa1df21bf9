"""A copy of captured sections in host memory, so that training can go on while they are written."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_Key = tuple[Any, ...]
_Tensors = dict[_Key, Tensor]
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


@torch.no_grad()
def to_host(sections: Mapping[str, Any], into: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A deep copy of `sections` on the CPU, in one pass; tensors that are one stay one.

    `into` is an earlier copy that is no longer needed: its memory is used again where it fits, because fresh memory
    costs more than the copying.
    """
    made = _Made(seen={}, spare={} if into is None else _by_path(into, ()), sources=[], targets=[])
    copied = {name: _copied(value, (name,), made) for name, value in sections.items()}
    if any(source.is_cuda for source in made.sources):
        for target, source in zip(made.targets, made.sources, strict=True):
            target.copy_(source, non_blocking=True)
    elif made.sources:
        torch._foreach_copy_(made.targets, made.sources)  # training waits: one call instead of hundreds
    for device in {source.device for source in made.sources if source.is_cuda}:
        torch.cuda.synchronize(device)  # copies to the host were only queued
    return copied


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """What was found on the way: tensors met before, memory to be used again, and what is to be copied where."""

    seen: _Tensors
    spare: _Tensors
    sources: list[Tensor]
    targets: list[Tensor]


def _copied(value: Any, path: _Key, made: _Made) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return _copied_tensor(value.detach(), path, made)
    if isinstance(value, dict):
        whole = copy.copy(value)  # an OrderedDict or defaultdict keeps its kind
        whole.update((key, _copied(one, (*path, key), made)) for key, one in value.items())
        return whole
    if kind in (list, tuple):
        return kind(_copied(one, (*path, index), made) for index, one in enumerate(value))
    return copy.deepcopy(value)


def _copied_tensor(tensor: Tensor, path: _Key, made: _Made) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.to("cpu", copy=True)
    key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if key in made.seen and tensor.numel():
        return made.seen[key]
    old = made.spare.get(path)
    pinned = tensor.is_cuda
    if old is not None and old.dtype is tensor.dtype and old.shape == tensor.shape and old.is_pinned() == pinned:
        target = old
    else:
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    made.sources.append(tensor)
    made.targets.append(target)
    made.seen[key] = target
    return target


def _by_path(value: Any, path: _Key) -> _Tensors:
    """Tensors by where they are; one that is found at two places counts once, or it would be overwritten."""
    found: _Tensors = {}
    taken: set[int] = set()
    waiting: list[tuple[_Key, Any]] = [(path, value)]
    while waiting:
        at, one = waiting.pop()
        if isinstance(one, Tensor):
            if one.layout is torch.strided and one.device.type == "cpu" and id(one) not in taken:
                taken.add(id(one))
                found[at] = one
        elif isinstance(one, Mapping):
            waiting.extend(((*at, key), inner) for key, inner in one.items())
        elif type(one) in (list, tuple):
            waiting.extend(((*at, index), inner) for index, inner in enumerate(one))
    return found
