"""Why an operation made NaN or Inf: each reason's test on the operands, in words, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trimtab.trace.values import bad_in, tensors_in, where_bad

HALF = (torch.float16, torch.bfloat16)
WIDER = (torch.bfloat16, torch.float32, torch.float64)
"""What may hold a value that another type does not, cheapest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One reason: its name, what happened, and what to do."""

    name: str
    words: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The operation that failed, its operands as they were, and what came of it."""

    op: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    result: Tensor | None = None
    forward_op: str = ""  # in the backward pass: the operation whose gradient this is
    node: str = ""
    makers: tuple[str, ...] = ()  # which operations made the operands, in order
    absorbed: bool = False  # an operand was bad in the forward pass already, which did not reach the loss
    own_backward: bool = False  # in the backward of the user's own autograd function

    @property
    def name(self) -> str:
        """The operation without its overload: `log` for `aten.log_.default`."""
        return base_name(str(self.op))

    @property
    def forward_name(self) -> str:
        """The same of the forward operation, in the backward pass."""
        return base_name(self.forward_op) if self.forward_op else ""

    def tensor(self, place: int) -> Tensor | None:
        """The operand at a place, where it is a tensor of numbers."""
        value = self.args[place] if place < len(self.args) else None
        return value if isinstance(value, Tensor) and not value.is_complex() else None

    def number(self, place: int) -> float | None:
        """The operand at a place, where it is one number."""
        value = self.args[place] if place < len(self.args) else None
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            return float(value)
        return float(value) if isinstance(value, int | float) else None

    def is_bad(self, like: Tensor) -> Tensor:
        """Where the result is bad, in the shape of an operand where that is possible, else everywhere."""
        if self.result is None or self.result.shape != like.shape:
            return torch.ones_like(like, dtype=torch.bool)
        return where_bad(self.result).to(like.device)

    def has(self, place: int, test: Callable[[Tensor], Tensor]) -> bool:
        """Whether the operand passes a test at some place where the result is bad."""
        value = self.tensor(place)
        if value is None:
            single = self.number(place)
            return single is not None and bool(test(_number(single)))
        return bool((test(value) & self.is_bad(value)).any())


Test = Callable[[Failure], bool]


def base_name(op: str) -> str:
    """An operation's own name.

    Example:
        >>> base_name("aten.log_.default"), base_name("aten._log_softmax.default")
        ('log', '_log_softmax')
    """
    parts = op.split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).rstrip("_")


def reason_of(failure: Failure) -> Reason:
    """The first reason whose test holds; one for operations that nobody listed comes last.

    Example:
        >>> log = Failure(op=torch.ops.aten.log.default, args=(torch.zeros(1),), result=torch.tensor([-math.inf]))
        >>> reason_of(log).name
        'log-of-zero'
    """
    half = any(t.dtype in HALF for t in tensors_in(failure.args)) or (
        failure.result is not None and failure.result.dtype in HALF
    )
    if half and (too_large := overflow_of(failure)) is not None:
        return too_large
    listed = (*FORWARD, *BACKWARD) if failure.own_backward else BACKWARD if failure.node else FORWARD
    for reason, test in listed:
        if _holds(test, failure):
            return reason
    if not half and (too_large := overflow_of(failure)) is not None:
        return too_large
    for reason, test in FALLBACK:
        if _holds(test, failure):
            return reason
    return UNKNOWN


def _holds(test: Test, failure: Failure) -> bool:
    try:
        return test(failure)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return False  # operands of another kind than the test was made for


# -- the range of a type --------------------------------------------------------------------------------------------


def overflow_of(failure: Failure) -> Reason | None:
    """Whether the same operation on the same operands is finite in a wider type, and which type would hold it."""
    result = failure.result
    if result is None or not result.is_floating_point():
        return None
    wide = _recomputed(failure)
    if wide is None or bad_in(wide):
        return None
    largest = float(wide.abs().max()) if wide.numel() else 0.0
    own = result.dtype
    if largest <= torch.finfo(own).max:
        holds = "float32" if own in HALF else "float64"  # what lies in between was too large
    else:
        fits = [d for d in WIDER if d is not own and torch.finfo(d).max >= largest]
        holds = _short(fits[0]) if fits else "float64"
    return Reason(
        name="dtype-overflow",
        words=f"the result ({largest:.3g}) is beyond what {_short(own)} holds ({torch.finfo(own).max:.3g}); "
        f"{holds} would have held it",
        remedy=f"compute this operation in {holds}"
        + (" (leave autocast for it, or use bfloat16 autocast)" if own is torch.float16 else "")
        + ", or keep its operands smaller: normalise, clip, or lower the learning rate",
    )


def _recomputed(failure: Failure) -> Tensor | None:
    if failure.name in ("_to_copy", "copy", "to"):
        source = failure.args[1] if failure.name == "copy" and len(failure.args) > 1 else failure.args[0]
        return source.detach().double() if isinstance(source, Tensor) else None
    try:
        args, kwargs = _widened(failure.args), _widened(dict(failure.kwargs))
        if "dtype" in kwargs and isinstance(kwargs["dtype"], torch.dtype) and kwargs["dtype"].is_floating_point:
            kwargs["dtype"] = torch.float64
        # What an operation computes in a type that it is told: the gradient of a softmax, for one.
        args = tuple(torch.float64 if isinstance(a, torch.dtype) and a.is_floating_point else a for a in args)
        out = [t for t in tensors_in(failure.op(*args, **kwargs)) if t.is_floating_point()]
        same = [t for t in out if failure.result is not None and t.shape == failure.result.shape]
        return (same or out)[0] if out else None
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None  # not every operation exists in float64


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().double() if value.is_floating_point() else value.detach().cpu()
    if isinstance(value, Mapping):
        return {k: _widened(v) for k, v in value.items() if k != "device"}
    if isinstance(value, list | tuple):
        return type(value)([_widened(v) for v in value])
    return value


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- tests ----------------------------------------------------------------------------------------------------------


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def _is_zero(x: Tensor) -> Tensor:
    return x == 0


def _is_negative(x: Tensor) -> Tensor:
    return x < 0


def _beyond_one(x: Tensor) -> Tensor:
    return x.abs() > 1


def _at_one(x: Tensor) -> Tensor:
    return x.abs() == 1


def _of(names: Sequence[str], place: int, test: Callable[[Tensor], Tensor]) -> Test:
    return lambda failure: failure.name in names and failure.has(place, test)


DIVISIONS = ("div", "true_divide", "divide", "remainder", "fmod", "addcdiv")


def _divisor(failure: Failure) -> int:
    return 2 if failure.name == "addcdiv" else 1


def _divides_by_zero(failure: Failure) -> bool:
    return failure.name in DIVISIONS and _has_zero(failure.args[_divisor(failure)])


def _has_zero(value: object) -> bool:
    if isinstance(value, Tensor):
        return bool((value == 0).any())
    return isinstance(value, int | float) and value == 0


def _divisor_made_by(*names: str) -> Test:
    def test(failure: Failure) -> bool:
        if not _divides_by_zero(failure) or not failure.makers:
            return False
        place = sum(isinstance(a, Tensor) for a in failure.args[: _divisor(failure)])
        maker = failure.makers[place] if place < len(failure.makers) else ""
        return base_name(maker) in names if maker else False

    return test


def _zero_by_zero(failure: Failure) -> bool:
    if not _divides_by_zero(failure):
        return False
    return failure.result is not None and bool(torch.isnan(failure.result).any())


def _row_is_masked(failure: Failure) -> bool:
    if failure.name not in ("_softmax", "softmax", "_log_softmax", "log_softmax", "_safe_softmax", "logsumexp"):
        return False
    x, dim = failure.tensor(0), failure.args[1] if len(failure.args) > 1 else -1
    return x is not None and bool((x == -math.inf).all(dim=dim).any())


def _attention_is_masked(failure: Failure) -> bool:
    if "scaled_dot_product" not in failure.name:
        return False
    masks = [t for t in tensors_in((failure.args[3:], failure.kwargs)) if t.is_floating_point() and t.dim() >= 2]
    flags = [t for t in tensors_in((failure.args[3:], failure.kwargs)) if t.dtype is torch.bool]
    return any(bool((m == -math.inf).all(dim=-1).any()) for m in masks) or any(
        bool((~m).all(dim=-1).any()) for m in flags
    )


def _no_target_is_left(failure: Failure) -> bool:
    if not failure.name.startswith(("nll_loss", "cross_entropy")):
        return False
    target = failure.args[1]
    ignored = next((a for a in reversed(failure.args) if isinstance(a, int) and not isinstance(a, bool)), -100)
    return bool(target.numel() == 0 or (target == ignored).all())


def _mean_of_nothing(failure: Failure) -> bool:
    x = failure.tensor(0)
    return (
        failure.name in ("mean", "nanmean", "median", "nll_loss_forward", "mse_loss")
        and x is not None
        and not x.numel()
    )


def _spread_of_one(failure: Failure) -> bool:
    x = failure.tensor(0)
    if failure.name not in ("std", "var", "std_mean", "var_mean") or x is None:
        return False
    dims = failure.args[1] if len(failure.args) > 1 and isinstance(failure.args[1], list | tuple) else None
    num = math.prod(x.shape[d] for d in dims) if dims else x.numel()
    return num <= 1


def _power(failure: Failure, test: Callable[[Tensor, Tensor], Tensor]) -> bool:
    if failure.name not in ("pow", "float_power") or len(failure.args) < 2:
        return False
    base, exponent = (a if isinstance(a, Tensor) else _number(float(a)) for a in failure.args[:2])
    return bool(test(base, exponent).any())


def _norm_variance(failure: Failure) -> bool:
    if "batch_norm" not in failure.name:
        return False
    variances = [t for t in tensors_in(failure.args) if t.dim() == 1]
    return len(variances) >= 4 and bool((variances[3] < 0).any())


def _no_spread(failure: Failure) -> bool:
    return failure.name in (
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "_fused_rms_norm",
        "rms_norm",
    )


def _is_norm_layer_with_constant(failure: Failure) -> bool:
    return _no_spread(failure) and all(not bad_in(t) for t in tensors_in(failure.args))


def _at(name: str | Sequence[str], *tests: Callable[[Tensor], Tensor]) -> Test:
    """In the backward pass of these operations: an operand of the failing one passes a test somewhere."""
    names = (name,) if isinstance(name, str) else name

    def test(failure: Failure) -> bool:
        if failure.forward_name not in names and not failure.node.lower().startswith(tuple(n + "b" for n in names)):
            return False
        values = [t for t in tensors_in(failure.args) if t.is_floating_point()]
        return any(bool(one(v).any()) for v in values for one in tests)

    return test


def _in_backward_of(*names: str) -> Test:
    return lambda failure: failure.forward_name in names


def _inf_by(failure: Failure, *names: str) -> bool:
    return failure.name in names and any(bool(torch.isinf(t).any()) for t in tensors_in(failure.args))


# -- the reasons ----------------------------------------------------------------------------------------------------

EPS = "add a small eps"
FORWARD: tuple[tuple[Reason, Test], ...] = (
    (
        Reason(
            name="log-of-zero",
            words="the logarithm of 0",
            remedy="clamp what goes into the log, log(x.clamp_min(1e-8)), or use log_softmax or logsigmoid",
        ),
        _of(("log", "log2", "log10"), 0, _is_zero),
    ),
    (
        Reason(
            name="log-of-negative",
            words="the logarithm of a negative number",
            remedy="find out why it is negative; clamp it above 0, or use log_softmax or logsigmoid on the logits",
        ),
        _of(("log", "log2", "log10"), 0, _is_negative),
    ),
    (
        Reason(name="log1p-at-minus-one", words="log1p of -1 or less", remedy="clamp what goes into log1p above -1"),
        _of(("log1p",), 0, lambda x: x <= -1),
    ),
    (
        Reason(
            name="sqrt-of-negative",
            words="the square root of a negative number",
            remedy="clamp it before the root, sqrt(x.clamp_min(0) + eps): rounding can make a variance negative",
        ),
        _of(("sqrt", "rsqrt"), 0, _is_negative),
    ),
    (
        Reason(
            name="division-by-zero",
            words="one divided by a root of 0",
            remedy=f"{EPS} inside: rsqrt(x + eps)",
        ),
        _of(("rsqrt",), 0, _is_zero),
    ),
    (
        Reason(
            name="zero-std",
            words="a division by a standard deviation of 0: all values are the same",
            remedy=f"{EPS} to the standard deviation, (x - mean) / (std + eps), or leave constant rows out",
        ),
        _divisor_made_by("std", "var", "std_mean", "var_mean"),
    ),
    (
        Reason(
            name="zero-norm",
            words="a division by a norm of 0: the vector is all zeros",
            remedy="use torch.nn.functional.normalize, or clamp the norm: x / norm.clamp_min(eps)",
        ),
        _divisor_made_by("linalg_vector_norm", "norm", "linalg_norm", "frobenius_norm"),
    ),
    (
        Reason(
            name="mean-of-nothing",
            words="a mean over nothing: the count or the sum it is divided by is 0",
            remedy="clamp the count, total / count.clamp_min(1), or skip a batch without anything to count",
        ),
        _divisor_made_by("sum", "count_nonzero", "nansum"),
    ),
    (
        Reason(
            name="zero-by-zero",
            words="0 divided by 0",
            remedy=f"{EPS} to the divisor, or select the entries with a divisor above 0 before dividing",
        ),
        _zero_by_zero,
    ),
    (
        Reason(
            name="division-by-zero",
            words="a division by 0",
            remedy=f"{EPS} to the divisor, or clamp it away from 0",
        ),
        _divides_by_zero,
    ),
    (
        Reason(name="division-by-zero", words="one divided by 0", remedy=f"{EPS} to the divisor"),
        _of(("reciprocal",), 0, _is_zero),
    ),
    (
        Reason(
            name="fully-masked-softmax",
            words="a softmax over nothing: every entry of a row is masked with -inf",
            remedy="leave one entry of every row unmasked, mask with a large negative number instead of -inf, "
            "or set the result of such rows to 0",
        ),
        lambda failure: _row_is_masked(failure) or _attention_is_masked(failure),
    ),
    (
        Reason(
            name="exp-overflow",
            words="exp of a number that is too large",
            remedy="subtract the maximum first, or use logsumexp, softmax or softplus; clamp the exponent",
        ),
        _of(("exp", "exp2", "expm1", "sinh", "cosh"), 0, lambda x: x.abs() > 11),
    ),
    (
        Reason(
            name="all-targets-ignored",
            words="a mean over nothing: every target of the batch is ignored",
            remedy="skip batches without a target that counts, or divide the sum by max(count, 1)",
        ),
        _no_target_is_left,
    ),
    (
        Reason(
            name="mean-of-nothing",
            words="a mean over nothing: the tensor is empty",
            remedy="skip the mean where nothing is selected",
        ),
        _mean_of_nothing,
    ),
    (
        Reason(
            name="spread-of-one-value",
            words="the standard deviation of a single value",
            remedy="use unbiased=False (correction=0), or leave out batches of one (drop_last=True)",
        ),
        _spread_of_one,
    ),
    (
        Reason(
            name="pow-of-negative",
            words="a broken power of a negative number",
            remedy="take the power of x.abs() or of x.clamp_min(0)",
        ),
        lambda failure: _power(failure, lambda x, e: (x < 0) & (e != e.round())),
    ),
    (
        Reason(
            name="zero-to-negative-power",
            words="a negative power of 0",
            remedy=f"{EPS} to the base",
        ),
        lambda failure: _power(failure, lambda x, e: (x == 0) & (e < 0)),
    ),
    (
        Reason(
            name="outside-of-domain",
            words="acos or asin of a number beyond 1",
            remedy="clamp it, acos(x.clamp(-1 + 1e-7, 1 - 1e-7)): rounding can push a cosine beyond 1",
        ),
        _of(("acos", "asin"), 0, _beyond_one),
    ),
    (
        Reason(
            name="outside-of-domain",
            words="an operation at or beyond the border of where it is defined",
            remedy="clamp its argument a little inside of the border",
        ),
        lambda failure: (
            failure.name in ("atanh", "erfinv", "acosh", "logit", "lgamma", "digamma", "polygamma", "tan", "ndtri")
        ),
    ),
    (
        Reason(
            name="negative-variance",
            words="the running variance of a BatchNorm is negative",
            remedy="restore running_var from a checkpoint, or reset_running_stats(); find out what wrote to it",
        ),
        _norm_variance,
    ),
    (
        Reason(
            name="zero-variance",
            words="a normalisation of values without any spread, with no eps to divide by",
            remedy="give the normalisation layer an eps above 0, such as 1e-5",
        ),
        _is_norm_layer_with_constant,
    ),
    (
        Reason(
            name="ctc-target-too-long",
            words="a CTC loss whose target is longer than its input",
            remedy="use zero_infinity=True, or leave out samples whose target does not fit",
        ),
        lambda failure: "ctc_loss" in failure.name,
    ),
    (
        Reason(
            name="singular-matrix",
            words="a matrix that cannot be inverted or decomposed",
            remedy="add a small multiple of the identity matrix to it",
        ),
        lambda failure: failure.name.startswith(("linalg_", "_linalg_", "inverse", "cholesky", "_cholesky")),
    ),
)

BACKWARD: tuple[tuple[Reason, Test], ...] = (
    (
        Reason(
            name="sqrt-at-zero",
            words="the gradient of a square root is infinite at 0",
            remedy=f"{EPS} inside the root: sqrt(x + eps)",
        ),
        _at(("sqrt", "rsqrt"), _is_zero),
    ),
    (
        Reason(
            name="guarded-only-in-forward",
            words="the forward pass left a bad value out, but its gradient is 0 times that value, which is NaN",
            remedy="make the input safe before the operation, not its result: f(torch.where(ok, x, 1.0))",
        ),
        lambda failure: failure.absorbed,
    ),
    (
        Reason(
            name="log-at-zero",
            words="the gradient of a logarithm is infinite at 0",
            remedy="clamp what goes into the log, also where torch.where leaves its result out",
        ),
        _at(("log", "log2", "log10", "log1p"), _is_zero),
    ),
    (
        Reason(
            name="norm-at-zero",
            words="the gradient of a norm or distance is not defined at 0",
            remedy=f"{EPS}: sqrt(x.square().sum() + eps), or the squared norm",
        ),
        _in_backward_of("linalg_vector_norm", "norm", "dist", "_cdist_forward", "_euclidean_dist", "hypot"),
    ),
    (
        Reason(
            name="std-at-zero",
            words="the gradient of a standard deviation is infinite at 0",
            remedy="use sqrt(x.var(...) + eps) instead of x.std(...)",
        ),
        _in_backward_of("std", "std_mean"),
    ),
    (
        Reason(
            name="acos-at-one",
            words="the gradient of acos or asin is infinite at 1 and -1",
            remedy="clamp it, acos(x.clamp(-1 + 1e-7, 1 - 1e-7)), or use atan2",
        ),
        _in_backward_of("acos", "asin", "acosh", "atanh", "erfinv", "logit"),
    ),
    (
        Reason(
            name="pow-at-zero",
            words="the gradient of a power below 1 is infinite at 0",
            remedy=f"{EPS} to the base: (x + eps) ** p",
        ),
        _in_backward_of("pow", "float_power"),
    ),
    (
        Reason(
            name="atan2-at-zero",
            words="the gradient of atan2 is not defined at (0, 0)",
            remedy=f"{EPS} to its second argument where both are 0",
        ),
        _in_backward_of("atan2"),
    ),
    (
        Reason(
            name="division-by-zero",
            words="the gradient of a division by 0",
            remedy=f"{EPS} to the divisor, also where torch.where leaves the result out",
        ),
        _in_backward_of("div", "reciprocal", "true_divide", "addcdiv"),
    ),
    (
        Reason(
            name="own-backward",
            words="the backward of an autograd function of your own",
            remedy="check its formula at these values with torch.autograd.gradcheck",
        ),
        lambda failure: failure.own_backward,
    ),
)

FALLBACK: tuple[tuple[Reason, Test], ...] = (
    (
        Reason(
            name="zero-times-inf",
            words="0 times infinity",
            remedy="mask by torch.where or masked_fill instead of multiplying by 0",
        ),
        lambda failure: _inf_by(failure, "mul", "bmm", "mm", "addmm", "baddbmm", "dot", "mv"),
    ),
    (
        Reason(
            name="inf-minus-inf",
            words="infinity minus infinity",
            remedy="find where the infinities come from; mask with a large negative number instead of -inf",
        ),
        lambda failure: _inf_by(failure, "sub", "add", "sum", "mean", "rsub", "logaddexp", "cumsum", "var", "std"),
    ),
    (
        Reason(
            name="inf-by-inf",
            words="infinity divided by infinity",
            remedy="find where the infinities come from, and keep them out of the division",
        ),
        lambda failure: _inf_by(failure, *DIVISIONS),
    ),
)
UNKNOWN = Reason(
    name="bad-result",
    words="its result is not finite although its operands are",
    remedy="look at the operands' smallest and largest values: the operation is not defined there, or overflows",
)
MASK_REACHED = Reason(
    name="mask-reached-loss",
    words="an infinity that was put there on purpose, as a mask, reached the loss",
    remedy="check that no target points at a masked entry: leave it open, or mask with a large negative number such as "
    "-1e4 instead of -inf",
)
BAD_INPUT = Reason(
    name="bad-input",
    words="the data held NaN or Inf already",
    remedy="find the sample in the data set, and repair or drop such samples when loading",
)
BAD_PARAMETER = Reason(
    name="bad-weight",
    words="the weight held NaN or Inf already",
    remedy="go back to the last good checkpoint; find out which step or code wrote to it",
)
BAD_UPDATE = Reason(
    name="bad-update",
    words="the optimizer's update was not finite although the gradients were",
    remedy="lower the learning rate; look at the optimizer's eps and its state",
)
