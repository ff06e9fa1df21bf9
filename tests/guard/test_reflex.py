"""Clipping and rejecting inside the step: exact against torch, for every kind of tensor and optimizer."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.guard.conftest import batches, mse, same, small_model, snapshot
from trimtab import Guard


def linear_with_gradient(scale: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    for p in model.parameters():
        p.grad = torch.randn_like(p) * scale
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


LOSS = torch.tensor(1.0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e15])
def test_clip_equals_clip_grad_norm_bit_for_bit(scale: float) -> None:
    model, optimizer = linear_with_gradient(scale)
    want = copy.deepcopy(model)
    for p, q in zip(want.parameters(), model.parameters(), strict=True):
        p.grad = q.grad.clone()
    torch.nn.utils.clip_grad_norm_(want.parameters(), 1.0)
    with Guard(model, optimizer, clip=1.0, run_dir=False) as guard:
        guard.step(LOSS)
    for p, q in zip(want.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("limit", [1e-4, 0.05, 0.5, 1e9])
def test_a_clipped_run_equals_one_with_clip_grad_norm_bit_for_bit(limit: float) -> None:
    """Over many steps, so that the ways of measuring alternate: thorough looks, clipped and unclipped steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, twin))
    seen = []
    with Guard(model, ours, {"full_every": 20}, clip=limit, run_dir=False) as guard:
        for _ in range(80):
            x = torch.randn(8, 6)
            for one, optimizer in ((model, ours), (twin, theirs)):
                optimizer.zero_grad()
                loss = one(x).square().mean()
                loss.backward()
                if one is model:
                    guard.step(loss)
                else:
                    seen.append(float(torch.nn.utils.clip_grad_norm_(one.parameters(), limit)))
                    optimizer.step()
            assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert limit in (1e-4, 1e9) or min(seen) < limit < max(seen)


@pytest.mark.parametrize("scale", [1e20, 1e38])
def test_huge_finite_gradients_are_clipped_not_zeroed_and_not_rejected(scale: float) -> None:
    model, optimizer = linear_with_gradient(1.0)
    direction = [p.grad.clone() for p in model.parameters()]
    whole = math.sqrt(sum(float(d.square().sum()) for d in direction))
    for p in model.parameters():
        p.grad *= scale
    with Guard(model, optimizer, clip=1.0, run_dir=False) as guard:
        guard.step(LOSS)
    assert guard.rejected == 0
    for p, d in zip(model.parameters(), direction, strict=True):
        assert torch.allclose(p.grad, d / whole, rtol=1e-4)


def test_clip_by_value_and_per_group() -> None:
    model, optimizer = linear_with_gradient(1.0)
    before = [p.grad.clone() for p in model.parameters()]
    with Guard(model, optimizer, clip={"value": 0.5}, run_dir=False) as guard:
        guard.step(LOSS)
    for p, b in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, b.clamp(-0.5, 0.5))

    model, _ = linear_with_gradient(1.0)
    first, second = list(model[0].parameters()), list(model[1].parameters())
    optimizer = torch.optim.SGD([{"params": first}, {"params": second, "max_norm": 0.1}], lr=0.0)
    with Guard(model, optimizer, clip={"norm": 1.0, "per_group": True}, run_dir=False) as guard:
        guard.step(LOSS)
    for params, limit in ((first, 1.0), (second, 0.1)):
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        assert float(norm) == pytest.approx(limit, rel=1e-4)


def test_reject_above_a_threshold() -> None:
    model, optimizer = linear_with_gradient(100.0)
    optimizer.param_groups[0]["lr"] = 1.0
    before = snapshot(model)
    with Guard(model, optimizer, {"reject_above": 10.0}, run_dir=False) as guard:
        guard.step(LOSS)
    assert guard.rejected == 1
    assert same(before, snapshot(model))
    assert all(p.grad is not None for p in model.parameters())  # given back after the step


class Counting(torch.optim.Optimizer):
    """Everything a well-meaning optimizer can get wrong: group counters, no look at None, momentum without gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "d": 1e-6})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 2
            for p in group["params"]:
                momentum = self.state[p].setdefault("m", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                p.add_(momentum, alpha=-group["lr"])


class Duck:
    """No torch.optim.Optimizer at all: a step and groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.param_groups = [{"params": list(params), "lr": lr}]

    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-self.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None


class ScaledAdam(torch.optim.Adam):
    """A subclass outside torch.optim."""


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "momentum fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), capturable=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "custom counting": Counting,
    "custom duck": Duck,
    "custom subclass": lambda p: ScaledAdam(p, lr=0.01),
}


def everything(model: nn.Module, optimizer: Any) -> list[Tensor]:
    tensors = snapshot(model, optimizer if hasattr(optimizer, "state") else None)
    for group in optimizer.param_groups:
        tensors += [torch.as_tensor(float(v)) for v in group.values() if isinstance(v, int | float | Tensor)]
    return [*tensors, torch.tensor(getattr(optimizer, "calls", 0))]


@pytest.mark.parametrize("first", [True, False], ids=["at the first step", "later"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rejected_step_leaves_no_trace_in_any_optimizer(name: str, first: bool) -> None:
    model = small_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    guard = Guard.attach(model, optimizer, run_dir=False)
    good, (bad,) = batches(6), batches(1, bad=(0,), value=math.inf)
    for batch in [] if first else good[:3]:
        mse(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = everything(model, optimizer)
    mse(model, bad).backward()
    optimizer.step()
    assert guard.rejected == 1
    assert same(before, everything(model, optimizer))
    optimizer.zero_grad()
    for batch in good[3:]:
        mse(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    assert all(torch.isfinite(t).all() for t in snapshot(model))
    twin = small_model()
    other = OPTIMIZERS[name](twin.parameters())
    for batch in [*([] if first else good[:3]), *good[3:]]:
        mse(twin, batch).backward()
        other.step()
        other.zero_grad()
    assert same(everything(model, optimizer), everything(twin, other)), "as if the bad batch had never been"


@pytest.mark.parametrize("name", ["momentum fused", "adamw fused"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_device_gate_does_what_the_host_path_does(
    name: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused optimizers on an accelerator decide on the device; on the CPU the same code is made to."""
    from trimtab.sample.rows import Rows

    results = []
    for on_device in (False, True):
        if on_device:
            original = Rows.__init__

            def forced(self: Rows, *args: Any, _original: Any = original, **kwargs: Any) -> None:
                _original(self, *args, **kwargs)
                self.on_host = False

            monkeypatch.setattr(Rows, "__init__", forced)
        model = small_model()
        optimizer = OPTIMIZERS[name](model.parameters())
        guard = Guard(model, optimizer, clip=clip, lag=1, run_dir=False)
        for i, batch in enumerate(batches(12, bad=(0, 7))):
            before = everything(model, optimizer)
            loss = mse(model, batch)
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
            if i == 7:
                assert same(before, everything(model, optimizer))
            if i == 0:  # a fused kernel that skips its first step has made its state by then: all zeros
                assert same(before[:6], everything(model, optimizer)[:6])
                assert not any(v.any() for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
        guard.close()
        assert guard.rejected == 2
        assert not hasattr(optimizer, "found_inf")
        assert not hasattr(optimizer, "grad_scale")
        results.append((snapshot(model, optimizer), [(f.name, f.step) for f in guard.findings]))
    assert results[0][1] == results[1][1]
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_sparse_complex_empty_frozen_tied_and_unused_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)
            self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
            self.nothing = nn.Parameter(torch.empty(0, 4))
            self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
            self.unused = nn.Parameter(torch.ones(4))
            self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))
            self.narrow = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
            self.tied = self.unused

        def forward(self, x: Tensor) -> Tensor:
            y = self.table(x).sum(0) * self.frozen + (self.phase.abs() ** 2) + self.nothing.sum()
            return (y.double() * self.wide).sum().float() + self.narrow.sum().float()

    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, clip=1.0) as guard:
        for _ in range(3):
            loss = model(torch.tensor([1, 1, 3]))
            loss.backward()
            guard.step(loss)
            assert float(model.table.weight.grad.coalesce().values().norm()) <= 1.0
            optimizer.zero_grad()
        weights = snapshot(model)
        loss = model(torch.tensor([1, 1, 3])) * math.nan
        loss.backward()
        guard.step(loss)
        assert same(weights, snapshot(model))
    assert guard.rejected == 1
    (finding,) = [f for f in guard.findings if f.name == "nonfinite-gradient"]
    names = {name for name, _ in model.named_parameters()}
    assert names & set(finding.subject) == {"table.weight", "phase", "wide", "narrow"}
    assert any("mul" in part.lower() for part in finding.subject), "the product with NaN, behind the model"
    assert guard.run_dir is not None
    from trimtab.core.types import ABSENT, FROZEN, Column, Kind
    from trimtab.record.reader import read_run

    first = next(iter(read_run(guard.run_dir).samples()))
    norms = dict(zip(first.names(Kind.GRAD), first.col(Kind.GRAD, Column.L2), strict=True))
    assert norms["unused"] == ABSENT
    assert norms["frozen"] == FROZEN
    assert norms["nothing"] == 0
    assert "tied" not in norms


class TestBuffers:
    def test_a_mask_of_minus_infinity_is_not_a_fault(self) -> None:
        model = small_model()
        model.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with Guard(model, optimizer, run_dir=False) as guard:
            for batch in batches(5):
                loss = mse(model, batch)
                loss.backward()
                guard.step(loss)
                optimizer.zero_grad()
        assert guard.findings == []

    def test_an_overflowing_variance_is_put_back_and_named(self) -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with Guard(model, optimizer, run_dir=False) as guard:
            for i, (x, y) in enumerate(batches(5)):
                before = snapshot(model)
                if i == 3:  # finite inputs whose variance is not: the output of the layer is finite, the loss too
                    x = x * 1e25
                loss = (model(x) - y).square().mean()
                loss.backward()
                guard.step(loss)
                optimizer.zero_grad()
                if i == 3:
                    assert torch.equal(before[4], model[1].running_var)
        assert [(f.name, f.step, f.subject) for f in guard.findings] == [("nonfinite-buffer", 3, ("1.running_var",))]
        assert guard.rejected == 0
        assert all(torch.isfinite(b).all() for b in model.buffers())

    def test_changes_between_steps_survive_a_rejection(self) -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        guard = Guard(model, optimizer, run_dir=False)
        data = batches(3, bad=(2,))
        for i, batch in enumerate(data):
            if i == 2:
                model[1].running_mean.fill_(7.0)  # the user's own edit, before the forward pass
            loss = mse(model, batch)
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
        assert torch.equal(model[1].running_mean, torch.full((16,), 7.0))
        assert int(model[1].num_batches_tracked) == 2
        guard.close()

    def test_large_and_late_buffers(self) -> None:
        from trimtab.guard import buffers

        model = small_model()
        model.register_buffer("queue", torch.zeros(buffers.LARGE))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        guard = Guard(model, optimizer, {"full_every": 2}, run_dir=False)
        for i, batch in enumerate(batches(6, bad=(5,))):
            loss = mse(model, batch)
            loss.backward()
            model.queue[i] = 1.0  # as a momentum queue does, in every step
            if i == 1:
                model.register_buffer("late", torch.zeros(3))
            guard.step(loss)
            optimizer.zero_grad()
        assert model.queue[:6].tolist() == [1, 1, 1, 1, 1, 0]
        guard.close()

    def test_submodules_called_without_the_root(self) -> None:
        model = nn.ModuleDict({"body": small_model()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        guard = Guard(model, optimizer, run_dir=False)
        for i, batch in enumerate(batches(4, bad=(2,))):
            before = snapshot(model)
            loss = mse(model["body"], batch)
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
            if i == 2:
                assert same(before, snapshot(model))
        guard.close()


def test_poisoned_weights_are_named_at_once() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, run_dir=False) as guard:
        for i, batch in enumerate(batches(5)):
            if i == 3:
                with torch.no_grad():
                    model[3].weight[0, 0] = math.nan
            loss = mse(model, batch)
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
    first = guard.findings[0]
    assert (first.name, first.step, first.subject) == ("nonfinite-weight", 3, ("3.weight",))


def test_parameters_may_be_added_and_unfrozen_on_the_way() -> None:
    torch.manual_seed(0)
    model = small_model()
    for p in model[0].parameters():
        p.requires_grad = False
    optimizer = torch.optim.Adam(list(model[1].parameters()) + list(model[3].parameters()), lr=0.01)
    with Guard(model, optimizer) as guard:
        for i, batch in enumerate(batches(12)):
            if i == 5:
                for p in model[0].parameters():
                    p.requires_grad = True
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.001})
            loss = mse(model, batch)
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
    assert guard.findings == []
    from trimtab.core.types import Kind
    from trimtab.record.reader import read_run

    assert guard.run_dir is not None
    samples = list(read_run(guard.run_dir).samples())
    assert len(samples[4].names(Kind.GRAD)) == 4
    assert len(samples[5].names(Kind.GRAD)) == 5
    assert samples[5].scalars["lr/1"] == 0.001


def test_a_subclass_that_calls_its_parents_step_is_counted_once() -> None:
    """PyTorch runs the hooks of both steps once the parent class was instantiated somewhere."""

    class Parent(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Child(Parent):
        fail = False

        def step(self, closure: Any = None) -> Any:
            out = super().step(closure)
            if self.fail:
                raise MemoryError
            return out

    Parent(small_model().parameters(), lr=0.1)
    model = small_model()
    optimizer = Child(model.parameters(), lr=0.01)
    guard = Guard.attach(model, optimizer, run_dir=False)
    for i, batch in enumerate(batches(6, bad=(4,))):
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.fail = i == 2
        if optimizer.fail:
            with pytest.raises(MemoryError):
                optimizer.step()
        else:
            optimizer.step()
    assert guard.health()["steps"] == {"": 6}
    assert guard.rejected == 1
    guard.close()


@pytest.mark.parametrize("clip", [None, 0.1])
def test_gradients_do_not_outlive_zero_grad(clip: float | None) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, {"full_every": 1}, clip=clip, run_dir=False) as guard:
        for batch in batches(3, bad=(1,)):
            loss = mse(model, batch)
            loss.backward()
            kept = [weakref.ref(p.grad) for p in model.parameters()]
            guard.step(loss)
            optimizer.zero_grad()
            gc.collect()
            assert [ref() for ref in kept] == [None] * len(kept)


def test_a_step_without_any_gradient_is_nothing_to_worry_about() -> None:
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    with Guard(model, optimizer, clip=1.0, run_dir=False) as guard:
        optimizer.step()
        guard.step(torch.ones(()))
    assert guard.findings == []
    assert guard.health()["steps"] == {"": 2}


def test_per_group_clipping_off_the_host_ignores_missing_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of an accelerator whose optimizer is not fused, made to run on the CPU."""
    from trimtab.sample.rows import Rows

    original = Rows.__init__

    def forced(self: Rows, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.on_host = False

    monkeypatch.setattr(Rows, "__init__", forced)
    model, _ = linear_with_gradient(1.0)
    first, second = list(model[0].parameters()), list(model[1].parameters())
    second[1].grad = None
    optimizer = torch.optim.SGD([{"params": first}, {"params": second}], lr=0.0)
    with Guard(model, optimizer, clip={"norm": 0.5, "per_group": True}, run_dir=False) as guard:
        guard.step(LOSS)
    for params in (first, second[:1]):
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        assert float(norm) == pytest.approx(0.5, rel=1e-4)
    assert second[1].grad is None
