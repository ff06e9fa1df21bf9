"""Computes a loss again from the graph that autograd kept of it, where only the model's call can be run again.

By the time a step is known to be bad, backward has freed the tensors that the graph saved. Its nodes still say which
operations there were, in which order and with which numbers: from the model's output, run again, most of a loss can be
computed again. Tensors from outside (targets, masks, weights of samples) are gone, unless the batch was told.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.torchutil.autograd_graph import LOSS_NODES, GraphWalk

MAX_NODES, MAX_LOOKS = 4096, 65536
LEFT_OUT = "part of the loss is not known and was left out; give Guard(step_fn=...) to have all of it run again"
BY_NAME = "judged by the names of autograd's operations alone; give Guard(step_fn=...) for a certain answer"
_LEAF = 1 << 62
FRAGILE = {
    *("Div", "Log", "Log2", "Log10", "Log1p", "Sqrt", "Rsqrt", "Pow", "Exp", "Reciprocal", "Acos", "Asin", "Std"),
    *("Norm", "LinalgVectorNorm", "Prod"),
}
"""Operations that make bad values of good ones, where nothing else is known."""


class _Began(Protocol):
    @property
    def sequence(self) -> int:
        """Autograd's count of operations when a call began."""


@dataclass(slots=True)
class Rebuilt:
    """The loss, computed again, and what had to be left out on the way: the names of nodes, the model's first.

    `uncertain` are those, too, that were computed from values of which something was left out.
    """

    loss: Tensor | None = None
    left_out: list[str] = field(default_factory=list)
    uncertain: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Span:
    """One call of the model: autograd's count of operations when it began, their number, and its outputs of now."""

    first: int
    num: int
    outputs: Sequence[Tensor]

    def holds(self, number: int) -> bool:
        """Whether an operation belongs to the call."""
        return self.first <= number < self.first + self.num


@dataclass(slots=True)
class LossGraph:
    """The part of a graph behind a loss that lies outside of the model's calls, in the order of `spans`.

    `data` are tensors that may have been targets.
    """

    loss: Tensor
    spans: Sequence[Span]
    data: Sequence[Tensor] = ()

    def rebuild(self) -> Rebuilt:
        """From what the model gave when it was run again; without a loss where nothing in the graph leads to it."""
        nodes = [n for n in GraphWalk(self.loss, follow=self._is_outside, max_looks=MAX_NODES) if self._is_outside(n)]
        made = Rebuilt()
        values: dict[Any, Tensor | None] = {}
        doubtful: set[Any] = set()
        for node in sorted(nodes, key=_number):  # in the order they were computed in
            inputs = [self._value(following, place, values) for following, place in node.next_functions]
            before = len(made.left_out)
            values[node] = value = self._computed(node, inputs, made)
            unsure = value is None or len(made.left_out) > before
            if unsure or any(following in doubtful for following, _ in node.next_functions):
                doubtful.add(node)
                if not _is_sound_power(node):
                    made.uncertain.append(str(node.name()))
        made.loss = values.get(self.loss.grad_fn)
        return made

    def _is_outside(self, node: Any) -> bool:
        number = _number(node)
        return self.spans[0].first <= number < _LEAF and not any(one.holds(number) for one in self.spans)

    def _value(self, node: Any, place: int, values: dict[Any, Tensor | None]) -> Tensor | None:
        if node is None or node in values:
            return None if node is None else values[node]
        if _number(node) >= _LEAF:
            variable = getattr(node, "variable", None)
            return variable if isinstance(variable, Tensor) else None
        outputs = next((one.outputs for one in self.spans if one.holds(_number(node))), ())
        alike = [
            o for o in outputs if o.grad_fn is not None and o.grad_fn.name() == node.name() and o.output_nr == place
        ]
        return alike[0] if alike else None

    def _computed(self, node: Any, inputs: list[Tensor | None], made: Rebuilt) -> Tensor | None:
        known = [value for value in inputs if value is not None]
        if not known:
            return None
        name = kind_of(node)
        try:
            if (target := self._with_target(node, name, known[0])) is not None:
                return target
            if name in BINARY and len(inputs) == 2 and len(known) == 2:
                return BINARY[name](known[0], known[1])
            if name in BINARY and len(inputs) == 2 and (other := self._other(node, known[0])) is not None:
                return BINARY[name](known[0], other) if inputs[0] is not None else BINARY[name](other, known[0])
            if name in UNARY and len(inputs) == 1:
                return UNARY[name](known[0], node)
        except (RuntimeError, TypeError, AttributeError, ValueError, IndexError):
            pass  # an operation of another form than expected is one that is left out
        made.left_out.append(str(node.name()))
        if name == "Rsub" and len(inputs) == 1:  # what it is taken from is not kept: nearly always 1
            return 1.0 - known[0]
        # As if the other operand changed nothing; a weight by itself is not what the loss is made of.
        return next((value for value in known if not value.is_leaf), None)

    def _other(self, node: Any, known: Tensor) -> Tensor | None:
        """The operand without a gradient, where only one tensor of the batch can have been it."""
        if all(following is not None for following, _ in node.next_functions) or not known.dim():
            return None
        alike = [t for t in self.data if t.is_floating_point() and t.shape == known.shape]
        return alike[0] if len({t.data_ptr() for t in alike}) == 1 else None

    def _with_target(self, node: Any, name: str, x: Tensor) -> Tensor | None:
        """A loss function, where the tensor it compared with can be found."""
        if name not in LOSSES:
            return None
        reduction = ("none", "mean", "sum")[int(node._saved_reduction)]
        if name.startswith("NllLoss"):
            shape = x.shape[:1] + x.shape[2:]
            targets = [t for t in self.data if t.dtype is torch.int64 and _fits(t, shape)]
            ignored = _signed(node._saved_ignore_index)
            return (
                functional.nll_loss(x, targets[0].reshape(shape), ignore_index=ignored, reduction=reduction)
                if targets
                else None
            )
        same = [t for t in self.data if t.is_floating_point() and t.shape == x.shape]
        return LOSSES[name](x, same[0], reduction=reduction) if same else None


def suspects(made: Rebuilt) -> list[str]:
    """Of the nodes that are not certain those that may have made the bad value, the likeliest first.

    First loss functions, then operations that make bad values of good ones, then those that were given what is not
    known.

    Example:
        >>> suspects(Rebuilt(left_out=["MulBackward0"], uncertain=["MulBackward0", "DivBackward0"]))
        ['DivBackward0', 'MulBackward0']
    """
    losses = [n for n in made.left_out if is_loss(n)]
    fragile = [n for n in (*made.left_out, *made.uncertain) if is_fragile(n)]
    return losses + fragile + made.left_out


def is_fragile(node: str) -> bool:
    """Whether a node's operation makes bad values of good ones.

    Example:
        >>> is_fragile("LogBackward0"), is_fragile("MulBackward0")
        (True, False)
    """
    return _bare(node) in FRAGILE


def calls_behind(loss: Tensor | None, calls: Sequence[_Began]) -> set[int]:
    """Which calls of the model a loss is made of: several where it compares their outputs, one under accumulation."""
    if loss is None or loss.grad_fn is None:
        return set()
    starts = [one.sequence for one in calls]
    numbers = {_number(node) for node in GraphWalk(loss, max_looks=MAX_LOOKS)}
    return {bisect_right(starts, n) - 1 for n in numbers if starts[0] <= n < _LEAF}


def is_loss(node: str) -> bool:
    """Whether a node's name is that of a loss function."""
    return node.startswith(tuple(LOSS_NODES))


def kind_of(node: Any) -> str:
    """A node's operation.

    Example:
        >>> kind_of(torch.ones(1, requires_grad=True).log().grad_fn)
        'Log'
    """
    return _bare(str(node.name()))


def _bare(node: str) -> str:
    return re.sub(r"Backward\d*$", "", node)


def op_named(node: str) -> str:
    """The operation that a node is the gradient of, as far as its name says.

    Example:
        >>> op_named("LogBackward0"), op_named("NllLossBackward0"), op_named("DivBackward0")
        ('aten.log.default', 'aten.nll_loss_forward.default', 'aten.div.Tensor')
    """
    bare = _bare(node)
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).lower()
    for name in (f"{snake}_forward", f"_{snake}", snake):
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:
            continue
        overloads = packet.overloads()
        overload = next((o for o in ("Tensor", "default", "Tensor_Scalar") if o in overloads), overloads[0])
        return f"aten.{name}.{overload}"
    return f"aten.{snake}"


def _is_sound_power(node: Any) -> bool:
    """A power of 1 or more is defined everywhere, and so is its gradient."""
    exponent = getattr(node, "_saved_exponent", None) if kind_of(node) == "Pow" else None
    return isinstance(exponent, int | float) and exponent >= 1


def _number(node: Any) -> int:
    return int(node._sequence_nr())


def _signed(value: int) -> int:
    """Numbers below 0 come as what they are modulo 2**64."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _dims(node: Any) -> Any:
    dim = node._saved_dim
    if dim is None:
        return None
    return tuple(_signed(d) for d in dim) if isinstance(dim, tuple) else _signed(dim)


def _fits(tensor: Tensor, shape: Sequence[int]) -> bool:
    return tuple(tensor.shape) == tuple(shape) or tensor.numel() == torch.Size(shape).numel()


Unary = Callable[[Tensor, Any], Tensor]


def _plain(function: Callable[[Tensor], Tensor]) -> Unary:
    return lambda x, node: function(x)


def _reduced(function: Callable[..., Tensor]) -> Unary:
    def call(x: Tensor, node: Any) -> Tensor:
        if not hasattr(node, "_saved_dim") or not (dims := _dims(node)):
            return function(x)
        return function(x, dims, node._saved_keepdim)

    return call


def _spread(function: Callable[..., Tensor]) -> Unary:
    def call(x: Tensor, node: Any) -> Tensor:
        correction = 1 if node._saved_correction is None else node._saved_correction
        return function(x, dim=_dims(node), correction=correction, keepdim=node._saved_keepdim)

    return call


UNARY: dict[str, Unary] = {
    **{
        name: _plain(getattr(torch, name.lower()))
        for name in (
            *(
                "Log",
                "Log1p",
                "Log2",
                "Log10",
                "Exp",
                "Exp2",
                "Expm1",
                "Sqrt",
                "Rsqrt",
                "Neg",
                "Abs",
                "Sigmoid",
                "Tanh",
            ),
            *("Relu", "Reciprocal", "Acos", "Asin", "Atan", "Cos", "Sin", "Tan", "Erf", "Erfinv", "Lgamma", "Sinh"),
            *("Cosh", "Acosh", "Atanh", "Clone", "Floor", "Round", "T", "Tanh"),
        )
    },
    "LogSigmoid": _plain(functional.logsigmoid),
    "Softplus": _plain(functional.softplus),
    "Gelu": _plain(functional.gelu),
    "Silu": _plain(functional.silu),
    "Alias": _plain(lambda x: x),
    "ToCopy": _plain(lambda x: x.float()),
    "Mean": _reduced(torch.mean),
    "Sum": _reduced(torch.sum),
    "Logsumexp": _reduced(torch.logsumexp),
    "Amax": _reduced(torch.amax),
    "Amin": _reduced(torch.amin),
    "Prod": _plain(torch.prod),
    "Max": _plain(torch.max),
    "Min": _plain(torch.min),
    "Std": _spread(torch.std),
    "Var": _spread(torch.var),
    "LinalgVectorNorm": lambda x, node: torch.linalg.vector_norm(x, node._saved_ord, _dims(node), node._saved_keepdim),
    "Pow": lambda x, node: x.pow(node._saved_exponent),
    "Softmax": lambda x, node: torch.softmax(x, _dims(node)),
    "LogSoftmax": lambda x, node: torch.log_softmax(x, _dims(node)),
    "Clamp": lambda x, node: x.clamp(node._saved_min, node._saved_max),
    "ClampMin": lambda x, node: x.clamp_min(node._saved_min),
    "ClampMax": lambda x, node: x.clamp_max(node._saved_max),
    "Squeeze": lambda x, node: x.squeeze(_dims(node)) if hasattr(node, "_saved_dim") else x.squeeze(),
    "Unsqueeze": lambda x, node: x.unsqueeze(_dims(node)),
    "Select": lambda x, node: x.select(_dims(node), _signed(node._saved_index)),
    "Transpose": lambda x, node: x.transpose(_signed(node._saved_dim0), _signed(node._saved_dim1)),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": torch.div,
    "Mm": torch.mm,
    "Bmm": torch.bmm,
    "Mv": torch.mv,
    "Dot": torch.dot,
    "Pow": torch.pow,
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
}
LOSSES: dict[str, Callable[..., Tensor]] = {
    "NllLoss": functional.nll_loss,
    "NllLoss2D": functional.nll_loss,
    "MseLoss": functional.mse_loss,
    "L1Loss": functional.l1_loss,
    "SmoothL1Loss": functional.smooth_l1_loss,
    "HuberLoss": functional.huber_loss,
    "BinaryCrossEntropy": functional.binary_cross_entropy,
    "BinaryCrossEntropyWithLogits": functional.binary_cross_entropy_with_logits,
}
