"""Treatment trials after a rollback: the winner fits the trouble, and nothing else is touched."""

from __future__ import annotations

import copy
import gc
import logging
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from trimtab import Guard
from trimtab.core.types import Outcome, Record
from trimtab.guard import trials
from trimtab.guard.trials import Arm, best

Batch = tuple[Tensor, Tensor]


class Outcomes:
    """A sink that keeps what became of actions."""

    def __init__(self) -> None:
        self.all: list[Outcome] = []

    def write(self, record: Record) -> None:
        if isinstance(record, Outcome):
            self.all.append(record)

    def close(self) -> None:
        pass

    def of(self, kind: str) -> list[Outcome]:
        return [o for o in self.all if o.action.kind == kind]

    @property
    def kept(self) -> list[str]:
        return [name[5:] for o in self.of("trials") for name in o.action.args if name.startswith("kept_")]


def data(num: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 32, 8, generator=generator)
    weight = torch.randn(8, 1, generator=torch.Generator().manual_seed(99))
    y = torch.tanh(x @ weight) + 0.05 * torch.randn(num, 32, 1, generator=generator)
    return list(zip(x, y, strict=True))


class Plain:
    """A healthy run: SGD on a small regression."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def spoilt(self, batches: list[Batch]) -> list[Batch]:
        return batches

    def before(self, step: int, model: Any) -> None:
        """Nothing happens before a step."""


class BadBatches(Plain):
    """Six batches in a row with targets of another scale, in every epoch."""

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def spoilt(self, batches: list[Batch]) -> list[Batch]:
        return [(x, y * 30 + 50) if 60 <= i < 66 else (x, y) for i, (x, y) in enumerate(batches)]


class HighRate(Plain):
    """A rate that was too high from the start."""

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


class SpoiltMoments(Plain):
    """The moments of a layer that is frozen at first are wrong by a factor of 100,000, in every state there is."""

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model)
        for x, y in data(60, seed=7):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        for p in model[0].parameters():
            optimizer.state[p]["momentum_buffer"].mul_(1e5)
            p.requires_grad_(False)
        return optimizer

    def before(self, step: int, model: Any) -> None:
        if step == 60:
            model[0].requires_grad_(True)


class Explosion(Plain):
    """One sample in every seventh batch gives a gradient a thousand times too large."""

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def spoilt(self, batches: list[Batch]) -> list[Batch]:
        far = torch.arange(32)[:, None] == 3
        return [
            (x, torch.where(far, torch.full_like(y, (-1) ** i * 400.0), y)) if i >= 50 and i % 7 == 3 else (x, y)
            for i, (x, y) in enumerate(batches)
        ]


class Corrupted(Plain):
    """Weights are overwritten from outside: going back is all that is needed."""

    def before(self, step: int, model: Any) -> None:
        if step == 60:
            with torch.no_grad():
                model[0].weight.mul_(1000.0)


def run(trouble: Plain, num: int = 20, *, steps: int = 240, seed: int = 0, **settings: Any) -> tuple[float, Outcomes]:
    """Train under a guard in mode `act`: the loss on other data at the end, and what was done."""
    torch.manual_seed(seed)
    model, sink = trouble.model(), Outcomes()
    optimizer = trouble.optimizer(model)

    def step_fn(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = (model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        return loss

    config = {"mode": "act", "policy": {"trial_steps": num, "ring_every": 5, **settings}}
    batches = trouble.spoilt(data(100, seed))
    with Guard(model, optimizer, config, step_fn=step_fn, run_dir=False, sinks=[sink]) as guard:
        for step in range(steps):
            batch = batches[step % len(batches)]
            if all(guard.quarantine.hides(sample) for sample in zip(*batch, strict=True)):
                continue
            trouble.before(step, model)
            guard.step(step_fn(batch), batch)
        assert guard.lanes[""].attempts <= steps
    with torch.no_grad():
        return sum(float((model(x) - y).square().mean()) for x, y in data(20, 1234 + seed)) / 20, sink


FITTING: dict[type[Plain], set[str]] = {
    BadBatches: {"skip_data"},
    HighRate: {"half_rate", "tenth_of_rate"},
    SpoiltMoments: {"reset_moments"},
    Explosion: {"skip_data", "clip"},
}


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("trouble", FITTING, ids=lambda t: t.__name__)
def test_the_winner_fits_the_trouble_and_the_run_ends_better(trouble: type[Plain], seed: int) -> None:
    plain, done = run(trouble(), 0, seed=seed)
    treated, tried = run(trouble(), 20, seed=seed)
    assert not done.of("trials")
    assert done.of("rewind")
    assert tried.kept
    assert set(tried.kept) <= FITTING[trouble]
    assert treated < 0.8 * plain


@pytest.mark.long
def test_clipping_is_kept_where_leaving_batches_out_did_not_end_the_trouble() -> None:
    _, tried = run(Explosion(), 20, steps=65)
    assert tried.kept == ["skip_data", "clip"]
    assert "Gradients are clipped to a norm of" in tried.of("trials")[1].detail


def test_every_arm_is_on_record_with_what_it_measured() -> None:
    _, tried = run(SpoiltMoments(), 20, steps=80)
    (outcome,) = tried.of("trials")
    losses = {k: v for k, v in outcome.action.args.items() if k.startswith("loss_")}
    names = {"go_back", "clip", "half_rate", "tenth_of_rate", "reset_moments", "further"}
    assert set(losses) == {f"loss_{name}" for name in names}
    assert min(losses, key=lambda name: losses[name]) == "loss_reset_moments"
    assert "reset the optimizer's moments: " in outcome.detail
    assert outcome.detail.endswith("The optimizer's moments begin again")
    cuts = tried.of("cut_lr")
    assert [o.applied for o in cuts] == [False]
    assert cuts[0].detail == "the trials measured what helps instead"


# -- nothing else is touched ---------------------------------------------------------------------------------------


class Everything(nn.Module):
    """A model with buffers and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(8, 32),
            nn.BatchNorm1d(32),
            nn.Dropout(0.1),
            nn.Linear(32, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(torch.relu(self.norm(self.first(x)))))
        return out


def full_run(
    num: int, fails: type[BaseException] | None = None, harm: int = 60, steps: int = 90
) -> tuple[Any, Outcomes]:
    """A run with all that has a state: all of it at the end, and what was done."""
    torch.manual_seed(3)
    model, sink = Everything(), Outcomes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=20)
    ema = torch.optim.swa_utils.AveragedModel(model)
    calls = {"num": 0, "loop": 0}

    def step_fn(batch: Batch) -> Tensor:
        calls["num"] += 1
        if fails is not None and calls["num"] > calls["loop"]:
            raise fails("this step cannot be made again")
        guard.observe(extra=float(calls["num"]))
        optimizer.zero_grad()
        loss: Tensor = (model(batch[0]) - batch[1]).square().mean()
        scaler.scale(loss).backward()
        return loss

    config = {"mode": "act", "policy": {"trial_steps": num, "ring_every": 5}}
    given: dict[str, Any] = {"scheduler": scheduler, "scaler": scaler, "ema": ema, "step_fn": step_fn}
    guard = Guard(model, optimizer, config, **given, run_dir=False, sinks=[sink])
    with guard:
        for step, batch in enumerate(data(steps)):
            if step == harm:
                with torch.no_grad():
                    model.first.weight.mul_(1000.0)
            calls["loop"] += 1
            guard.step(step_fn(batch), batch)
            scheduler.step()
            ema.update_parameters(model)
        lane = guard.lanes[""]
        told = (lane.attempts, lane.rejected, lane.multiplier.state_dict())
    parts = (model, optimizer, scheduler, scaler, ema)
    grads = [p.grad for p in model.parameters()]
    return copy.deepcopy(([p.state_dict() for p in parts], grads, torch.get_rng_state(), calls, told)), sink


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_going_back_only_is_bit_identical_to_a_plain_rollback() -> None:
    plain, done = full_run(0)
    tried, also = full_run(15)
    assert done.of("rewind")
    assert set(also.kept) == {"go_back"}
    assert same(plain, tried)


def test_a_healthy_run_is_left_alone() -> None:
    plain, done = full_run(0, harm=-1)
    tried, also = full_run(15, harm=-1)
    assert not done.all
    assert not also.all
    assert same(plain, tried)


@pytest.mark.parametrize("error", [RuntimeError, StopIteration, MemoryError])
def test_a_trial_that_fails_is_reported_and_the_rollback_stays(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = full_run(0)
    caplog.clear()
    tried, done = full_run(15, fails=error)
    assert same(plain, tried)
    outcomes = done.of("trials")
    assert outcomes
    assert not any(o.applied for o in outcomes)
    assert f"a trial failed ({error.__name__}: this step cannot be made again)" in outcomes[0].detail
    assert "a trial failed" in caplog.text


def test_whoever_interrupts_a_trial_finds_everything_put_back() -> None:
    with pytest.raises(KeyboardInterrupt):
        full_run(15, fails=KeyboardInterrupt)


def test_the_remedies_of_the_ladder_follow_where_no_trial_could_be_made() -> None:
    class Fails(HighRate):
        made = 0

        def model(self) -> nn.Module:
            inner = super().model()
            inner.register_forward_pre_hook(lambda module, args: self._count())
            return inner

        def before(self, step: int, model: Any) -> None:
            self.made = 0

        def _count(self) -> None:
            self.made += 1
            if self.made > 1 and torch.is_grad_enabled():
                raise ValueError("no second pass")

    plain, done = run(HighRate(), 0, steps=60)
    treated, tried = run(Fails(), 20, steps=60)
    assert [o.applied for o in tried.of("trials")] == [False]
    assert [o.applied for o in tried.of("cut_lr")] == [o.applied for o in done.of("cut_lr")]
    assert any(o.applied for o in tried.of("cut_lr"))
    assert treated == plain


# -- when no trials are made ---------------------------------------------------------------------------------------


def refused(make: Callable[[Any], Any], *, step_fn: bool = True, tell: bool = True, reuse: bool = False) -> str:
    """Why no trials were made in a run whose weights are overwritten."""
    torch.manual_seed(0)
    trouble, sink = Corrupted(), Outcomes()
    model = trouble.model()
    optimizer = make(model)
    first = next(iter(optimizer.values())) if isinstance(optimizer, dict) else optimizer

    def forward(batch: Batch) -> Tensor:
        for one in optimizer.values() if isinstance(optimizer, dict) else [optimizer]:
            one.zero_grad()
        loss: Tensor = (model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        return loss

    config = {"mode": "act", "policy": {"trial_steps": 5, "ring_every": 5}}
    with Guard(model, optimizer, config, step_fn=forward if step_fn else None, run_dir=False, sinks=[sink]) as guard:
        memory = data(1)[0]
        for step, batch in enumerate(data(75)):
            trouble.before(step, model)
            for kept, new in zip(memory, batch, strict=True):
                kept.copy_(new)
            given = memory if reuse else batch
            told = given if tell else None
            if isinstance(first, torch.optim.LBFGS):
                guard.observe(batch=told)
                guard.step(lambda given=given: forward(given))
            else:
                guard.step(forward(given), told, optimizer="all" if isinstance(optimizer, dict) else None)
    found = sink.of("trials")
    assert found
    assert not any(o.applied for o in found)
    assert any(o.applied for o in sink.of("rewind"))
    return found[0].detail


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02)


def both(model: Any) -> dict[str, torch.optim.Optimizer]:
    return {"a": sgd(model[0]), "b": sgd(model[2])}


def test_what_is_missing_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.WARNING, "trimtab"):
        assert "they need step_fn" in refused(sgd, step_fn=False)
    assert "policy.trial_steps is set, but no trials will be made: they need step_fn" in caplog.text
    assert "guard.step(loss, batch=...)" in refused(sgd, tell=False)
    assert "were written over since" in refused(sgd, reuse=True)
    assert "2 optimizers" in refused(both)
    assert "LBFGS cannot be stepped" in refused(lambda m: torch.optim.LBFGS(m.parameters(), lr=0.05, max_iter=1))
    monkeypatch.setattr(trials, "is_one_of_several", lambda: True)
    assert "several processes" in refused(sgd)


def test_only_so_many_batches_are_held_and_none_where_it_is_off() -> None:
    for num, most in ((0, 0), (5, 4)):
        model = Plain().model()
        config = {"mode": "act", "policy": {"trial_steps": num, "trial_batches": 4}}
        alive: list[weakref.ref[Tensor]] = []
        with Guard(model, sgd(model), config, step_fn=lambda batch: batch, run_dir=False) as guard:
            assert (guard.lanes[""].trials is None) == (num == 0)
            for _ in range(12):
                batch = torch.randn(4, 8)
                alive.append(weakref.ref(batch))
                loss = model(batch).square().mean()
                loss.backward()
                guard.step(loss, batch)
                del batch, loss
            gc.collect()
            assert sum(ref() is not None for ref in alive) <= max(most, 2) + 1


def test_a_limit_that_was_kept_goes_with_the_state_of_the_guard() -> None:
    def guarded() -> tuple[nn.Module, Guard]:
        model = Plain().model()
        return model, Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), mode="act", run_dir=False)

    _, first = guarded()
    first.lanes[""].clip_to(0.25)
    model, second = guarded()
    with first, second:
        second.load_state_dict(first.state_dict())
        (1e3 * model(torch.ones(4, 8))).sum().backward()
        second.step(torch.tensor(1.0))
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        assert math.isclose(float(norm), 0.25, rel_tol=1e-3)
        assert second.lanes[""].clip_in_force.norm == 0.25


# -- the choice ----------------------------------------------------------------------------------------------------

LOSSES = st.lists(st.one_of(st.floats(-10, 10), st.just(math.nan), st.just(math.inf)), min_size=1, max_size=6)


@given(LOSSES, st.floats(0, 5), st.sets(st.integers(0, 5)))
def test_the_choice_is_finite_and_the_gentlest_of_those_that_are_as_good(
    losses: list[float], usual: float, failed: set[int]
) -> None:
    arms = [Arm(name=str(i), words="", loss=loss) for i, loss in enumerate(losses)]
    chosen = best(arms, usual, {str(i) for i in failed})
    finite = [i for i, loss in enumerate(losses) if math.isfinite(loss)]
    if not finite:
        assert chosen is arms[0]
        return
    allowed = [i for i in finite if i not in failed] or finite
    lowest = min(losses[i] for i in allowed)
    assert chosen.loss <= lowest + trials.WORTH * usual
    assert int(chosen.name) in allowed
    assert all(losses[i] > lowest + trials.WORTH * usual for i in allowed if i < int(chosen.name))


def test_the_report_shows_what_was_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trimtab.cli.app import main

    torch.manual_seed(0)
    trouble = SpoiltMoments()
    model = trouble.model()
    optimizer = trouble.optimizer(model)

    def step_fn(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        return loss

    config = {"policy": {"trial_steps": 20, "ring_every": 5}}
    with Guard(model, optimizer, config, mode="act", step_fn=step_fn, run_dir=tmp_path / "run") as guard:
        for step, batch in enumerate(data(80)):
            trouble.before(step, model)
            guard.step(step_fn(batch), batch)
    with pytest.raises(SystemExit) as end:
        main(["report", str(tmp_path / "run")])
    assert not end.value.code
    shown = " ".join(capsys.readouterr().out.split())
    assert "try out what helps, 20 steps each" in shown
    assert "reset the optimizer's moments: 0." in shown
    assert "(kept)" in shown


def test_the_micro_batches_of_a_step_are_tried_together() -> None:
    torch.manual_seed(0)
    trouble, sink = Corrupted(), Outcomes()
    model = trouble.model()
    optimizer = sgd(model)
    calls: list[int] = []

    def step_fn(batch: Batch) -> Tensor:
        loss: Tensor = (model(batch[0]) - batch[1]).square().mean() / 2
        loss.backward()
        return loss

    config = {"mode": "act", "policy": {"trial_steps": 3, "trial_batches": 8, "ring_every": 5}}
    with Guard(model, optimizer, config, step_fn=step_fn, run_dir=False, sinks=[sink]) as guard:
        for step in range(64):
            trouble.before(step, model)
            for batch in data(2, seed=step):
                guard.observe(step_fn(batch), batch)
            optimizer.step()
            optimizer.zero_grad()
            calls.append(guard.lanes[""].attempts)
    assert calls == list(range(1, 65))  # no step of a trial was counted
    assert sink.of("trials")
    assert sink.of("trials")[0].applied
    assert sink.kept[0] == "go_back"


def test_going_back_further_puts_the_older_state_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "best", lambda arms, usual, failed: next(a for a in arms if a.name == "further"))
    _, tried = run(Corrupted(), 5, steps=62)
    (rewound,) = [o for o in tried.of("rewind") if "steps later" not in o.detail]
    (outcome,) = tried.of("trials")
    assert "those after step 54 again" in rewound.detail
    assert outcome.detail.endswith("The state is the one after step 49")


@pytest.mark.long
def test_every_way_to_apply_a_winner_leaves_a_run_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("clip", "half_rate", "tenth_of_rate", "reset_moments", "further"):
        monkeypatch.setattr(trials, "best", lambda arms, usual, failed, n=name: next(a for a in arms if a.name == n))
        loss, tried = run(Corrupted(), 5, steps=90)
        assert tried.kept == [name]  # applying it is no trouble in itself: lost moments, say
        assert loss < 0.5
