"""One run of a step under the watch names the operation, line, module, reason and samples of its first bad value."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trimtab.trace.batch_rows import ids_in
from trimtab.trace.origin import Origin
from trimtab.trace.step_replay import ForwardCall, Replay
from trimtab.trace.trace import Trace, trace, trace_call

NUM = 8


class Block(nn.Module):
    """A layer whose middle is given: the faults are put there."""

    def __init__(self, middle: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(4, 4), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.first(x), x)


class Net(nn.Module):
    def __init__(self, middle: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.head = Block(middle), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x)).squeeze(1)


class DividesByNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / (x * 0)


def positive(zero_row: int | None = 3) -> Tensor:
    x = torch.rand(NUM, 4) + 0.1
    if zero_row is not None:
        x[zero_row, 2] = 0
    return x


def with_row(row: int, value: float) -> Tensor:
    x = torch.randn(NUM, 4)
    x[row] = value
    return x


def traced(
    middle: Callable[[Tensor, Tensor], Tensor] = lambda h, x: h,
    x: Tensor | None = None,
    *,
    loss: Callable[[Tensor], Tensor] = lambda out: out.square().mean(),
    prepare: Callable[[Net], object] = lambda net: None,
) -> Trace:
    torch.manual_seed(0)
    net = Net(middle)
    prepare(net)
    x = torch.randn(NUM, 4) if x is None else x

    def step() -> Tensor:
        value = loss(net(x))
        value.backward()
        return value

    return trace_call(step, model=net, batch={"x": x})


FAULTS: dict[str, tuple[Callable[[], Trace], dict[str, Any]]] = {
    "log of 0": (
        lambda: traced(lambda h, x: h + x.log(), positive()),
        {"op": "aten.log.default", "reason": "log-of-zero", "samples": (3,), "phase": "forward"},
    ),
    "log of 0, in place": (
        lambda: traced(lambda h, x: (h + x).sub_(h).round_(decimals=3).log_() + h, positive()),
        {"op": "aten.log_.default", "reason": "log-of-zero", "samples": (3,)},
    ),
    "sqrt at 0 in backward": (
        lambda: traced(lambda h, x: (h.square() * x).sqrt(), positive()),
        {"op": "aten.sqrt.default", "reason": "sqrt-at-zero", "samples": (3,), "phase": "backward"},
    ),
    "log guarded in the forward only": (
        lambda: traced(lambda h, x: torch.where(x > 0, (h.abs() * x).log(), 0.0), positive()),
        {"op": "aten.log.default", "phase": "backward", "samples": (3,)},
    ),
    "exp guarded in the forward only": (
        lambda: traced(lambda h, x: torch.where(x < 50, (h.abs() * x.exp().square()).exp(), 0.0), with_row(2, 60.0)),
        {"phase": "backward", "reason": "guarded-only-in-forward", "samples": (2,)},
    ),
    "division by a zero std": (
        lambda: traced(lambda h, x: h + (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), with_row(4, 1.0)),
        {"op": "aten.div.Tensor", "reason": "zero-std", "samples": (4,)},
    ),
    "division by a zero norm": (
        lambda: traced(lambda h, x: h + x / x.norm(dim=1, keepdim=True), with_row(6, 0.0)),
        {"op": "aten.div.Tensor", "reason": "zero-norm", "samples": (6,)},
    ),
    "softmax of a fully masked row": (
        lambda: traced(lambda h, x: functional.softmax(h.masked_fill(x < -9, -math.inf), -1), with_row(2, -10.0)),
        {"op": "aten._softmax.default", "reason": "fully-masked-softmax", "samples": (2,)},
    ),
    "exp of too much": (
        lambda: traced(lambda h, x: h + x.exp(), with_row(1, 100.0)),
        {"op": "aten.exp.default", "reason": "exp-overflow", "samples": (1,), "cause": "op"},
    ),
    "beyond float16": (
        lambda: traced(lambda h, x: h + (x.half() * 60.0).float(), with_row(5, 3000.0)),
        {"op": "aten.mul.Tensor", "reason": "dtype-overflow", "samples": (5,), "cause": "overflow"},
    ),
    "a power below 1 at 0": (
        lambda: traced(lambda h, x: (h * x).abs() ** 0.5, positive()),
        {"op": "aten.pow.Tensor_Scalar", "reason": "pow-at-zero", "samples": (3,), "phase": "backward"},
    ),
    "a root of a negative number": (
        lambda: traced(lambda h, x: h + (x + 1).sqrt(), positive().index_fill(0, torch.tensor([7]), -2.0)),
        {"op": "aten.sqrt.default", "reason": "sqrt-of-negative", "samples": (7,)},
    ),
    "a backward of one's own": (
        lambda: traced(lambda h, x: DividesByNothing.apply(h)),
        {"op": "aten.div.Tensor", "reason": "division-by-zero", "samples": (), "phase": "backward"},
    ),
    "checkpointed": (
        lambda: traced(lambda h, x: checkpoint(lambda a: (a.square() * x).sqrt(), h, use_reentrant=False), positive()),
        {"op": "aten.sqrt.default", "reason": "sqrt-at-zero", "samples": (3,), "phase": "backward"},
    ),
    "checkpointed, the older way": (
        lambda: traced(lambda h, x: checkpoint(lambda a: (a.square() * x).sqrt(), h, use_reentrant=True), positive()),
        {"op": "aten.sqrt.default", "reason": "sqrt-at-zero", "samples": (3,), "phase": "backward"},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_producer_is_named(name: str) -> None:
    run, truth = FAULTS[name]
    found = run()
    assert found.error == ""
    assert found.origin is not None
    assert {key: getattr(found.origin, key) for key in truth} == truth
    assert found.origin.module == "block"
    assert found.origin.file == __file__
    assert found.origin.remedy
    if name != "exp guarded in the forward only":
        assert found.origin.cause in ("op", "overflow")


@pytest.mark.parametrize(
    "middle",
    [
        lambda h, x: functional.softmax(h.masked_fill(x < 0, -math.inf).masked_fill(h == h.amax(1, True), 0.0), -1),
        lambda h, x: h * torch.where(x > 0, x.log(), torch.zeros_like(x)),
        lambda h, x: h + torch.nan_to_num(x.abs().neg().log(), neginf=0.0),
        lambda h, x: torch.minimum(h, torch.full_like(h, math.inf)),
        lambda h, x: h + torch.empty(NUM, 4).fill_(math.nan).zero_(),
    ],
)
def test_what_is_absorbed_is_no_fault(middle: Callable[[Tensor, Tensor], Tensor]) -> None:
    found = traced(middle, positive())
    assert (found.origin, found.error) == (None, "")


def test_a_bad_sample_is_the_input() -> None:
    found = traced(x=with_row(5, math.nan)).origin
    assert found is not None
    assert (found.cause, found.samples, found.subject) == ("input", (5,), "batch['x']")
    assert found.module == "block.first"


def test_a_bad_weight_is_the_parameter() -> None:
    found = traced(prepare=lambda net: net.head.weight.data.fill_(math.inf)).origin
    assert found is not None
    assert (found.cause, found.subject, found.samples, found.module) == ("parameter", "head.weight", (), "head")


def test_outside_of_the_model_it_is_the_loss() -> None:
    found = traced(loss=lambda out: (out * 0).log().mean()).origin
    assert found is not None
    assert (found.cause, found.op, found.module) == ("loss", "aten.log.default", "")


def test_all_targets_ignored() -> None:
    head, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.full((5,), -100)
    found = trace_call(lambda: functional.cross_entropy(head(x), y), model=head, batch=(x, y)).origin
    assert found is not None
    assert (found.reason, found.samples, found.cause) == ("all-targets-ignored", (), "loss")


def test_the_line_is_that_of_the_operation() -> None:
    def middle(h: Tensor, x: Tensor) -> Tensor:
        return h + x.log()  # here

    found = traced(middle, positive()).origin
    assert found is not None
    first = inspect.getsourcelines(middle)[1]
    assert (found.line, found.code) == (first + 1, "return h + x.log()  # here")
    assert found.function.endswith("middle")


def test_without_rows_the_batch_is_bisected() -> None:
    """The bad value appears only after the batch was summed up."""
    x = torch.rand(NUM)
    x[6] = 200.0
    found = trace_call(lambda: x.double().mul(4).sum().float().exp(), batch=x).origin
    assert found is not None
    assert (found.op, found.samples) == ("aten.exp.default", (6,))


def test_a_step_that_raises_says_so() -> None:
    def broken() -> Tensor:
        raise ValueError("no such file")

    found = trace_call(broken)
    assert found.origin is None
    assert "ValueError: no such file" in found.error


def test_a_step_that_raises_because_of_the_bad_value_is_traced() -> None:
    def checks() -> Tensor:
        loss = torch.zeros(3).log().sum()
        if not torch.isfinite(loss):
            raise FloatingPointError("loss is not finite")
        return loss

    found = trace_call(checks).origin
    assert found is not None
    assert found.op == "aten.log.default"
    assert any("FloatingPointError" in note for note in found.notes)


def test_the_operation_can_be_made_to_fail_again() -> None:
    found = FAULTS["sqrt at 0 in backward"][0]().failing
    assert found is not None
    namespace, name, overload = found.op.split(".")
    op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    assert not torch.isfinite(op(*found.args, **found.kwargs)).all()


def test_an_origin_survives_its_json() -> None:
    found = FAULTS["log of 0"][0]().origin
    assert found is not None
    assert Origin.from_json(found.to_json()) == found


def test_shortcuts_do_not_multiply_the_ways_back() -> None:
    """With every block that adds to its input, the ways from the loss to the bad value double."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(60))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = x + 0.1 * torch.tanh(part(x))
            return x

    model, x = Blocks(), torch.randn(NUM, 4)
    x[3, 1] = math.nan
    found = trace_call(lambda: model(x).square().mean().backward(), model=model, batch=x)
    assert found.origin is not None
    assert (found.origin.cause, found.origin.samples) == ("input", (3,))


@dataclass
class Numbered:
    x: Tensor
    index: Tensor


class Named(NamedTuple):
    x: Tensor
    ids: list[int]


@pytest.mark.parametrize(
    "batch", [Numbered(torch.ones(3, 2), torch.tensor([7, 8, 9])), Named(torch.ones(3, 2), [7, 8, 9])]
)
def test_the_numbers_of_samples_are_read_from_any_kind_of_batch(batch: Any) -> None:
    batch.x[1] = 0.0
    origin = trace_call(lambda: batch.x.log().sum(), batch=batch).origin
    assert origin is not None
    assert ids_in(batch) == [7, 8, 9]
    assert origin.samples == (1,)
    assert origin.dataset_indices == (8,)


def test_the_micro_batch_of_a_whole_step_is_named() -> None:
    model = torch.nn.Linear(2, 1)
    parts = [torch.ones(4, 2) for _ in range(3)]
    parts[2][3] = 0.0

    def step() -> None:
        for part in parts:
            (model(part).sum() + part.log().mean()).backward()

    origin = trace_call(step, model=model, batch=parts).origin
    assert origin is not None
    assert (origin.micro_batch, origin.samples) == (2, (3,))


def test_two_calls_that_one_loss_compares_are_no_micro_batches() -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    left, right = torch.ones(4, 2), torch.ones(4, 2)
    right[1] = 0.0
    calls, sides = [], []
    for x in (left, right):
        calls.append(ForwardCall(model, (x,), {}, sequence=torch._C._autograd._get_sequence_nr()))
        out = model(x)
        sides.append(out / out.norm(dim=1, keepdim=True))
    loss = (sides[0] - sides[1]).square().sum()
    origin = trace(Replay(model, calls, loss=loss)).origin
    assert origin is not None
    assert (origin.micro_batch, origin.samples, origin.reason) == (None, (1,), "zero-norm")
