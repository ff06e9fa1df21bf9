"""Norms and percentiles of gradients under the documented names, and one look at all gradients of a model."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trimtab.core.errors import InputError
from trimtab.core.types import ABSENT, FROZEN, Column
from trimtab.guard import protect as reflex
from trimtab.sample.measure import reference as measure
from trimtab.sample.measure.meter import Meter
from trimtab.sample.transfer import number, to_host

log = logging.getLogger("trimtab")

MAX_NORM = 1.5
"""What the documented transformer clips to."""
VANISHING, EXPLODING = 0.01, 100.0
"""Of the output layer's gradient: the bounds between which a layer's is healthy."""
MOST_SORTED = 1 << 22
"""Elements that percentiles are taken of; of more an even sample is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNorms:
    """The size of all gradients: their L2 norm, the largest element, and the mean size of an element."""

    total_norm: float
    max_grad: float
    mean_grad_abs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScale:
    """A layer's gradient per element relative to the output layer's: `vanishing`, `healthy` or `exploding`."""

    name: str
    scale: float
    state: str


def compute_l2_norm(tensor: Tensor) -> float:
    """The L2 norm of one tensor; non-finite only where the tensor is.

    Example:
        >>> import torch
        >>> from trimtab.compat.monitors import compute_l2_norm
        >>> compute_l2_norm(torch.tensor([3.0, 4.0])), compute_l2_norm(torch.tensor([3e30, 4e30])) < 5.1e30
        (5.0, True)
    """
    return _norm([tensor])


def compute_global_gradient_norm(source: Source) -> float:
    """The L2 norm of all gradients of a model or of some parameters taken together; 0.0 where there are none.

    Example:
        >>> import torch
        >>> from trimtab.compat.monitors import compute_global_gradient_norm
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> (weight * torch.tensor([3.0, 4.0])).sum().backward()
        >>> compute_global_gradient_norm([weight])
        5.0
    """
    return _norm(_gradients(source))


def compute_parameter_norm(source: Source) -> float:
    """The L2 norm of all parameters, trainable or not; a tied one counts once.

    Example:
        >>> import torch
        >>> from trimtab.compat.monitors import compute_parameter_norm
        >>> compute_parameter_norm([torch.ones(3), torch.ones(6)])
        3.0
    """
    return _norm([tensor for _, tensor in named_tensors(source)])


def clip_gradients_by_global_norm(source: Source, max_norm: float = MAX_NORM) -> float:
    """Scale all gradients down to a common norm of at most `max_norm`; returns the norm before.

    On finite gradients this is `clip_grad_norm_`, except that huge ones are scaled, not zeroed. Gradients with a NaN or
    Inf are left as they are, since scaling would spread it: the norm returned says so, and skipping the step is right.

    Example:
        >>> import torch
        >>> from trimtab.compat.monitors import clip_gradients_by_global_norm
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> (weight * torch.tensor([3.0, 4.0])).sum().backward()
        >>> clip_gradients_by_global_norm([weight], max_norm=1.0), weight.grad.norm().round(decimals=3)
        (5.0, tensor(1.))
    """
    if not max_norm >= 0:
        raise InputError(f"max_norm is {max_norm}; expected a number of at least 0, such as {MAX_NORM}")
    grads = _gradients(source)
    if not grads:
        return 0.0
    total, norm = _total(grads)
    if not math.isfinite(norm):
        log.warning(
            "gradients hold NaN or Inf (norm %s) and were not clipped: scaling them would spread it; skip this step",
            norm,
        )
        return norm
    factor = max_norm / (total + reflex.SAFE_EPS)
    coef = number(factor)
    if coef < 1.0:
        _scale(grads, factor, coef)
    return norm


def scale_gradients(source: Source, factor: float) -> None:
    """Multiply every gradient by a number, in place.

    Example:
        >>> import torch
        >>> from trimtab.compat.monitors import scale_gradients
        >>> weight = torch.zeros(1, requires_grad=True)
        >>> weight.sum().backward()
        >>> scale_gradients([weight], 0.5)
        >>> weight.grad
        tensor([0.5000])
    """
    values = [measure.stored(_local(g)) for g in _gradients(source)]
    if values:
        torch._foreach_mul_(values, float(factor))


def gradient_norms(source: Source) -> GradientNorms:
    """Total norm, largest element and mean size of an element of all gradients; zeros where there are none.

    Example:
        >>> import torch
        >>> from trimtab.compat.monitors import gradient_norms
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> (weight * torch.tensor([3.0, -4.0])).sum().backward()
        >>> gradient_norms([weight])
        GradientNorms(total_norm=5.0, max_grad=4.0, mean_grad_abs=3.5)
    """
    seen = snapshot(source)
    there = seen.present
    if not there.any():
        return GradientNorms(total_norm=0.0, max_grad=0.0, mean_grad_abs=0.0)
    sizes = seen.numel[there]
    return GradientNorms(
        total_norm=seen.global_norm,
        max_grad=float(seen.absmax[there].max()),
        mean_grad_abs=float((seen.abs_mean[there] * sizes).sum() / max(sizes.sum(), 1)),
    )


def gradient_percentiles(source: Source, q: Sequence[float] = (10, 50, 90, 99)) -> dict[str, float]:
    """Percentiles of the size of single gradient elements over a whole model; empty where there are no gradients.

    Of more than four million elements an even sample is taken; a NaN makes all of them NaN.

    Example:
        >>> import torch
        >>> from trimtab.compat.monitors import gradient_percentiles
        >>> weight = torch.zeros(101, requires_grad=True)
        >>> (weight * torch.arange(101.0)).sum().backward()
        >>> gradient_percentiles([weight])
        {'p10': 10.0, 'p50': 50.0, 'p90': 90.0, 'p99': 99.0}
    """
    if any(not 0 <= p <= 100 for p in q):
        raise InputError(f"q is {tuple(q)}; expected percentages between 0 and 100")
    flat = [measure.plain(g).reshape(-1) for g in _gradients(source)]
    flat = [t for t in flat if t.numel()]
    if not flat:
        return {}
    stride = max(math.ceil(sum(t.numel() for t in flat) / MOST_SORTED), 1)
    home = flat[0].device
    sizes = to_host(torch.cat([t[::stride].abs().to(home, torch.float32, non_blocking=True) for t in flat]))
    with np.errstate(all="ignore"):
        found = np.percentile(sizes, list(q)) if not np.isnan(sizes).any() else np.full(len(q), np.nan)
    return {f"p{p:g}": float(value) for p, value in zip(q, found, strict=True)}


def layer_gradient_scale(source: Source, output: str | None = None) -> dict[str, LayerScale]:
    """How large each weight matrix's gradient is per element, relative to that of the output layer.

    The output layer is the last weight matrix with a gradient, or the parameter named `output`: name it where a model
    does not define its layers in their order. Below 0.01 a layer's gradient is vanishing, above 100 exploding.

    Example:
        >>> import torch
        >>> from trimtab.compat.monitors import layer_gradient_scale
        >>> first, last = torch.zeros(2, 2, requires_grad=True), torch.zeros(2, 2, requires_grad=True)
        >>> (1e-4 * first + last).sum().backward()
        >>> layer_gradient_scale([("first", first), ("last", last)])["first"]
        LayerScale(name='first', scale=0.0001, state='vanishing')
    """
    seen = snapshot(source, detailed=False)
    rms = seen.rms
    rows = [i for i, shape in enumerate(seen.shapes) if len(shape) >= 2 and seen.present[i]]
    if output is not None and output not in seen.names:
        raise InputError(f"there is no parameter named {output!r}; expected one of {', '.join(seen.names[:8])}, ...")
    if not rows:
        return {}
    reference = rms[rows[-1] if output is None else seen.names.index(output)]

    def state(scale: float) -> str:
        return "vanishing" if scale < VANISHING else "healthy" if scale <= EXPLODING else "exploding"

    with np.errstate(all="ignore"):
        scales = {seen.names[i]: float(f"{rms[i] / reference:.6g}") for i in rows}
    return {name: LayerScale(name=name, scale=scale, state=state(scale)) for name, scale in scales.items()}


def effective_lr(lr: float, clip: float, norm: float) -> float:
    """The learning rate that would have the same effect without clipping: `lr * clip / norm` where that is smaller.

    Where every step is clipped this, not `lr`, is how fast an SGD-like optimizer learns: clipping only hides it.

    Example:
        >>> from trimtab.compat.monitors import effective_lr
        >>> effective_lr(0.5, clip=1.0, norm=4.0), effective_lr(0.5, clip=1.0, norm=0.5)
        (0.125, 0.5)
    """
    if math.isnan(norm):
        return math.nan
    return lr * min(1.0, clip / norm) if norm > 0 else lr


def _gradients(source: Source) -> list[Tensor]:
    return [p.grad for _, p in named_tensors(source) if p.grad is not None]


def _local(tensor: Tensor) -> Tensor:
    anything: Any = tensor
    return anything.to_local() if hasattr(tensor, "to_local") else tensor


def _norm(tensors: Sequence[Tensor]) -> float:
    return _total(tensors)[1] if tensors else 0.0


def _total(tensors: Sequence[Tensor]) -> tuple[Tensor, float]:
    """The norm of all tensors as the device has it and on the host; of sharded ones over all shards."""
    if any(hasattr(t, "full_tensor") for t in tensors):
        whole: Any = torch.nn.utils.get_total_norm([t.detach() for t in tensors])
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        return whole, number(whole)
    plain = [measure.plain(t) for t in tensors]
    total = measure.total(measure.norms(plain))
    norm = number(total)
    if not 1e-15 < norm < math.inf:  # squares that float32 cannot hold, too small or too large, or a bad value
        total = measure.total(wide_norms(plain))
        norm = number(total)
    return total, norm


def _scale(grads: Sequence[Tensor], factor: Tensor, coef: float) -> None:
    """Multiply gradients, on whatever devices they are, by a factor that the host knows too."""
    groups: dict[tuple[torch.device, bool], list[Tensor]] = {}
    for grad in map(_local, grads):
        groups.setdefault((grad.device, grad.dtype in (torch.float64, torch.complex128)), []).append(grad)
    for (device, wide), mine in groups.items():
        if wide:  # a factor in float32 would cost them half of their digits
            torch._foreach_mul_([measure.stored(g) for g in mine], coef)
        else:
            reflex.scale_by(mine, factor.to(device), coef)


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
        >>> import torch
        >>> from torch import nn
        >>> from trimtab.compat.monitors.norm_functions import named_tensors
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
    launches again each time on a GPU. A gradient is measured again only if float32 cannot hold its norm.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from trimtab.compat.monitors.norm_functions import snapshot
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
