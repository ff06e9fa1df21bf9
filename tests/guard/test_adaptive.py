"""Limits that follow the run, in a live guard: warm-up, spikes, NaN, state, lag, and a healthy run."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.guard.conftest import batches, mse, same, small_model, snapshot
from tests.guard.test_agc import off_the_host  # noqa: F401
from trimtab import Guard
from trimtab.core.errors import ConfigError
from trimtab.record.reader import read_run

LOSS = torch.tensor(1.0)
STRATEGIES: dict[str, dict[str, Any]] = {
    "percentile": {"strategy": "percentile", "warmup": 10},
    "zscore": {"strategy": "zscore", "warmup": 10},
}


class Loop:
    """One weight vector whose gradients are given: what the guard let through is in `norms`."""

    def __init__(self, clip: Any, *, fused: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(50, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, fused=fused)
        self.guard = Guard(self.model, self.optimizer, clip=clip, **{"run_dir": False, **options})
        self.random = np.random.default_rng(0)
        self.norms: list[float] = []

    def step(self, norm: float | None = None) -> float:
        """One step with a gradient of this norm; returns the norm after clipping, over the norm before."""
        norm = float(np.exp(0.2 * self.random.standard_normal())) if norm is None else norm
        direction = torch.randn(1, 50)
        grad = direction / direction.norm() * norm
        self.model.weight.grad = grad.clone()
        self.guard.step(LOSS)
        after: Tensor = self.model.weight.grad
        self.norms.append(float(after.norm()))
        return self.norms[-1] / norm


@pytest.mark.parametrize("clip", STRATEGIES)
def test_it_does_not_clip_while_warming_up_then_clips_a_spike(clip: str) -> None:
    loop = Loop(STRATEGIES[clip])
    assert all(loop.step() == pytest.approx(1.0) for _ in range(9))
    assert loop.step(1e4) == pytest.approx(1.0)  # it cannot know yet
    loop = Loop(STRATEGIES[clip])
    for _ in range(40):
        loop.step()
    assert loop.step(1e4) < 3e-4
    assert loop.step(0.5) == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("clip", ["agc", *STRATEGIES])
def test_after_a_nan_a_spike_is_still_clipped(clip: str, bad: float) -> None:
    loop = Loop(STRATEGIES.get(clip, clip))
    for _ in range(40):
        loop.step()
    state = json.dumps(loop.guard.state_dict()["lanes"][""]["clip"])
    for _ in range(5):
        loop.step(bad)
    assert loop.guard.rejected == 5
    assert json.dumps(loop.guard.state_dict()["lanes"][""]["clip"]) == state
    assert loop.step(1e4) < 3e-4


@pytest.mark.parametrize("clip", STRATEGIES)
def test_a_rejected_step_never_enters(clip: str) -> None:
    loop = Loop(STRATEGIES[clip], config={"reject_above": 100.0})
    for _ in range(40):
        loop.step()
    state = loop.guard.state_dict()["lanes"][""]["clip"]
    for _ in range(5):
        loop.step(1e3)
    assert loop.guard.rejected == 5
    assert loop.guard.state_dict()["lanes"][""]["clip"] == state


def test_percentile_clips_to_numpys_percentile_of_the_steps_before() -> None:
    loop = Loop({"strategy": "percentile", "percentile": 50, "window": 20, "warmup": 5})
    norms: list[float] = []
    for i in range(40):
        norm = 1.0 + 0.3 * math.sin(i)
        loop.step(norm)
        want = norm if len(norms) < 5 else min(norm, float(np.percentile(norms[-20:], 50)))
        assert loop.norms[-1] == pytest.approx(want, rel=1e-5)
        norms.append(norm)


@pytest.mark.parametrize("clip", STRATEGIES)
def test_the_state_goes_with_the_guards(clip: str) -> None:
    whole, half = Loop(STRATEGIES[clip]), Loop(STRATEGIES[clip])
    norms = [float(v) for v in np.exp(0.5 * np.random.default_rng(1).standard_normal(60))]
    for norm in norms[:30]:
        whole.step(norm)
        half.step(norm)
    state = json.loads(json.dumps(half.guard.state_dict()))
    rest = Loop(STRATEGIES[clip])
    rest.guard.load_state_dict(state)
    for norm in norms[30:]:
        whole.step(norm)
        rest.step(norm)
    assert rest.norms == pytest.approx(whole.norms[30:], rel=1e-5)
    del state["lanes"][""]["clip"]  # a state from before there were strategies
    Loop(STRATEGIES[clip]).guard.load_state_dict(state)


@pytest.mark.parametrize("clip", STRATEGIES)
def test_on_the_host_the_lag_makes_no_difference(clip: str) -> None:
    loops = [Loop(STRATEGIES[clip], lag=lag) for lag in (0, 3)]
    for i in range(50):
        for loop in loops:
            loop.step(1e3 if i % 12 == 11 else None)
    assert loops[0].norms == pytest.approx(loops[1].norms, rel=1e-6)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip", STRATEGIES)
@pytest.mark.usefixtures("off_the_host")
def test_off_the_host_the_norms_of_earlier_steps_decide(clip: str, fused: bool) -> None:
    loop = Loop(STRATEGIES[clip], fused=fused, lag=2, run_dir="run")
    for _ in range(30):
        loop.step()
    loop.step(math.nan)
    for _ in range(3):
        loop.step()
    assert loop.step(1e4) < 3e-4
    assert loop.step(0.5) == pytest.approx(1.0)
    loop.guard.close()
    assert loop.guard.rejected == 1
    assert loop.guard.run_dir is not None
    samples = list(read_run(loop.guard.run_dir).samples())
    coefs = [s.scalars["clip_coef"] for s in samples if not s.scalars["rejected"]]
    assert coefs[:10] == [1.0] * 10
    assert coefs[-2] < 3e-4


def trained(kind: str, clip: Any) -> tuple[list[float], Guard]:
    model = small_model()
    optimizer: Any = (
        torch.optim.Adam(model.parameters(), lr=0.02)
        if kind == "adam"
        else torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    )
    losses = []
    with Guard(model, optimizer, clip=clip) as guard:
        for batch in batches(250):
            loss = mse(model, batch)
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses, guard


@pytest.mark.parametrize("clip", ["agc", *STRATEGIES])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_healthy_run_trains_fine(clip: str, optimizer: str) -> None:
    settings = {"strategy": "agc", "ratio": 0.1} if clip == "agc" else clip
    plain, _ = trained(optimizer, None)
    losses, guard = trained(optimizer, settings)
    assert np.median(losses[-50:]) < 1.2 * np.median(plain[-50:])
    assert np.median(losses[-50:]) < 0.3 * losses[0]
    assert guard.rejected == 0
    assert guard.run_dir is not None
    coefs = [s.scalars["clip_coef"] for s in read_run(guard.run_dir).samples()]
    assert len(coefs) == 250
    assert all(0 < c <= 1 for c in coefs)
    assert min(coefs) < 1 or clip == "zscore"  # a run without outliers is none of its business


@pytest.mark.parametrize("clip", ["agc", *STRATEGIES])
def test_observe_changes_nothing(clip: str) -> None:
    results = []
    for settings in (None, STRATEGIES.get(clip, clip)):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with Guard(model, optimizer, clip=settings, mode="observe", run_dir=False) as guard:
            for batch in batches(40):
                loss = mse(model, batch)
                loss.backward()
                guard.step(loss)
                optimizer.zero_grad()
        results.append(snapshot(model))
    assert same(*results)


def test_a_closure_driven_step_that_was_undone_does_not_enter() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    spoil = False

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        if spoil and optimizer.state and model.weight.grad is not None:
            with torch.no_grad():
                model.weight.fill_(math.nan)
        return loss

    with Guard(model, optimizer, clip={"strategy": "percentile", "warmup": 2}, run_dir=False) as guard:
        for _ in range(3):
            guard.step(closure)
        before = len(guard.state_dict()["lanes"][""]["clip"]["norms"])
        spoil = True
        guard.step(closure)
        assert guard.rejected == 1
        assert before == 3
        assert len(guard.state_dict()["lanes"][""]["clip"]["norms"]) == 3


def test_wrong_values_are_refused_when_the_guard_is_built() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="did you mean 'percentile'"):
        Guard(model, optimizer, clip="percentil", run_dir=False)
    with pytest.raises(ConfigError, match=r"clip\.ratio = 0; expected a finite number above 0"):
        Guard(model, optimizer, clip={"strategy": "agc", "ratio": 0}, run_dir=False)
