"""A guard names the operation, the module and the samples that a bad value came from, and changes nothing by it."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.simulated_device import simulated_device
from trimtab import Guard

BAD, ROW = 4, 5


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Linear(6, 6), Norm()
        self.bn, self.drop, self.head = nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.bn(self.scale(x) + self.norm(x)))).squeeze(1)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = [*model.state_dict().values(), torch.get_rng_state()]
    for own in optimizer.state.values():
        tensors += [v for v in own.values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in tensors]


def run(
    *, trace: bool = True, value: float = 1.0, way: str = "guard", accumulate: int = 1, **kwargs: Any
) -> tuple[Guard, list[Tensor], list[int]]:
    torch.manual_seed(1)
    model = Net()
    calls: list[int] = []
    model.head.register_forward_hook(lambda module, args, out: calls.append(len(calls)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = Guard.attach(model, optimizer, {"trace": trace}, run_dir=False, **kwargs)
    for step in range(8):
        for micro in range(accumulate):
            x = torch.randn(12, 6)
            if step == BAD and micro == accumulate - 1:
                x[ROW] = value
            loss = model(x).square().mean() / accumulate
            loss.backward()
            if way == "hooks" or micro < accumulate - 1:
                guard.observe(loss=loss)
        if way == "guard":
            guard.step(loss)
        else:
            optimizer.step()
        optimizer.zero_grad()
    guard.close()
    return guard, state(model, optimizer), calls


@pytest.mark.parametrize("way", ["guard", "hooks"])
@pytest.mark.parametrize("mode", ["observe", "advise", "act"])
def test_the_findings_name_it(way: str, mode: str) -> None:
    guard, _, _ = run(way=way, mode=mode)
    found = next(f for f in guard.findings if f.name == "nonfinite-loss")
    assert found.step == BAD
    assert {"norm", "aten.div.Tensor", f"sample {ROW}"} <= set(found.subject)
    assert "standard deviation of 0" in found.message
    assert "eps" in found.advice[0]


def test_a_bad_sample_is_named() -> None:
    guard, _, _ = run(value=math.nan)
    assert all(f"sample {ROW}" in f.subject for f in guard.findings), guard.findings


def test_a_micro_batch_is_named() -> None:
    guard, _, _ = run(accumulate=3)
    assert "micro-batch 2" in guard.findings[0].message
    assert f"sample {ROW}" in guard.findings[0].subject


@pytest.mark.parametrize("mode", ["observe", "advise"])
def test_a_trace_changes_nothing(mode: str) -> None:
    _, with_trace, _ = run(mode=mode)
    _, without, _ = run(mode=mode, trace=False)
    for mine, plain in zip(with_trace, without, strict=True):
        assert torch.equal(mine.nan_to_num(7), plain.nan_to_num(7))


def test_it_can_be_switched_off() -> None:
    guard, _, _ = run(trace=False)
    assert guard.findings
    assert not any("sample" in subject for f in guard.findings for subject in f.subject)


def test_a_long_incident_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from trimtab.guard import provenance

    made, real = [], provenance.trace

    def counted(replay: Any) -> Any:
        made.append(replay)
        return real(replay)

    monkeypatch.setattr(provenance, "trace", counted)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guard(model, optimizer, run_dir=False) as guard:
        for step in range(30):
            x = torch.full((3, 2), math.nan if step > 3 else 1.0)
            loss = model(x).sum()
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
    assert len(made) == 1


def test_a_step_fn_is_replayed_as_a_whole() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        loss = ((model(x).squeeze(1) - y).square() * y.log()).mean()
        loss.backward()
        return loss

    with Guard(model, optimizer, step_fn=step_fn, run_dir=False) as guard:
        for step in range(4):
            batch = torch.randn(6, 3), torch.rand(6) + 0.5
            if step == 2:
                batch[1][4] = 0.0
            guard.step(step_fn(batch), batch)
            optimizer.zero_grad()
    assert guard.findings
    assert {"aten.log.default", "sample 4"} <= set(guard.findings[0].subject)


def test_a_routine_overflow_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    from trimtab.guard import provenance

    made: list[Any] = []
    monkeypatch.setattr(provenance, "trace", made.append)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with Guard(model, optimizer, scaler=scaler, run_dir=False) as guard:
        for step in range(3):
            loss = model(torch.ones(3, 2)).sum()
            scaler.scale(loss).backward()
            if step == 1:
                model.weight.grad.fill_(math.inf)  # type: ignore[union-attr]
            guard.step(loss)
            optimizer.zero_grad()
    assert made == []


def test_a_trace_that_fails_does_not_stop_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from trimtab.guard import provenance

    def broken(replay: Any) -> Any:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(provenance, "trace", broken)
    guard, _, _ = run()
    assert {f.name for f in guard.findings} >= {"nonfinite-loss"}
    assert "tracing a bad step" in caplog.text


class Probability(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze(1).abs()


def only_the_loss(loss_of: Any, *, told: bool = False) -> Guard:
    """A loop without a `step_fn`: the model's call can be run again, its loss cannot."""
    torch.manual_seed(0)
    model = Probability()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Guard(model, optimizer, run_dir=False) as guard:
        for step in range(5):
            x, y = torch.randn(7, 3) * 0.1, torch.rand(7) + 0.5
            if step == 3:
                x[2] = 0.0
            loss = loss_of(model(x), y, bad=step == 3)
            loss.backward()
            guard.step(loss, (x, y) if told else None)
            optimizer.zero_grad()
    return guard


def test_the_logarithm_in_a_loss_is_found_from_its_graph() -> None:
    guard = only_the_loss(lambda out, y, bad: -(y * out.log()).mean())
    found = next(f for f in guard.findings if f.name == "nonfinite-loss")
    assert {"aten.log.default", "sample 2"} <= set(found.subject), found
    assert "the logarithm of 0" in found.message


def test_the_root_in_a_loss_is_found_by_its_gradient() -> None:
    guard = only_the_loss(lambda out, y, bad: out.sqrt().mean())
    found = next(f for f in guard.findings if f.name == "nonfinite-gradient")
    assert {"aten.sqrt.default", "sample 2"} <= set(found.subject), found


def test_a_division_by_a_count_of_nothing_is_named() -> None:
    guard = only_the_loss(lambda out, y, bad: (out * y * (0 if bad else 1)).sum() / (0 * y if bad else y).sum())
    found = next(f for f in guard.findings if f.name == "nonfinite-loss")
    assert "aten.div.Tensor" in found.subject, found


def test_a_bad_target_is_found_in_the_loop() -> None:
    def loss_of(out: Tensor, y: Tensor, bad: bool) -> Tensor:
        if bad:
            y[6] = math.nan
        return nn.functional.mse_loss(out, y)

    for told in (False, True):
        guard = only_the_loss(loss_of, told=told)
        found = next(f for f in guard.findings if f.name == "nonfinite-loss")
        assert "sample 6" in found.subject, found


def test_all_targets_ignored_is_named_without_the_targets() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss_on(step: int) -> Tensor:
        labels = torch.full((6,), -100) if step == 2 else torch.randint(0, 4, (6,))
        return nn.functional.cross_entropy(model(torch.randn(6, 3)), labels)

    with Guard(model, optimizer, run_dir=False) as guard:
        for step in range(4):
            loss = loss_on(step)
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
    found = next(f for f in guard.findings if f.name == "nonfinite-loss")
    assert "aten.nll_loss_forward.default" in found.subject
    assert "ignored" in found.message


@pytest.mark.parametrize("told", [True, False])
def test_a_bad_loss_that_is_known_late_is_not_looked_for_in_later_batches(told: bool) -> None:
    """On a device a step is known to be bad when the loop has other targets already."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    with simulated_device():
        guard = Guard(model, optimizer, run_dir=False)
        for step in range(8):
            x, y = torch.randn(12, 6), torch.randint(3, (12,))
            if step == BAD:
                y = torch.full((12,), -100)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            guard.step(loss, batch=(x, y) if told else None)
        guard.close()
    found = next(f for f in guard.findings if f.name == "nonfinite-loss")
    assert found.step == BAD
    assert "aten.nll_loss_forward.default" in found.subject
    assert "ignored" in found.message


def test_a_loss_whose_graph_is_kept_is_not_held_on_to() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    with simulated_device():
        guard = Guard(model, optimizer, run_dir=False)
        for _ in range(3):
            loss = model(torch.randn(4, 6)).square().mean()
            loss.backward(retain_graph=True)
            guard.step(loss)
            held, loss = weakref.ref(loss), None
            assert held() is None
        guard.close()
