"""The training behind `trimtab demo`: one small network, real digits, three arms that see the same batches.

All arms have the same settings (no clipping, which would change healthy steps): their losses are bit-identical up to
the first fault, and whatever differs after it is the doing of the fault or of the guard. The faults are done to the run
as they happen in life: a pixel is NaN in the data, and a buggy schedule writes a huge learning rate into the optimizer.
Nothing here knows how the guard works.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trimtab.core.types import Finding
from trimtab.data import load_digits
from trimtab.guard.guard import Guard

NUM_TRAIN = 1440
BATCH = 32
LR = 0.02
SPIKE_FACTOR = 300.0
SPIKE_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is trained for how long, and when it goes wrong."""

    seed: int = 0
    num_epochs: int = 10
    nan_step: int = 60

    @property
    def num_steps(self) -> int:
        """Steps of each arm."""
        return self.num_epochs * (NUM_TRAIN // BATCH)

    @property
    def spike_step(self) -> int:
        """Where the learning rate jumps: at 60 % of the run."""
        return int(0.6 * self.num_steps)


@dataclass(slots=True)
class Arm:
    """One of the trainings: its model and optimizer, and what it has come to."""

    name: str
    faulty: bool
    model: nn.Module
    optimizer: torch.optim.Optimizer
    guard: Guard | None = None
    loss: float = math.nan
    accuracy: float = math.nan
    history: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """How an arm ended."""

    name: str
    final_loss: float
    test_loss: float
    test_accuracy: float
    weights_finite: bool
    num_rejected: int | None
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """How all arms ended, and what the guard found."""

    plan: Plan
    arms: tuple[ArmResult, ...]
    findings: tuple[Finding, ...]
    run_dir: Path | None


Progress = Callable[[int, list[Arm]], None]


def run_demo(plan: Plan, runs_dir: Path, progress: Progress, run_dir: Path | None = None) -> DemoResult:
    """Train the three arms side by side, step by step, and report after every step."""
    data = _load(plan.seed)
    with torch.random.fork_rng(devices=[]):
        arms = [
            _make_arm("clean", plan, faulty=False),
            _make_arm("unguarded", plan, faulty=True),
            _make_arm("guarded", plan, faulty=True),
        ]
        guarded = arms[2]
        guarded.guard = Guard(guarded.model, guarded.optimizer, {"dir": str(runs_dir)}, mode="act", run_dir=run_dir)
        with guarded.guard:
            order = torch.Generator().manual_seed(plan.seed)
            step = 0
            for _ in range(plan.num_epochs):
                for rows in torch.split(torch.randperm(NUM_TRAIN, generator=order), BATCH):
                    for arm in arms:
                        _train_step(arm, data.train_x[rows], data.train_y[rows], step, plan)
                    step += 1
                    if step % (NUM_TRAIN // BATCH) == 0:
                        for arm in arms:
                            arm.accuracy = _evaluate(arm.model, data)[1]
                    progress(step, arms)
        results = tuple(_result(arm, data) for arm in arms)
        folder = guarded.guard.run_dir
        return DemoResult(
            plan=plan,
            arms=results,
            findings=tuple(guarded.guard.findings),
            run_dir=Path(folder) if folder is not None else None,
        )


def _train_step(arm: Arm, x: Tensor, y: Tensor, step: int, plan: Plan) -> None:
    """One step as anyone writes it; the guarded arm differs in one line."""
    if arm.faulty and step == plan.nan_step:
        x = x.clone()
        x[0, 0, 3, 3] = math.nan
    spike = arm.faulty and plan.spike_step <= step < plan.spike_step + SPIKE_STEPS
    for group in arm.optimizer.param_groups:
        group["lr"] = LR * (SPIKE_FACTOR if spike else 1.0)
    arm.model.train()
    loss = cross_entropy(arm.model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    if arm.guard is not None:
        arm.guard.step(loss)
    else:
        arm.optimizer.step()
    arm.optimizer.zero_grad()
    arm.loss = float(loss.detach())
    arm.history.append(arm.loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Data:
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def _load(seed: int) -> _Data:
    images, classes = load_digits()
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))
    x = (torch.from_numpy(images).float() / 16.0).reshape(-1, 1, 8, 8)[order]
    y = torch.from_numpy(classes).long()[order]
    return _Data(train_x=x[:NUM_TRAIN], train_y=y[:NUM_TRAIN], test_x=x[NUM_TRAIN:], test_y=y[NUM_TRAIN:])


def _make_arm(name: str, plan: Plan, *, faulty: bool) -> Arm:
    torch.manual_seed(plan.seed)
    model = _network()
    return Arm(name, faulty, model, torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9))


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def _evaluate(model: nn.Module, data: _Data) -> tuple[float, float]:
    """Loss and accuracy on the test digits. A model of NaN always answers 0 and is right by chance."""
    model.eval()
    with torch.no_grad():
        scores = model(data.test_x)
        right = (scores.argmax(1) == data.test_y).float()
        return float(cross_entropy(scores, data.test_y)), float(right.mean())


def _result(arm: Arm, data: _Data) -> ArmResult:
    test_loss, accuracy = _evaluate(arm.model, data)
    state = [v for v in arm.model.state_dict().values() if v.is_floating_point()]
    return ArmResult(
        name=arm.name,
        final_loss=_recent(arm.history),
        test_loss=test_loss,
        test_accuracy=accuracy,
        weights_finite=all(bool(v.isfinite().all()) for v in state),
        num_rejected=int(arm.guard.rejected) if arm.guard is not None else None,
        losses=tuple(arm.history),
    )


def _recent(losses: list[float]) -> float:
    """The mean training loss of the last 20 steps: a single batch says little."""
    return sum(losses[-20:]) / len(losses[-20:])
