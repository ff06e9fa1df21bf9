"""Two checkpoints side by side: which tensors differ and by how much, and which settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.checkpoint import health
from trimtab.checkpoint.compare import joined, kind_of
from trimtab.checkpoint.directory import explaining
from trimtab.checkpoint.format import tree
from trimtab.checkpoint.format.tensors import identity
from trimtab.core.printable import brief

OPAQUE = "rng"
"""Numbers below this name mean nothing by themselves: they are the same or not."""
_PIECE = 1 << 22  # values turned to float64 at a time
_WRAPPED = ("optimizer", "scheduler")  # by label, each with its class and its state


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """A tensor that differs: `only_a`, `only_b`, `kind` (type or shape) or `values`.

    `relative` is the norm of the difference over the norm of the first one: inf where that is zero, NaN where one of
    them holds a NaN or an Inf.
    """

    name: str
    what: str
    a: str = ""
    b: str = ""
    relative: float | None = None
    num_elements: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """A plain value that differs; None stands for one that is not there."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Everything that differs, the largest change first; empty where two states are the same to the bit.

    `same` names the sections that both have and in which nothing differs.
    """

    tensors: tuple[TensorChange, ...]
    settings: tuple[SettingChange, ...]
    num_tensors: int
    same: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether nothing differs."""
        return not self.tensors and not self.settings


@explaining("the two could not be compared")
def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> Difference:
    """Compare the sections of two checkpoints, tensor by tensor and value by value.

    Example:
        >>> one = {"model": {"w": torch.tensor([3.0, 4.0]), "b": torch.zeros(1)}, "extra": {"epoch": 1}}
        >>> two = {"model": {"w": torch.tensor([3.0, 4.5]), "b": torch.zeros(1)}, "extra": {"epoch": 2}}
        >>> found = difference(one, two)
        >>> [(change.name, change.relative) for change in found.tensors], found.settings[0].name
        ([('model.w', 0.1)], 'extra.epoch')
    """
    tensors_a, values_a = _leaves(a)
    tensors_b, values_b = _leaves(b)
    names = list(dict.fromkeys((*tensors_a, *tensors_b)))
    done: dict[Any, float | None] = {}
    changes = [change for name in names if (change := _changed(name, tensors_a.get(name), tensors_b.get(name), done))]
    keys = dict.fromkeys((*values_a, *values_b))
    settings = [
        SettingChange(name=name, a=_told(values_a, name), b=_told(values_b, name))
        for name in keys
        if name not in values_a or name not in values_b or not _same(values_a[name], values_b[name])
    ]
    touched = {name.partition(".")[0] for name in (*(one.name for one in changes), *(one.name for one in settings))}
    return Difference(
        tensors=tuple(sorted(changes, key=_rank)),
        settings=tuple(settings),
        num_tensors=len(names),
        same=tuple(section for section in a if section in b and section not in touched),
    )


def relative_change(a: Tensor, b: Tensor) -> float:
    """The norm of `b - a` over the norm of `a`, in float64.

    Example:
        >>> relative_change(torch.ones(4), torch.full((4,), 1.5))
        0.5
    """
    found = _change(a, b)
    return 0.0 if found is None else found


def _change(a: Tensor, b: Tensor) -> float | None:
    """The relative change; None where the two are the same to the bit."""
    if a.layout is not torch.strided:
        return _sparse_change(a, b)
    change, size, same = 0.0, 0.0, True
    for x, y in zip(_pieces(a), _pieces(b), strict=True):
        before = x.double()
        size += float(before.square().sum())
        if not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            same = False
            change += float((y.double() - before).square().sum())
    return None if same else _ratio(change, size)


def _ratio(change: float, size: float) -> float:
    if not (math.isfinite(change) and math.isfinite(size)):
        return math.nan
    if not change:  # a zero that changed its sign
        return 0.0
    return math.sqrt(change / size) if size else math.inf


def _sparse_change(a: Tensor, b: Tensor) -> float | None:
    one, two = (t.to_sparse(layout=torch.sparse_coo).coalesce() for t in (a, b))
    parts = ((one.indices(), two.indices()), (one.values(), two.values()))
    if all(torch.equal(x, y) for x, y in parts):
        return None
    gap = (two.double() - one.double()).coalesce().values()
    return _ratio(float(gap.square().sum()), float(one.values().double().square().sum()))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj()).contiguous()
    flat = tensor.reshape(-1)
    yield from (flat[start : start + _PIECE] for start in range(0, len(flat), _PIECE))


def _changed(name: str, a: Tensor | None, b: Tensor | None, done: dict[Any, float | None]) -> TensorChange | None:
    """What changed; `done` holds what was compared already, under whatever name: layers may share their weights."""
    if a is None or b is None:
        if b is not None:
            return TensorChange(name=name, what="only_b", b=kind_of(b), num_elements=b.numel())
        return None if a is None else TensorChange(name=name, what="only_a", a=kind_of(a), num_elements=a.numel())
    if kind_of(a) != kind_of(b) or a.layout is not b.layout:
        return TensorChange(name=name, what="kind", a=kind_of(a), b=kind_of(b), num_elements=b.numel())
    both = identity(a), identity(b)
    if both not in done:
        done[both] = _change(a, b)
    relative = done[both]
    if relative is None:
        return None
    told = None if OPAQUE in name.split(".") else relative
    return TensorChange(name=name, what="values", a=kind_of(a), b=kind_of(b), relative=told, num_elements=a.numel())


def _rank(change: TensorChange) -> tuple[int, float]:
    """What is missing or of another shape first, then the largest change, then what has no size."""
    if change.what != "values":
        return 0, 0.0
    if change.relative is None:
        return 3, 0.0
    return (1, 0.0) if math.isnan(change.relative) else (2, -change.relative)


def _leaves(sections: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors, and all plain values, by name; moments bear the names of their parameters."""
    tensors = dict(health.named(sections))
    values: dict[str, Any] = {}
    for section, state in sections.items():
        watched = section in health.WATCHED
        for name, leaf in _walk(section, _unwrapped(state) if section in _WRAPPED else state):
            if not isinstance(leaf, Tensor):
                values[name] = leaf
            elif not watched:
                tensors[name] = leaf
    return tensors, values


def _unwrapped(state: Any) -> Any:
    """`optimizer.param_groups` and `optimizer.class` instead of `optimizer.0.state.param_groups`."""
    if not isinstance(state, Mapping) or not all(isinstance(entry, Mapping) for entry in state.values()):
        return state
    flat = {
        label: {key: one for key, one in entry.items() if key not in ("state", "names", "shapes")} | _settings(entry)
        for label, entry in state.items()
    }
    return next(iter(flat.values())) if len(flat) == 1 else flat


def _settings(entry: Mapping[str, Any]) -> dict[str, Any]:
    inner = entry.get("state")
    return dict(inner) if isinstance(inner, Mapping) else {"state": inner}


def _walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values; a list of nothing but plain values is one of them."""
    if isinstance(value, np.ndarray):
        yield path, torch.from_numpy(value) if value.dtype != object and value.dtype.kind in "biufc" else value
    elif isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _walk(joined(path, key), one)
    elif isinstance(value, list | tuple) and any(isinstance(one, Mapping | Tensor | np.ndarray) for one in value):
        for index, one in enumerate(value):
            yield from _walk(joined(path, index), one)
    else:
        yield path, value


def _same(a: Any, b: Any) -> bool:
    """Equal as they would be stored: a NaN is a NaN."""
    first, second = tree.flatten(a), tree.flatten(b)
    if first[1] or second[1]:  # tensors within something unusual
        return first[0] == second[0] and all(torch.equal(first[1][k], second[1][k]) for k in first[1])
    return bool(first[0] == second[0])


class _Shown:
    """A value as Python writes it, for `brief`."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __str__(self) -> str:
        return repr(self._value)


def _told(values: Mapping[str, Any], name: str) -> str | None:
    if name not in values:
        return None
    value = values[name]
    return brief(value if isinstance(value, int) and not isinstance(value, bool) else _Shown(value))
