"""The same verdicts for every lag, and again from the record."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.matrix import sampled
from trimtab import Finding, Guard
from trimtab.record.reader import read_run
from trimtab.report.replay import replay

Fault = Callable[[int, nn.Module, torch.optim.Optimizer, Tensor], Tensor]


def nan_sample(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    if step in (60, 61, 90):
        x[0, 0] = math.nan
    return x


def outlier(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    return x  # its targets are the outliers, below: BatchNorm would swallow a large input


def huge(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    return x * 1e25 if step == 70 else x


def lr_spike(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.param_groups[0]["lr"] = 30.0 if 70 <= step < 75 else 0.01
    return x


def poisoned_buffer(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    if step == 70:
        model.get_buffer("1.running_var")[2] = math.inf
    return x


def poisoned_weight(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    if step == 110:
        with torch.no_grad():
            model.get_parameter("3.weight")[0, 0] = math.nan
    return x


FAULTS: dict[str, Fault] = {
    f.__name__: f for f in (nan_sample, outlier, huge, lr_spike, poisoned_buffer, poisoned_weight)
}


def train(fault: Fault, *, cut_at: int | None = None, **kwargs: Any) -> tuple[Guard, list[Finding]]:
    """Train with a fault; at `cut_at` a fresh guard takes over from the state of the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    truth = torch.randn(8, 1)
    data = [torch.randn(32, 8) for _ in range(130)]
    seen: list[Finding] = []
    guard = Guard(model, optimizer, on_finding=seen.append, **kwargs)
    for step in range(130):
        if step == cut_at:
            state = json.loads(json.dumps(guard.state_dict()))
            guard.close()
            guard = Guard(model, optimizer, on_finding=seen.append, **kwargs)
            guard.load_state_dict(state)
        x = data[step]
        y = x @ truth * (1e3 if fault is outlier and step == 70 else 1.0)
        loss = (model(fault(step, model, optimizer, x.clone())) - y).square().mean()
        loss.backward()
        guard.step(loss)
        optimizer.zero_grad()
        if step % 50 == 49:
            guard.validate(float(loss.detach()))
    guard.close()
    return guard, seen


def comparable(findings: list[Finding]) -> list[str]:
    return [repr(f) for f in findings]


@pytest.mark.parametrize("fault", sampled(FAULTS, "nan_sample lr_spike poisoned_weight"))
def test_verdicts_do_not_depend_on_the_lag_and_replay_makes_them_again(fault: Fault) -> None:
    results = {}
    for lag in (0, 1, 3):
        guard, seen = train(fault, lag=lag)
        record = read_run(guard.run_dir)
        assert comparable(seen) == comparable([replace(f, streak=1) for f in guard.findings])
        results[lag] = (comparable(guard.findings), [repr(replace(v, seen_at=0)) for v in record.verdicts])
        for verdict in record.verdicts:
            assert verdict.seen_at == min(verdict.step + lag, 129)
        again = replay(guard.run_dir)
        assert again.identical, again.differences
        assert [repr(replace(v, seen_at=0)) for v in again.verdicts] == results[lag][1]
    assert results[0] == results[1] == results[3]
    assert results[0][0], "the fault must be found"


def test_replay_of_a_run_that_acted() -> None:
    guard, _ = train(lr_spike, mode="act", clip=1.0, lag=1)
    record = read_run(guard.run_dir)
    assert record.decisions
    assert replay(guard.run_dir).identical


def test_replay_finds_what_other_settings_would_have_found(tmp_path: Path) -> None:
    from trimtab.core.config import Config

    guard, _ = train(outlier)
    other = replay(guard.run_dir, Config(ignore=("ALL",)))
    assert not other.identical
    assert other.verdicts == ()


def test_ctrl_c_leaves_a_complete_record(tmp_path: Path) -> None:
    """A child trains and interrupts itself at step 40, without close(): everything up to there is on record."""
    script = textwrap.dedent(
        """
        import os, signal, torch, trimtab
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        guard = trimtab.Guard(model, optimizer, run_dir="run")
        for step in range(1000):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
            if step == 40:
                os.kill(os.getpid(), signal.SIGINT)
        """
    )
    child = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert child.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in child.stderr
    run = read_run(tmp_path / "run")
    assert run.problems == []
    assert run.series("loss")[0].tolist() == list(range(41))
    assert run.closing is not None
    assert (run.closing.steps, run.closing.reason) == ({"": 41}, "KeyboardInterrupt")
    assert replay(tmp_path / "run").identical


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("cut_at", [50, 61, 72])
def test_a_fresh_guard_goes_on_where_the_state_was_taken(fault: Fault, cut_at: int) -> None:
    _, whole = train(fault, run_dir=False)
    _, cut = train(fault, run_dir=False, cut_at=cut_at)
    assert comparable(cut) == comparable(whole)


def test_guard_state_is_json_of_bounded_size() -> None:
    guard, _ = train(nan_sample, run_dir=False)
    assert len(json.dumps(guard.state_dict())) < 60_000
