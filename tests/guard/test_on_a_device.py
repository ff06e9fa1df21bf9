"""What a guard finds on the CPU it finds on a device, where nothing can be read in a step: simulated, CI has none.

Each time a sample of faults runs in both ways; `pytest -m long` runs the others.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.faults.base import Case
from tests.faults.faults import FAULTS
from tests.faults.harness import run_case
from tests.faults.healthy import HEALTHY
from tests.matrix import sampled
from tests.sample.loops import Kept, attached, batch, mlp
from tests.simulated_device import simulated_device
from trimtab import Guard
from trimtab.guard.lane import told_by
from trimtab.sample.transfer import DelayedSamples

CHEAP = ("mlp", "cnn", "contrastive")
USUAL = """
    nan-sample moments-zeroed optimizer-state-cleared layer-overwritten-through-data loader-restarts masks-in-bytes
    one-class-only temperature-runs-away one-tower-constant ema-poisoned accumulation-not-divided inputs-blank
    weights_clamped average_begins_late
"""


def family_of(case: Case) -> str:
    return next((family for family in case.families if family in CHEAP), case.families[0])


def names_of(case: Case, *, simulated: bool, fused: bool) -> dict[str, int]:
    """The findings of a run, each with the step of its first."""
    with simulated_device() if simulated else nullcontext():
        run = run_case(case, family_of(case), 0, fused=fused)
    assert run.guard is not None
    return {finding.name: finding.step for finding in reversed(run.guard.findings)}


@pytest.mark.parametrize("name", sampled([*FAULTS, *HEALTHY], USUAL))
def test_the_same_findings(name: str) -> None:
    case, fused = (FAULTS | HEALTHY)[name], sum(map(ord, name)) % 2 == 1  # half of the cases each way
    here, there = (names_of(case, simulated=simulated, fused=fused) for simulated in (False, True))
    assert here.keys() == there.keys()
    # A finding is about the step that shows it: an exact comparison of samples needs one or two more.
    late = {finding: there[finding] - here[finding] for finding in here.keys() & there.keys()}
    assert all(abs(steps) <= 2 for steps in late.values()), late


# -- the same facts, sample by sample --------------------------------------------------------------------------------


def samples(make: Callable[[], nn.Module], *, simulated: bool, steps: int = 24, **options: Any) -> Kept:
    """What a short loop put on record; a loader says how long an epoch is."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=options.pop("fused", True))
    with simulated_device() if simulated else nullcontext(), attached(model, optimizer, **options) as (guard, kept):
        for step in range(steps):
            x, y = batch(64, seed=step % 10)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if step == 15:
                with torch.no_grad():
                    next(model.parameters()).mul_(2.0)
            guard.observe(loss=loss, batch=(x, y))
            optimizer.step()
            optimizer.zero_grad()
    return kept


FACTS = (
    "update_ratio", "outside", "in_print", "in_rms", "replayed", "stuck", "chance", "moment_lag", "loss_factor", "loss",
    "grad_norm", "handed", "grad_cos", "out_spread", "temperature", "bounded", "fixed",
)  # fmt: skip


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.logit_scale = mlp(), nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x) * self.logit_scale.exp() / 20
        return out


@pytest.mark.parametrize("fused", [True, False])
def test_the_same_facts(fused: bool) -> None:
    loader = [0] * 20
    here, there = (samples(Tempered, simulated=s, fused=fused, loader=loader) for s in (False, True))
    assert [s.step for s in there.samples] == [s.step for s in here.samples]
    for name in FACTS:
        known = here.all(name)
        assert any(value is not None for value in known) or name == "stuck", name
        for step, (want, got) in enumerate(zip(known, there.all(name), strict=True)):
            if name == "update_ratio" and step == 15:
                continue  # what was changed by others in this step is no part of its update
            assert (got is None) == (want is None), (name, step)
            if want is not None and got is not None:
                # The thorough look, which comes a step later there, takes the size of the weights before the step.
                near = 1e-2 if name == "update_ratio" else 1e-4
                assert got == pytest.approx(want, rel=near, abs=1e-7), (name, step)
    assert there.notes("outside") == here.notes("outside")


# -- nothing is read in a step ---------------------------------------------------------------------------------------


class Reads(TorchFunctionMode):
    """Notes who asks for the value of a tensor while that is forbidden."""

    NAMES = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__", "equal", "nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.forbidden = True
        self.found: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.forbidden and getattr(func, "__name__", "") in self.NAMES:
            places = [
                f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_stack() if "/trimtab/" in f.filename
            ]
            if places:
                self.found.append(f"{func.__name__} in {' '.join(places[-4:])}")
        return func(*args, **(kwargs or {}))


@contextmanager
def reads_when_due(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """Only what is due may be read."""
    reads, opened = Reads(), DelayedSamples._open

    def allowed(self: DelayedSamples, delayed: Any) -> Any:
        reads.forbidden = False
        try:
            return opened(self, delayed)
        finally:
            reads.forbidden = True

    monkeypatch.setattr(DelayedSamples, "_open", allowed)
    with reads:
        yield reads


def test_nothing_is_read_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with everything that is looked at: buffers, a temperature, targets, several outputs, an average."""
    model = Tempered()
    model.net.append(nn.BatchNorm1d(3))
    ema = torch.optim.swa_utils.AveragedModel(model, use_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = [batch(32, seed=i) for i in range(10)]
    with simulated_device():
        guard = Guard.attach(model, optimizer, mode="observe", run_dir=False, ema=ema, loader=data)
        with reads_when_due(monkeypatch) as reads:
            for step in range(70):
                x, y = data[step % 10]
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                guard.observe(loss=loss, batch=(x, y))
                optimizer.step()
                optimizer.zero_grad()
                ema.update_parameters(model)
        guard.close()
    assert reads.found == []
    assert guard.findings == []


# -- a device that fails ---------------------------------------------------------------------------------------------


def train_until_it_fails(guard: Guard, model: nn.Module, optimizer: Any, patch: pytest.MonkeyPatch) -> None:
    """Five steps, then the device fails: nothing can be read from it any more."""
    text = "CUDA error: device-side assert triggered"

    def fail(*args: object) -> None:
        raise RuntimeError(text)

    with guard:
        for step in range(5):
            x, y = batch(seed=step)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        patch.setattr("trimtab.sample.transfer.to_host", fail)
        raise RuntimeError(text)


def test_a_failed_device_is_told_of_by_the_exception_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with simulated_device():
        guard = Guard.attach(model, optimizer, mode="observe", run_dir=False)
        with pytest.raises(RuntimeError, match="device-side assert"):
            train_until_it_fails(guard, model, optimizer, monkeypatch)
    told = {finding.name: finding.message for finding in guard.findings}
    assert "most likely" in told["label-range"]
    assert "cannot be read from their device" in caplog.text


def test_an_assertion_on_a_device_is_taken_for_a_label_out_of_range() -> None:
    facts, _ = told_by(RuntimeError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`"))
    assert facts == {"exception": 1.0, "label_error": 1.0}


def test_a_norm_beyond_what_is_sent_is_no_nan() -> None:
    from trimtab.guard.protect import told_by_device

    told = {"grad_norm": math.inf, "nonfinite_grads": 0.0, "rejected": 0.0}
    told_by_device(told, clips=False)
    assert math.isfinite(told["grad_norm"])


# -- what is known of a step only after it ---------------------------------------------------------------------------


def accumulated(*, simulated: bool, zeroes: bool = False) -> Kept:
    """Four micro-batches a step, the loss divided among them; `zeroes`: their gradients are dropped half-way."""
    torch.manual_seed(0)
    model, data = mlp(), [batch(64, seed=i) for i in range(120)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with simulated_device() if simulated else nullcontext(), attached(model, optimizer) as (guard, kept):
        for step in range(30):
            for micro in range(4):
                if zeroes and step == 9 and micro == 2:
                    optimizer.zero_grad(set_to_none=False)
                x, y = data[4 * step + micro]
                loss = nn.functional.cross_entropy(model(x), y) / 4
                loss.backward()
                guard.observe(loss=loss, batch=(x, y))
            optimizer.step()
            optimizer.zero_grad()
    return kept


def test_what_guessing_gives_is_scaled_as_the_loss_is() -> None:
    here, there = (accumulated(simulated=simulated).all("chance") for simulated in (False, True))
    assert here[-5:].count(None) < 5
    known = [(a, b) for a, b in zip(here, there, strict=True) if a is not None or b is not None]
    assert [b for _, b in known] == pytest.approx([a for a, _ in known])


def test_dropped_gradients_are_seen_where_they_were_zeroed() -> None:
    here, there = (accumulated(simulated=simulated, zeroes=True).all("dropped") for simulated in (False, True))
    assert there == here
    assert here[9] == 2.0


def test_a_batch_that_is_written_to_is_sent_in_the_forward() -> None:
    """What a model does to its input in place is not in the fingerprint, but for the first time."""

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x.mul_(2.0))
            return out

    here, there = (samples(Doubling, simulated=s).all("in_print") for s in (False, True))
    assert there[0] is None
    assert there[1:] == here[1:]
