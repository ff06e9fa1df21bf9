"""GradScaler in the right order, accumulation, and optimizers that call back."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.guard.conftest import batches, mse, same, small_model, snapshot
from trimtab import Guard, InputError
from trimtab.record.reader import read_run


def scaler_of(scale: float, **kwargs: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, **kwargs)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["guard", "attach", "attach+unscale"])
def test_clipping_acts_on_unscaled_gradients(fused: bool, way: str) -> None:
    def run(guarded: bool) -> list[Tensor]:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = scaler_of(1024.0)
        guard = Guard.attach(model, optimizer, clip=0.5, scaler=scaler, run_dir=False) if guarded else None
        for batch in batches(10):
            loss = mse(model, batch)
            scaler.scale(loss).backward()
            if guard is not None and way == "guard":
                guard.step(loss)
            else:
                if guard is None or way == "attach+unscale":
                    scaler.unscale_(optimizer)
                if guard is None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                else:
                    guard.observe(loss=loss)
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        if guard is not None:
            assert guard.findings == []
            guard.close()
        return snapshot(model, optimizer)

    assert same(run(True), run(False))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["guard", "attach"])
def test_routine_overflow_is_the_scalers_business(fused: bool, way: str) -> None:
    """A scale that is too large overflows at first: attempts count, nothing is found, the scale comes down."""

    def run(guarded: bool) -> tuple[list[Tensor], Guard | None, float]:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = scaler_of(2.0**127)
        guard = Guard.attach(model, optimizer, scaler=scaler) if guarded else None
        for batch in batches(30):
            loss = mse(model, batch)
            scaler.scale(loss).backward()
            if guard is not None and way == "guard":
                guard.step(loss)
            else:
                if guard is not None:
                    guard.observe(loss=loss)
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        if guard is not None:
            guard.close()
        return snapshot(model, optimizer), guard, scaler.get_scale()

    with_guard, guard, scale = run(True)
    without, _, plain_scale = run(False)
    assert same(with_guard, without)
    assert scale == plain_scale < 2.0**127
    assert guard is not None
    assert guard.findings == []
    assert guard.rejected == 0
    assert guard.run_dir is not None
    record = read_run(guard.run_dir)
    steps, _ = record.series("routine_overflow")
    assert 0 in steps
    assert record.series("loss")[0].tolist() == list(range(30))
    assert record.series("scale")[1][0] == 2.0**127


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["guard", "attach", "attach silent"])
def test_a_nan_sample_under_a_scaler_is_an_incident(fused: bool, way: str) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = scaler_of(1024.0)
    guard = Guard(model, optimizer, scaler=scaler, run_dir=False)
    for i, batch in enumerate(batches(10, bad=(6,))):
        before = snapshot(model, optimizer)
        loss = mse(model, batch)
        scaler.scale(loss).backward()
        if way == "guard":
            guard.step(loss)
        else:
            if way == "attach":
                guard.observe(loss=loss)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        if i == 6:
            assert same(before, snapshot(model, optimizer))
    guard.close()
    assert guard.rejected == 1
    assert "nonfinite-gradient" in [f.name for f in guard.findings]
    assert {f.step for f in guard.findings} == {6}
    assert scaler.get_scale() == 512.0


def test_a_disabled_scaler_changes_nothing() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False), run_dir=False) as guard:
        for batch in batches(5, bad=(3,)):
            loss = mse(model, batch)
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
    assert guard.rejected == 1


def test_accumulation_counts_real_steps_and_any_bad_micro_batch() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = Guard.attach(model, optimizer)
    for i, batch in enumerate(batches(20, bad=(9,))):
        loss = mse(model, batch) / 4
        loss.backward()
        guard.observe(loss=loss * 4, tokens=16)
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    guard.close()
    assert guard.health()["steps"] == {"": 5}
    assert {f.step for f in guard.findings} == {2}
    assert guard.rejected == 1
    assert guard.run_dir is not None
    losses = read_run(guard.run_dir).series("loss")[1]
    assert math.isnan(losses[2])
    assert losses[0] == pytest.approx(sum(float(mse(small_model(), b).detach()) for b in batches(4)) / 4, rel=0.2)
    assert int(model[1].num_batches_tracked) == 16  # the four micro-batches of the rejected step left no trace


def test_telling_the_same_loss_twice_counts_once() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Guard(model, optimizer) as guard:
        loss = mse(model, batches(1)[0])
        loss.backward()
        guard.observe(loss=loss)
        guard.step(loss)
        mse(model, batches(1)[0]).backward()
        optimizer.step()  # nothing told: nothing is known of this loss, least of all the old one
    assert guard.run_dir is not None
    assert read_run(guard.run_dir).series("loss")[0].tolist() == [0]


class Twice(torch.optim.Optimizer):
    """SAM in short: climb, ask the closure again, come back, descend."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        loss = closure()
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        climbs = [0.01 * p.grad for p in params]
        for p, climb in zip(params, climbs, strict=True):
            p.add_(climb)
        closure()
        for p, climb in zip(params, climbs, strict=True):
            p.sub_(climb)
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])
        return loss


class ClimbsFirst(Twice):
    """Moves the weights by the gradients it finds before it asks anything."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad if p.grad is not None else 0.0, alpha=0.01)
        return super().step(closure)


class Once(Twice):
    """Calls the closure once, first, as most do."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        loss = torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
        return loss


CLOSURE_OPTIMIZERS = {
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4),
    "lbfgs wolfe": lambda p: torch.optim.LBFGS(p, lr=1.0, max_iter=4, line_search_fn="strong_wolfe"),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sam": lambda p: Twice(p, lr=0.01),
    "once": lambda p: Once(p, lr=0.01),
    "climbs first": lambda p: ClimbsFirst(p, lr=0.01),
}


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


@pytest.mark.parametrize("way", ["guard", "attach"])
@pytest.mark.parametrize("name", CLOSURE_OPTIMIZERS)
def test_closures_healthy_bit_identical_and_nan_kept_out(name: str, way: str) -> None:
    def run(guarded: bool, bad: tuple[int, ...]) -> tuple[list[Tensor], Guard | None]:
        model = plain_model()
        optimizer: Any = CLOSURE_OPTIMIZERS[name](model.parameters())
        guard = Guard.attach(model, optimizer, run_dir=False) if guarded else None
        for i, batch in enumerate(batches(8, bad=bad)):

            def closure(batch: tuple[Tensor, Tensor] = batch, model: nn.Module = model, o: Any = optimizer) -> Tensor:
                o.zero_grad()
                loss = mse(model, batch)
                loss.backward()
                return loss

            before = snapshot(model)
            if name == "climbs first":  # SAM's own loop: gradients are there before the step
                closure()
            if guard is not None and way == "guard":
                guard.step(closure)
            else:
                optimizer.step(closure)
            if guard is not None and i in bad:
                assert same(before, snapshot(model))
        if guard is not None:
            guard.close()
        return snapshot(model), guard

    healthy, guard = run(True, ())
    assert same(healthy, run(False, ())[0])
    assert guard is not None
    assert guard.findings == []
    survived, guard = run(True, (4,))
    assert all(torch.isfinite(t).all() for t in survived)
    assert guard is not None
    assert guard.rejected == 1
    assert {f.step for f in guard.findings} == {4}
    assert guard.health()["steps"] == {"": 8}


def test_a_line_search_that_ends_in_nan_is_undone() -> None:
    """The gradient is finite, the step it leads to is not."""
    model = plain_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e30, max_iter=5)
    guard = Guard(model, optimizer, run_dir=False)
    batch = batches(1)[0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, batch) + sum(p.pow(4).sum() for p in model.parameters())
        loss.backward()
        return loss

    before = snapshot(model)
    guard.step(closure)
    guard.step(closure)
    assert guard.rejected == 2
    assert same(before, snapshot(model))
    assert [f.name for f in guard.findings] == ["nonfinite-gradient"]
    guard.close()


def test_an_optimizer_that_needs_a_closure_says_so() -> None:
    model = plain_model()
    with (
        Guard(model, torch.optim.LBFGS(model.parameters()), run_dir=False) as guard,
        pytest.raises(InputError, match="LBFGS needs a closure"),
    ):
        guard.step(torch.zeros(()))


def test_a_told_loss_does_not_keep_its_graph_alive() -> None:
    model = plain_model()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=False)
    loss = mse(model, batches(1)[0])
    gone = weakref.ref(loss)
    guard.observe(loss=loss)
    del loss
    gc.collect()
    assert gone() is None
    guard.close()


def test_a_closure_with_a_scaler_is_refused() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        Guard(model, optimizer, scaler=scaler_of(2.0), run_dir=False) as guard,
        pytest.raises(InputError, match="closure cannot be combined"),
    ):
        guard.step(lambda: torch.zeros(()))
