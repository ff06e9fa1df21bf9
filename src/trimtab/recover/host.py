"""A copy of captured sections in host memory, so that training can go on while they are written."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_Key = tuple[Any, ...]
_Tensors = dict[_Key, Tensor]


def to_host(sections: Mapping[str, Any], into: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A deep copy of `sections` on the CPU, in one pass; tensors that are one stay one.

    `into` is an earlier copy that is no longer needed: its memory is used again where it fits, because fresh memory
    costs more than the copying.
    """
    seen: _Tensors = {}
    spare = {} if into is None else _by_path(into, ())
    copied = {name: _copied(value, (name,), seen, spare) for name, value in sections.items()}
    for device in {key[0] for key in seen if key[0].type == "cuda"}:
        torch.cuda.synchronize(device)  # copies to the host were only queued
    return copied


def _copied(value: Any, path: _Key, seen: _Tensors, spare: _Tensors) -> Any:
    if isinstance(value, Tensor):
        return _copied_tensor(value.detach(), path, seen, spare)
    if isinstance(value, dict):
        whole = copy.copy(value)  # an OrderedDict or defaultdict keeps its kind
        whole.update((key, _copied(one, (*path, key), seen, spare)) for key, one in value.items())
        return whole
    if type(value) in (list, tuple):
        return type(value)(_copied(one, (*path, index), seen, spare) for index, one in enumerate(value))
    return copy.deepcopy(value)


@torch.no_grad()
def _copied_tensor(tensor: Tensor, path: _Key, seen: _Tensors, spare: _Tensors) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.to("cpu", copy=True)
    key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if key in seen and tensor.numel():
        return seen[key]
    old = spare.get(path)
    pinned = tensor.is_cuda
    if old is not None and old.dtype is tensor.dtype and old.shape == tensor.shape and old.is_pinned() == pinned:
        target = old
    else:
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    target.copy_(tensor, non_blocking=True)
    seen[key] = target
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
