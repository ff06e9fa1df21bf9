"""One measurement of a model's gradients, as a frozen record on the host: what all pull-style faces read from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trimtab.core.errors import InputError
from trimtab.core.types import ABSENT, FROZEN, Column
from trimtab.sample.measure import reference as measure
from trimtab.sample.measure.meter import Meter
from trimtab.sample.transfer import to_host

F64 = NDArray[np.float64]
Source = nn.Module | Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
"""What has parameters: a model, one parameter, several, or several with names."""

_COLUMNS = tuple(Column)
_TINY = 1e-15
"""On the CPU the squares of smaller values are lost in float32: such a norm is measured again, wider."""
_STD_NOISE = 1e-6
"""Of the mean square: what is left after subtracting the squared mean is below this only rounding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradSnapshot:
    """The gradients of all parameters at one moment; every array has one entry a parameter, in the model's order.

    `norms` holds `ABSENT` where a trainable parameter has no gradient and `FROZEN` where none is wanted. The columns
    after `inf` are NaN for those, and for all where only norms were asked for; `nan` and `inf` are counts.
    `global_norm` is non-finite exactly where a gradient is. Of a sharded gradient this rank's part is measured.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    numel: NDArray[np.int64]
    norms: F64
    nan: F64
    inf: F64
    mean: F64
    std: F64
    max: F64
    min: F64
    absmax: F64
    abs_mean: F64
    zero_frac: F64
    underflow_frac: F64
    global_norm: float

    @property
    def present(self) -> NDArray[np.bool_]:
        """Which parameters have a gradient, be it NaN."""
        there: NDArray[np.bool_] = ~(self.norms < 0)
        return there

    @property
    def absent(self) -> tuple[str, ...]:
        """Trainable parameters without a gradient."""
        return tuple(self.names[i] for i in np.flatnonzero(self.norms == ABSENT))

    @property
    def frozen(self) -> tuple[str, ...]:
        """Parameters that want no gradient and have none."""
        return tuple(self.names[i] for i in np.flatnonzero(self.norms == FROZEN))

    @property
    def rms(self) -> F64:
        """The root mean square of each gradient: its size independent of how many elements it has."""
        out: F64 = np.where(self.present, self.norms, np.nan) / np.sqrt(np.maximum(self.numel, 1))
        return out


def named_tensors(source: Source) -> list[tuple[str, Tensor]]:
    """The parameters of a model or a list with their names, each once; without names they are numbered.

    Example:
        >>> [name for name, _ in named_tensors(nn.Linear(2, 1))]
        ['weight', 'bias']
        >>> [name for name, _ in named_tensors([torch.zeros(2)])]
        ['0']
    """
    if isinstance(source, nn.Module):
        return list(source.named_parameters())
    if isinstance(source, Tensor):
        return [("0", source)]
    found: dict[int, tuple[str, Tensor]] = {}
    for i, entry in enumerate(source):
        name, tensor = entry if isinstance(entry, tuple) and len(entry) == 2 else (str(i), entry)
        if not isinstance(tensor, Tensor):
            raise InputError(
                f"entry {i} is a {type(tensor).__name__}; expected parameters: pass the model, model.parameters() or "
                "model.named_parameters()"
            )
        found.setdefault(id(tensor), (name, tensor))
    return list(found.values())


def snapshot(model: Source, *, detailed: bool = True, meter: Meter | None = None) -> GradSnapshot:
    """Measure all gradients with one transfer to the host; nothing is changed.

    Without `detailed` only norms are measured, which costs a fraction. A `meter` kept by the caller saves planning the
    launches anew each time on a GPU. A gradient is looked at again only where float32 cannot hold its norm.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> seen = snapshot(model)
        >>> seen.names, seen.norms.round(4).tolist(), seen.std.tolist()
        (('weight', 'bias'), [1.7321, 1.0], [0.0, 0.0])
    """
    named = named_tensors(model)
    grads = [p.grad for _, p in named]
    rows = [i for i, g in enumerate(grads) if g is not None]
    live = [g for g in grads if g is not None]
    plain = [measure.plain(g) for g in live]
    table, edges = _measured(plain, detailed, meter)
    held = np.array([t.numel() for t in plain], np.int64)
    # A sparse gradient stores part of its elements; the others are zeros, and count in a mean.
    sizes = np.array([_full_size(g, t) for g, t in zip(live, plain, strict=True)], np.int64)
    columns = _columns(table, edges, held, sizes)
    _look_again(columns, plain, sizes, detailed)

    def spread(values: F64, missing: float = math.nan) -> F64:
        out = np.full(len(named), missing)
        out[rows] = values
        return out

    norms = spread(columns["norms"], ABSENT)
    for i, (_, p) in enumerate(named):
        if grads[i] is None and not p.requires_grad:
            norms[i] = FROZEN
    numel = np.array([0 if is_lazy(p) else p.numel() for _, p in named], np.int64)
    numel[rows] = sizes
    with np.errstate(over="ignore"):
        total = float(np.sqrt(np.square(columns["norms"]).sum()))
    return GradSnapshot(
        names=tuple(name for name, _ in named),
        shapes=tuple(() if is_lazy(p) else tuple(p.shape) for _, p in named),
        numel=numel,
        norms=norms,
        nan=spread(columns["nan"], 0.0),
        inf=spread(columns["inf"], 0.0),
        global_norm=total,
        **{
            name: spread(columns[name])
            for name in ("mean", "std", "max", "min", "absmax", "abs_mean", "zero_frac", "underflow_frac")
        },
    )


def wide_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Norms that float32 could not hold, of plain tensors on whatever devices, on that of the first."""
    return torch.cat([measure.wide_norms([t]).to(tensors[0].device) for t in tensors])


def _full_size(grad: Tensor, plain: Tensor) -> int:
    if grad.layout is torch.strided:
        return plain.numel()
    return grad.numel() * (2 if grad.is_complex() else 1)


def _measured(plain: Sequence[Tensor], detailed: bool, meter: Meter | None) -> tuple[F64, F64]:
    """All columns, and minimum, maximum and L1 norm, of each tensor: on the host after one transfer."""
    if not plain:
        return np.zeros((0, len(_COLUMNS))), np.zeros((0, 3))
    home = plain[0].device
    if not detailed:
        norms = to_host(measure.norms(plain)).astype(np.float64)
        table = np.full((len(plain), len(_COLUMNS)), np.nan)
        table[:, 0] = norms
        return table, np.full((len(plain), 3), np.nan)
    if home.type == "cpu":
        edges = torch.stack([_edges(t).to(home) for t in plain])
        return to_host(measure.full(plain)).astype(np.float64), to_host(edges)
    if meter is None:
        meter = Meter({t.device for t in plain}, "auto")
    columns = meter.full(plain)
    wide = torch.stack([_edges(t).to(home, non_blocking=True) for t in plain])
    both = to_host(torch.cat([columns.to(wide.dtype), wide], 1)).astype(np.float64)
    return both[:, : len(_COLUMNS)], both[:, len(_COLUMNS) :]


def _edges(tensor: Tensor) -> Tensor:
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    if not tensor.numel():
        return torch.zeros(3, dtype=wide, device=tensor.device)
    low, high = torch.aminmax(tensor)
    # Summed in float32 on the CPU, where converting costs three times as much; what overflows is looked at again.
    sums = torch.float32 if tensor.is_cpu and tensor.dtype is not torch.float64 else wide
    return torch.stack([low.to(wide), high.to(wide), tensor.abs().sum(dtype=sums).to(wide)])


def _columns(table: F64, edges: F64, held: NDArray[np.int64], sizes: NDArray[np.int64]) -> dict[str, F64]:
    of = {column: table[:, i] for i, column in enumerate(_COLUMNS)}
    count = np.maximum(sizes, 1)
    share = held / count
    low, high, absolute = edges.T
    holes = held < sizes
    zero = of[Column.ZERO_FRAC] * share + (1.0 - share)
    return {
        "norms": of[Column.L2].copy(),
        "nan": np.nan_to_num(of[Column.NAN]),
        "inf": np.nan_to_num(of[Column.INF]),
        "mean": of[Column.MEAN] * share,
        "max": np.where(holes, np.maximum(high, 0.0), high),
        "min": np.where(holes, np.minimum(low, 0.0), low),
        "absmax": np.maximum(-low, high),  # in float64: that column is float32
        "abs_mean": absolute / count,
        "zero_frac": zero,
        "underflow_frac": of[Column.UNDERFLOW_FRAC] * share,
    }


def _look_again(columns: dict[str, F64], plain: Sequence[Tensor], sizes: NDArray[np.int64], detailed: bool) -> None:
    """Settle the norms that float32 could not hold, and what follows from norms."""
    norms = columns["norms"]
    bad = columns["nan"] + columns["inf"] > 0
    odd = ~np.isfinite(norms) & ~bad
    for i, tensor in enumerate(plain):
        small = tensor.dtype is torch.float64 or tensor.is_cpu
        odd[i] |= small and norms[i] < _TINY and columns["absmax"][i] != 0.0
    again: list[int] = np.flatnonzero(odd).tolist()
    if again:
        norms[again] = to_host(wide_norms([plain[i] for i in again])).astype(np.float64)
    vast: list[int] = np.flatnonzero(np.isinf(columns["abs_mean"]) & ~bad).tolist()
    if vast:
        sums = to_host(torch.stack([plain[i].abs().sum(dtype=torch.float64).cpu() for i in vast]))
        columns["abs_mean"][vast] = sums / sizes[vast]
    if not detailed:
        doubt: list[int] = np.flatnonzero(~np.isfinite(norms)).tolist()
        if doubt:
            counted = to_host(measure.full([plain[i] for i in doubt], fractions=False))
            columns["nan"][doubt], columns["inf"][doubt] = counted[:, 3], counted[:, 4]
    with np.errstate(all="ignore"):
        square = np.square(norms)
        rest = square - sizes * np.square(columns["mean"])
        rest = np.where(rest < _STD_NOISE * square, 0.0, rest)
        columns["std"] = np.where(sizes > 1, np.sqrt(rest / np.maximum(sizes - 1, 1)), 0.0)
    columns["std"] = np.where(np.isfinite(norms) & np.isfinite(columns["mean"]), columns["std"], np.nan)
