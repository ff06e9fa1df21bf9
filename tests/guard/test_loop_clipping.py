"""A loop, or the framework around it, that clips, returns losses from closures, or has its own way to stop."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trimtab import Guard, TrainingStopped
from trimtab.core.contain import Contained
from trimtab.core.types import Record, Sample
from trimtab.guard.loop_clipping import wrap_clipping


class Kept:
    """A sink that keeps every sample of a step."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def write(self, record: Record) -> None:
        if isinstance(record, Sample) and record.phase == "train":
            self.samples.append(record)

    def close(self) -> None:
        pass

    def of(self, name: str) -> list[float]:
        return [s.scalars.get(name, math.nan) for s in self.samples]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def norm_of(model: nn.Module) -> float:
    return float(
        torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    )


def test_the_norm_before_the_loops_own_clipping_goes_on_record() -> None:
    model, kept, norms = net(), Kept(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = torch.nn.utils.clip_grad_norm_
    guard = Guard.attach(model, optimizer, sinks=[kept], run_dir=False)
    guard.watch_clipping()
    for x in torch.randn(8, 16, 4):
        optimizer.zero_grad()
        (100 * model(x).square().mean()).backward()
        norms.append(norm_of(model))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    guard.close()
    assert torch.nn.utils.clip_grad_norm_ is before
    assert kept.of("grad_norm") == pytest.approx(norms, rel=1e-5)


def test_the_norm_before_a_clipping_of_ones_own_goes_on_record() -> None:
    """By value, say: nobody but the loop knows that it is about to clip."""
    model, kept, norms = net(), Kept(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = Guard.attach(model, optimizer, sinks=[kept], run_dir=False)
    guard.watch_clipping()
    for x in torch.randn(8, 16, 4):
        optimizer.zero_grad()
        (100 * model(x).square().mean()).backward()
        norms.append(norm_of(model))
        guard.before_clipping(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # of clipped gradients: not what is asked for
        optimizer.step()
    guard.close()
    assert kept.of("grad_norm") == pytest.approx(norms, rel=1e-5)


def test_each_of_two_optimizers_has_its_own_norm() -> None:
    model, kept = nn.ModuleDict({"a": net(), "b": net()}), Kept()
    both = {key: torch.optim.SGD(model[key].parameters(), lr=1e-3) for key in "ab"}
    guard = Guard.attach(model, both, sinks=[kept], run_dir=False)
    guard.watch_clipping()
    x = torch.randn(16, 4)
    (100 * model["a"](x).square().mean() + model["b"](x).square().mean()).backward()
    norms = {key: norm_of(model[key]) for key in "ab"}
    for key in "ab":
        torch.nn.utils.clip_grad_norm_(model[key].parameters(), 1e-3)
    for key in "ab":
        both[key].step()
    guard.close()
    assert {s.optimizer: s.scalars["grad_norm"] for s in kept.samples} == pytest.approx(norms, rel=1e-5)


def test_listeners_to_clipping_leave_in_any_order() -> None:
    told: list[str] = []

    def listener(name: str, answer: bool) -> Any:
        def tell(params: list[Tensor], norm: Tensor | float) -> bool:
            told.append(name)
            return answer

        return tell

    before = torch.nn.utils.clip_grad_norm_
    first = wrap_clipping(listener("first", False), Contained())
    second = wrap_clipping(listener("second", True), Contained())
    first()
    first()
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    assert float(torch.nn.utils.clip_grad_norm_([p], 1.0)) == 5.0
    second()
    assert told == ["second"]
    assert torch.nn.utils.clip_grad_norm_ is before


def test_a_detached_loss_returned_by_a_closure_is_a_loss_and_no_missing_graph() -> None:
    model, kept, losses = net(), Kept(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Guard.attach(model, optimizer, sinks=[kept], run_dir=False) as guard:
        for x in torch.randn(12, 16, 4):

            def closure(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(x).square().mean()
                loss.backward()
                losses.append(loss.item())
                return loss.detach()

            optimizer.step(closure)
    assert guard.findings == []
    assert kept.of("loss") == pytest.approx(losses)


def test_a_loss_told_inside_a_closure_counts_instead_of_the_returned_one() -> None:
    model, kept, losses = net(), Kept(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Guard.attach(model, optimizer, sinks=[kept], run_dir=False) as guard:
        for x in torch.randn(12, 16, 4):

            def closure(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(x).square().mean()
                guard.observe(loss)
                (loss / 4).backward()
                losses.append(loss.item())
                return (loss / 4).detach()

            optimizer.step(closure)
    assert guard.findings == []
    assert kept.of("loss") == pytest.approx(losses)


def diverging(mode: str) -> tuple[Guard, list[TrainingStopped], int]:
    model, stops = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    guard = Guard.attach(model, optimizer, mode=mode, run_dir=False)
    guard.stop_by(stops.append)
    done = 0
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(torch.randn(16, 4)) * math.nan).square().mean()
        loss.backward()
        guard.observe(loss)
        optimizer.step()
        done += 1
        if stops:
            break
    guard.close()
    return guard, stops, done


def test_a_remedy_that_stops_asks_the_loop_to_stop() -> None:
    guard, stops, done = diverging("act")
    assert guard.closed
    assert len(stops) == 1
    assert "Training stopped" in str(stops[0])
    assert done < 60


def test_mode_raise_raises_all_the_same() -> None:
    with pytest.raises(TrainingStopped):
        diverging("raise")


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("optimizer_kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_inf_that_the_loop_clips_by_value_is_rejected_and_named(bad: float, optimizer_kind: Any) -> None:
    model, kept, norms = net(), Kept(), []
    optimizer = optimizer_kind(model.parameters(), lr=1e-3)
    plain = torch.nn.utils.clip_grad_value_
    guard = Guard.attach(model, optimizer, sinks=[kept], run_dir=False)
    for i, x in enumerate(torch.randn(8, 16, 4)):
        optimizer.zero_grad()
        (100 * model(x).square().mean()).backward()
        norms.append(norm_of(model))
        last: Tensor = next(reversed(list(model.parameters())))
        assert last.grad is not None
        before = [p.detach().clone() for p in model.parameters()]
        if i == 5:
            last.grad.fill_(bad)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        assert (i == 5) == all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    guard.close()
    assert torch.nn.utils.clip_grad_value_ is plain
    assert guard.rejected == 1
    assert [(f.code, f.step, f.subject) for f in guard.findings] == [("GRAD001", 5, ("2.bias",))]
    rest = [i for i in range(8) if i != 5]
    assert [kept.of("grad_norm")[i] for i in rest] == pytest.approx([norms[i] for i in rest], rel=1e-5)


def test_clipping_finite_gradients_by_value_is_what_pytorch_does() -> None:
    ends = []
    for guarded in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with Guard.attach(model, optimizer, run_dir=False) as guard:
            if guarded:
                guard.watch_clipping()
            for i, x in enumerate(torch.randn(8, 16, 4, generator=torch.Generator().manual_seed(1))):
                optimizer.zero_grad()
                (model(x).square().mean() * (1e25 if i == 3 else 1.0)).backward()  # its norm overflows
                torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
                optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])
        assert guard.rejected == 0
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_guard_that_nobody_closes_leaves_clipping_by_value_as_it_was() -> None:
    before = torch.nn.utils.clip_grad_value_
    model = net()
    guard = Guard.attach(model, torch.optim.SGD(model.parameters(), lr=1e-2), run_dir=False)
    assert torch.nn.utils.clip_grad_value_ is not before
    del model, guard
    gc.collect()
    assert torch.nn.utils.clip_grad_value_ is before
