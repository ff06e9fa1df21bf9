"""Real runs in which something goes wrong: mode act brings them back, and a replay decides the same again."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.faults.base import Case, Run
from tests.faults.harness import make_run
from tests.faults.inject import alter_once, inputs, moments, weight
from tests.guard.test_rewind_combos import Kept
from tests.matrix import sampled
from trimtab import Guard
from trimtab.record.reader import Run as Record
from trimtab.record.reader import read_run
from trimtab.report.replay import replay

ONSET, STEPS = 100, 260
Fault = Callable[[Run], None]


def rates(run: Run, factor: float) -> None:
    first = run.extra.setdefault("rates", [g["lr"] for g in run.optimizer.param_groups])
    for group, lr in zip(run.optimizer.param_groups, first, strict=True):
        group["lr"] = lr * factor


def rate_jumps(run: Run) -> None:
    rates(run, 300.0 if ONSET <= run.step < ONSET + 5 else 1.0)


def rate_stays_high(run: Run) -> None:
    rates(run, 100.0 if run.step >= ONSET else 1.0)


def rate_grows(run: Run) -> None:
    rates(run, 1.05 ** max(run.step - ONSET, 0))


def batches_poisoned(run: Run) -> None:
    if ONSET <= run.step < ONSET + 3:
        alter_once(run, "draw", inputs(lambda x: x * 1000))


def layer_scaled(run: Run) -> None:
    if run.step == ONSET:
        with torch.no_grad():
            weight(run).mul_(1e3)


def weight_gone(run: Run) -> None:
    if run.step == ONSET:
        with torch.no_grad():
            weight(run)[0, 0] = float("nan")


def moments_gone(run: Run) -> None:
    if run.step == ONSET:
        for moment in moments(run):
            moment.fill_(float("nan"))


FAULTS: dict[str, Fault] = {
    f.__name__: f
    for f in (rate_jumps, rate_stays_high, rate_grows, batches_poisoned, layer_scaled, weight_gone, moments_gone)
}


def held_out(run: Run) -> float:
    run.model.eval()
    with torch.no_grad():
        loss = float(run.task.loss(run.model, run.task.val_batch))
    run.model.train()
    return loss


def train(fault: Fault, family: str = "mlp", **kwargs: Any) -> tuple[float, Run]:
    """Train; `mode` says whether a guard is attached, and which."""
    mode = kwargs.pop("mode", None)

    def attach(run: Run) -> Guard | None:
        return None if mode is None else Guard.attach(run.model, run.optimizer, mode=mode, **kwargs)

    run = make_run(Case("rescue", "dynamics", at=fault, steps=STEPS), family, 0).train(attach)
    return held_out(run), run


@cache
def clean() -> float:
    return train(lambda run: None)[0]


def record_of(run: Run) -> Record:
    assert run.guard is not None
    assert run.guard.run_dir is not None
    return read_run(run.guard.run_dir)


@pytest.mark.parametrize(
    ("fault", "lag"),
    sampled(
        {f"{name}-{lag}": (fault, lag) for name, fault in FAULTS.items() for lag in (0, 1)},
        ("rate_jumps-0", "rate_stays_high-1", "layer_scaled-0", "weight_gone-1", "moments_gone-0"),
    ),
)
def test_the_run_is_rescued_and_the_replay_decides_the_same(fault: Fault, lag: int) -> None:
    unguarded, _ = train(fault)
    guarded, run = train(fault, mode="act", lag=lag)
    assert "error" not in run.extra
    assert guarded < 1.3 * clean()  # these runs are short: the steps that were taken back are missed
    assert guarded < 1.05 * unguarded or unguarded != unguarded
    record = record_of(run)
    went_back = [o for o in record.outcomes if o.action.kind == "rewind" and o.applied]
    assert went_back
    # A rate that grows is no trouble until it does harm: that, and not its first growth, is where the trouble began.
    assert went_back[0].action.args["before"] <= ONSET + (50 if fault is rate_grows else 30)
    branches = [(s.step, s.branch) for s in record.samples() if s.phase == "train"]
    assert [step for step, _ in branches] == list(range(STEPS))  # steps go on, whatever is taken back
    assert [b for _, b in branches] == sorted(b for _, b in branches)
    assert branches[-1][1] == len({o.at for o in went_back})
    again = replay(run.guard.run_dir)  # type: ignore[union-attr,arg-type]
    assert again.identical, again.differences


def test_slow_growth_is_dated_long_before_the_alarm() -> None:
    _, run = train(rate_grows, mode="act")
    record = record_of(run)
    (decision, *_) = [d for d in record.decisions if any(a.kind == "rewind" for a in d.actions)]
    onset = next(a.args["before"] for a in decision.actions if a.kind == "rewind")
    assert ONSET <= onset <= ONSET + 50
    assert decision.about - onset >= 30
    told = [o.detail for o in record.outcomes if o.action.kind == "rewind"]
    assert any("is held at" in detail for detail in told)
    assert told[-1].endswith("helped")


def test_trouble_that_comes_back_goes_further_back_and_in_the_end_no_more() -> None:
    def loss_weighs_more(run: Run) -> None:
        if run.step >= ONSET and run.step % 12 == 0:
            alter_once(run, "forward", lambda loss: loss * 1e4)

    _, run = train(loss_weighs_more, mode="act")
    backs = [a.args["back"] for d in record_of(run).decisions for a in d.actions if a.kind == "rewind"]
    assert backs[:4] == [0.0, 1.0, 2.0, 3.0]
    assert max(backs) == 3.0


def test_a_fresh_guard_goes_on_with_the_trail(tmp_path: Path) -> None:
    """The onset lies before the state was saved: the guard that loads it knows it all the same."""
    found = []
    for cut in (None, ONSET + 20):

        def swap(run: Run, cut: int | None = cut) -> None:
            rate_grows(run)
            if run.step == cut and run.guard is not None:
                state = run.guard.state_dict()
                run.guard.close()
                run.guard = Guard.attach(run.model, run.optimizer, mode="act")
                run.guard.load_state_dict(state)

        _, run = train(swap, mode="act")
        found.append([(d.about, d.actions) for d in record_of(run).decisions][:1])
    assert found[0] == found[1]


def test_other_modes_keep_no_states() -> None:
    for mode in ("observe", "advise"):
        _, run = train(lambda run: None, mode=mode, run_dir=False)
        assert run.guard is not None
        assert run.guard.lanes[""].rollback is None


# -- a rate that is far too high from the first step: no good state exists ---------------------------------------------


def too_fast(family: str, factor: float, *, mode: str | None, **kwargs: Any) -> tuple[float, Run]:
    def prepare(run: Run) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] *= factor

    def attach(run: Run) -> Guard | None:
        return None if mode is None else Guard.attach(run.model, run.optimizer, mode=mode, **kwargs)

    run = make_run(Case("rescue", "dynamics", prepare=prepare, steps=STEPS), family, 0).train(attach)
    return held_out(run), run


@pytest.mark.parametrize(
    ("family", "lag"),
    sampled(
        {f"{family}-{lag}": (family, lag) for family in ("mlp", "lm", "rnn", "contrastive", "cnn") for lag in (0, 1)},
        ("mlp-0", "contrastive-1"),
    ),
)
def test_a_rate_300_times_too_high_from_the_first_step_begins_again_at_a_lower_one(family: str, lag: int) -> None:
    clean, _ = too_fast(family, 1.0, mode=None)
    unguarded, _ = too_fast(family, 300.0, mode=None)
    guarded, run = too_fast(family, 300.0, mode="act", lag=lag)
    assert "error" not in run.extra
    harm = unguarded - clean if math.isfinite(unguarded) else math.inf  # on some machines it ends in NaN
    assert harm > 0.15 * clean
    assert guarded < clean + 0.5 * harm
    record = record_of(run)
    went_back = [o for o in record.outcomes if o.action.kind == "rewind" and o.applied and "later:" not in o.detail]
    assert "the initial ones again" in went_back[0].detail
    assert "is held at" in went_back[0].detail
    assert went_back[0].at <= 8
    again = replay(run.guard.run_dir)  # type: ignore[union-attr,arg-type]
    assert again.identical, again.differences


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 2))

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        return self.body(torch.cat([x, level.sin(), level.cos()], 1))


def denoise(factor: float, schedule: str, *, guarded: bool) -> tuple[float, list[str]]:
    """A tiny diffusion model on two moons: the mean loss of the last 100 of 500 steps, and what was done."""
    torch.manual_seed(0)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * factor)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500) if schedule == "cosine" else None
    sink = Kept()
    guard = Guard.attach(model, optimizer, mode="act", run_dir=False, sinks=[sink]) if guarded else None
    source, losses = torch.Generator().manual_seed(0), []
    for _ in range(500):
        angle = torch.rand(64, generator=source) * 6.28
        x = torch.stack([angle.cos() + (angle > 3.14), angle.sin()], 1)
        level, noise = torch.rand(64, 1, generator=source) * 1.57, torch.randn(64, 2, generator=source)
        loss = nn.functional.mse_loss(model(x * level.cos() + noise * level.sin(), level), noise)
        loss.backward()
        if guard is not None:
            guard.observe(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    if guard is not None:
        guard.close()
    return sum(losses[-100:]) / 100, [o.detail for o in sink.outcomes("rewind") if o.applied]


@pytest.mark.parametrize("schedule", sampled(["constant", "cosine"], ["cosine"]))
def test_a_tiny_diffusion_model_begins_again(schedule: str) -> None:
    clean, _ = denoise(1.0, schedule, guarded=False)
    unguarded, _ = denoise(300.0, schedule, guarded=False)
    guarded, done = denoise(300.0, schedule, guarded=True)
    assert unguarded > 1.1 * clean
    assert guarded < 1.05 * clean
    assert "the initial ones again" in done[0]


def test_what_begins_again_is_the_state_before_the_first_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3.0)
    initial = [p.detach().clone() for p in model.parameters()]
    with Guard.attach(model, optimizer, mode="act", run_dir=False) as guard:
        for i in range(30):
            x = torch.randn(16, 6, generator=torch.Generator().manual_seed(i))
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            loss.backward()
            guard.observe(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            if guard._lanes[""].rewound_at >= 0:
                break
    assert all(map(torch.equal, model.parameters(), initial))
    assert not optimizer.state
