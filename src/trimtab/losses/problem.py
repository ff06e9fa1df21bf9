"""What every backend is given: one prepared N-way problem, and what it must give back.

A tuple ``t = (i_1, .., i_N)`` takes one sample of each modality; its logit is ``z[t] = scale * s[t]`` with similarity
``s`` of `similarity.py`. The B tuples ``(i, .., i)`` are the positives; all others are negatives. A backend reduces the
*negatives* to one number per anchor ``(m, i)``, over all tuples with ``t_m = i``:

===========  ==========================================  =======================================================
kind         value ``[N, B]``                            cotangent ``g [N, B]`` becomes the weight of tuple ``t``
===========  ==========================================  =======================================================
lse          ``log sum exp z[t]``                        ``sum_m g_m[t_m] exp(z[t] - L_m[t_m])``
sum          ``sum z[t]``                                ``sum_m g_m[t_m]``
softplus     ``sum log(1 + exp(z[t] + bias))``           ``sigmoid(z[t] + bias) sum_m g_m[t_m]``
===========  ==========================================  =======================================================

The positives stay outside on purpose: ``softplus(L - z[i..i])`` keeps its gradient where ``logsumexp - z[i..i]`` has
rounded to zero. Everything else (smoothing, reductions, anchors) happens once, after the backend.

`make_problem` makes one of the caller's arguments: checks that say what is wrong, masks, upcast, comparable rows.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.losses.similarity import SIMILARITIES

Kind = Literal["lse", "sum", "softplus"]
Precision = Literal["ieee", "tf32", "bf16"]


class Context(Protocol):
    """What torch gives to both passes of an autograd function; subclasses say what the forward pass leaves on it."""

    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """What was saved; None is possible where None was given."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One prepared problem: inputs of one dtype and device, already normalised and masked."""

    xs: tuple[torch.Tensor, ...]
    """N tensors ``[B, D]`` in the dtype sums are kept in (float32, or float64 for float64 inputs)."""
    similarity: str
    scale: torch.Tensor
    """0-dim, the positive factor of the logits; may require grad."""
    bias: torch.Tensor | None = None
    """0-dim, only for kind ``softplus``; may require grad."""
    offset: torch.Tensor | None = None
    """0-dim without gradient, taken off every similarity: ``z = scale * (s - offset)``. A softmax does not see it, but
    logits near 0 keep digits that large ones round away. Given only to backends that know it (`backends.OFFSET`)."""
    present: torch.Tensor | None = None
    """``[N, B]`` bool; a tuple that uses an absent entry does not exist. None: all are there."""
    precision: Precision = "ieee"
    """Of the large matrix products alone; never of the sums."""
    chunk: int | None = None
    """Tuples per tile; None lets the backend choose. Any value gives the same loss."""
    share: tuple[int, int] = (0, 1)
    """``(k, n)``: only the k-th of n disjoint parts of all tuples, so that n processes can divide the work.

    Which tuples a part holds is the backend's business, as long as the n parts are a partition and are near equal in
    work. An anchor without tuples in this part gets ``-inf`` (lse) or 0 (sum, softplus), with zero gradient.
    """

    @property
    def num_modalities(self) -> int:
        """N."""
        return len(self.xs)

    @property
    def batch(self) -> int:
        """B."""
        return self.xs[0].shape[0]

    @property
    def width(self) -> int:
        """D."""
        return self.xs[0].shape[1]


NORMALIZE = ("auto", "rms", "l2", None)
PRECISION = ("auto", "fp64", "fp32", "tf32", "bf16")


def check_name(what: str, value: object, allowed: Iterable[object]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``, naming the nearest."""
    options = list(allowed)
    if any(value is option or (isinstance(value, str) and value == option) for option in options):
        return
    near = difflib.get_close_matches(str(value).lower(), [str(o) for o in options], 1, 0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{what} is {value!r}; expected one of {', '.join(map(repr, options))}.{hint}")


def check_xs(xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The modalities as a tuple of equally shaped floating-point matrices of one dtype and device, or a clear error."""
    if isinstance(xs, Tensor):
        if xs.dim() != 3:
            raise ValueError(f"xs is one tensor of shape {tuple(xs.shape)}; pass N tensors [B, D], or one [N, B, D].")
        xs = list(xs.unbind(0))
    if not isinstance(xs, (list, tuple)):
        raise TypeError(f"xs is a {type(xs).__name__}; pass a list or tuple of N tensors [B, D].")
    wrong = [type(x).__name__ for x in xs if not isinstance(x, Tensor)]
    if wrong:
        raise TypeError(f"xs holds a {wrong[0]}; every modality must be a tensor [B, D].")
    if len(xs) < 2:
        raise ValueError(f"xs holds {len(xs)} modalities; a contrastive loss needs at least 2.")
    for m, x in enumerate(xs):
        if x.dim() != 2:
            raise ValueError(f"modality {m} has shape {tuple(x.shape)}; expected [B, D]: one row per sample.")
        if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise TypeError(f"modality {m} is {x.dtype}; expected float16, bfloat16, float32 or float64.")
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise TypeError("a loss cannot be recorded by torch.jit.trace: its steps depend on sizes; use torch.compile.")
    shapes = [tuple(x.shape) for x in xs]
    if len(set(shapes)) > 1:
        raise ValueError(f"the modalities differ in shape: {shapes}; all must be [B, D] with the same B and D.")
    if len({x.device for x in xs}) > 1:
        raise ValueError(f"the modalities are on different devices: {[str(x.device) for x in xs]}; move them to one.")
    if xs[0].device.type == "meta":
        raise ValueError("the modalities are on the meta device and hold no numbers; nway_cost needs the sizes alone.")
    if 0 in shapes[0]:
        raise ValueError(f"the modalities have shape {shapes[0]}; B and D must be at least 1.")
    return tuple(xs)


def check_mask(mask: Tensor | None, xs: Sequence[Tensor]) -> Tensor | None:
    """The mask as ``[N, B]`` bool on the device of the modalities."""
    if mask is None:
        return None
    shape = (len(xs), xs[0].shape[0])
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"mask is {getattr(mask, 'dtype', type(mask).__name__)}; expected a bool tensor {list(shape)}.")
    if tuple(mask.shape) != shape:
        turn = " Transpose it." if tuple(mask.shape) == shape[::-1] else ""
        raise ValueError(f"mask has shape {tuple(mask.shape)}; expected [N, B] = {shape}, True = present.{turn}")
    return mask.to(xs[0].device)


def check_anchors(anchors: str | Sequence[int], num: int) -> list[int]:
    """The anchor modalities as a list of indices."""
    if isinstance(anchors, str):
        check_name("anchors", anchors, ("all",))
        return list(range(num))
    found = list(anchors)
    if not found or len(set(found)) < len(found) or any(not isinstance(m, int) or not 0 <= m < num for m in found):
        raise ValueError(f"anchors is {anchors!r}; expected 'all' or different modalities among 0 .. {num - 1}.")
    return found


def check_smoothing(value: float, objective: str) -> None:
    """Raise ValueError unless label smoothing is in [0, 1) and means something."""
    if not 0 <= value < 1:
        raise ValueError(f"label_smoothing is {value!r}; expected a number in [0, 1).")
    if value > 0 and objective == "sigmoid":
        raise ValueError("label_smoothing has no meaning for objective 'sigmoid', which has no softmax; leave it at 0.")


def as_factor(what: str, value: float | Tensor, like: Tensor, *, positive: bool) -> Tensor:
    """A number or one-element tensor as 0-dim tensor like ``like``; numbers are checked, tensors never waited for."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.dim() > 1:
            raise ValueError(f"{what} has shape {tuple(value.shape)}; expected a number or a tensor with one element.")
        if not value.dtype.is_floating_point:
            raise TypeError(f"{what} is a tensor of {value.dtype}; expected a floating-point one.")
        return value.reshape(()).to(device=like.device, dtype=like.dtype)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{what} is {value!r}; expected a number or a tensor with one element.") from None
    if math.isnan(number) or (positive and not 0 < number < math.inf):
        raise ValueError(f"{what} is {value!r}; expected a {'positive, finite ' if positive else ''}number.")
    return torch.full((), number, dtype=like.dtype, device=like.device)


def normalise(x: Tensor, how: str | None) -> Tensor:
    """Rows of length 1 (l2) or root mean square 1 (rms), at any magnitude; a zero row stays zero, its gradient too."""
    return x if how is None else _comparable([x], x.dtype, how, None)[0]


def _comparable(
    xs: Sequence[Tensor], dtype: torch.dtype, how: str | None, present: Tensor | None
) -> tuple[Tensor, ...]:
    """The modalities as ``dtype``, absent rows zero, all rows normalised."""
    if how is None:
        rows = tuple(x.to(dtype) for x in xs)
        if present is None:
            return rows
        return tuple(x.masked_fill(~there.unsqueeze(-1), 0.0) for x, there in zip(rows, present, strict=True))
    if xs[0].is_cuda:
        from trimtab.losses.triton import row_launcher

        if row_launcher.supports_unit_rows(xs, dtype):
            return row_launcher.unit_rows(xs, how, present)
    together: Tensor = _Normalised.apply(dtype, how, present, *xs)  # type: ignore[no-untyped-call]
    return together.unbind(0)


class RowsContext(Context, Protocol):
    """What normalised rows leave for the backward pass: the squared length of each, and the dtypes they came in."""

    squared: float
    dtypes: list[torch.dtype]


class _Normalised(torch.autograd.Function):
    """One buffer from upcast to unit rows, one more in the backward pass: inputs can be most of what is in memory."""

    @staticmethod
    def forward(ctx: RowsContext, dtype: torch.dtype, how: str, present: Tensor | None, *xs: Tensor) -> Tensor:
        rows = torch.empty((len(xs), *xs[0].shape), dtype=dtype, device=xs[0].device)
        for row, x in zip(rows, xs, strict=True):
            row.copy_(x)
        if present is not None:
            rows.masked_fill_(~present.unsqueeze(-1), 0.0)
        top = torch.maximum(rows.amax(-1, keepdim=True), -rows.amin(-1, keepdim=True))
        zero = top == 0
        # Divided by its largest entry a row can neither overflow nor vanish when squared.
        rows.div_(top.masked_fill(zero, 1.0))
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        ctx.squared = 1.0
        if how == "rms":
            length = length / math.sqrt(rows.shape[-1])
            ctx.squared = float(rows.shape[-1])
        rows.div_(length.masked_fill(zero, 1.0))
        ctx.dtypes = [x.dtype for x in xs]
        ctx.save_for_backward(rows, length, top.masked_fill(zero, torch.inf))  # over infinity: no gradient
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: RowsContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, length, top = ctx.saved_tensors
        # All at once where operations count, one after the other where memory does.
        small = rows.numel() < 1 << 22
        parts = [(grad, rows, length, top)] if small else zip(grad, rows, length, top, strict=True)
        found: list[Tensor] = []
        for g, row, size, largest in parts:
            along = (g * row).sum(-1, keepdim=True).div_(-ctx.squared)
            across = torch.addcmul(g, row, along).div_(size.masked_fill(size == 0, 1.0)).div_(largest)
            found.extend(across.unbind(0) if small else [across])
        wanted = zip(found, ctx.dtypes, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(g.to(dtype) if need else None for g, dtype, need in wanted)


def make_problem(
    xs: Sequence[Tensor],
    similarity: str,
    *,
    logit_scale: float | Tensor = 1.0,
    logit_bias: float | Tensor | None = None,
    normalize: str | None = "auto",
    precision: str = "auto",
    mask: Tensor | None = None,
    chunk: int | None = None,
    double: bool = False,
) -> Problem:
    """The problem a backend is given. Absent rows become zero first: whatever they held, no NaN gets out of them.

    Sums are kept in float32, or in float64 for float64 inputs, ``precision="fp64"`` and ``double``.
    """
    check_name("similarity", similarity, SIMILARITIES)
    check_name("normalize", normalize, NORMALIZE)
    check_name("precision", precision, PRECISION)
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk is {chunk!r}; expected a positive number of tuples per tile, or None.")
    xs = check_xs(xs)
    dtypes = {x.dtype for x in xs}
    dtype = torch.float64 if double or precision == "fp64" or torch.float64 in dtypes else torch.float32
    present = check_mask(mask, xs)
    how = SIMILARITIES[similarity].normalize if normalize == "auto" else normalize
    if similarity == "paircos":
        how = "l2"  # a cosine, whatever was asked for
    rows = _comparable(xs, dtype, how, present)
    scale = as_factor("logit_scale", logit_scale, rows[0], positive=True)
    if similarity == "mip" and how == "rms":
        scale = scale / rows[0].shape[-1]  # the mean over the width instead of the sum
    return Problem(
        xs=rows,
        similarity=similarity,
        scale=scale,
        bias=None if logit_bias is None else as_factor("logit_bias", logit_bias, rows[0], positive=False),
        present=present,
        precision=_precision(precision, dtypes, rows[0]),
        chunk=chunk,
    )


def _precision(wanted: str, dtypes: set[torch.dtype], like: Tensor) -> Precision:
    """Of large products: as exact as the inputs deserve. Half-precision products pay off on accelerators only."""
    if like.dtype == torch.float64 or like.device.type == "cpu" or wanted == "fp32":
        return "ieee"
    if wanted == "auto":
        return "bf16" if dtypes <= {torch.bfloat16, torch.float16} else "ieee"
    return cast(Precision, wanted)
