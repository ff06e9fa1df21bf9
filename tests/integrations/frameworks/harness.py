"""One small training for every framework, and what must hold of it. Each framework adds only a way to drive it.

What a guard has on record is compared with values that come from PyTorch itself: gradients as they are when they have
been accumulated, and the losses as the model computes them.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.matrix import sampled
from trimtab.core.types import Record, Sample
from trimtab.run.auto_guard import AutoGuard
from trimtab.run.guarded_training import GuardedTraining

STEPS, BATCH, FEATURES, CLASSES = 24, 16, 8, 3
NAN_STEP = 17


def needs(package: str) -> Any:
    """The package; without it the tests are skipped, unless TRIMTAB_REQUIRE has `frameworks`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their own imports may warn
        if "frameworks" in os.environ.get("TRIMTAB_REQUIRE", ""):
            return import_module(package)
        return pytest.importorskip(package)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How to train. `clip` is the framework's own limit."""

    precision: str = "fp32"
    accumulate: int = 1
    clip: float | None = None
    nan: bool = False
    steps: int = STEPS

    def __str__(self) -> str:
        return f"{self.precision}-accumulate{self.accumulate}-clip{self.clip}"


Drive = Callable[..., "Result"]
"""Called with a case and whether it is guarded."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework, the module and the function in it that drive a training with it, and what it can do on a CPU."""

    module: str
    function: str = "drive"
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16")
    accumulate: tuple[int, ...] = (1, 3)
    tells_total: bool = True  # how many steps there will be

    @property
    def drive(self) -> Drive:
        """Skips the test where the framework is not installed."""
        drive: Drive = getattr(import_module(f"tests.integrations.frameworks.{self.module}"), self.function)
        return drive

    def cases(self) -> list[Case]:
        return [
            Case(precision=precision, accumulate=accumulate, clip=clip)
            for precision in self.precisions
            for accumulate in self.accumulate
            for clip in (None, 0.05)
        ]


FRAMEWORKS = {
    "lightning": Framework(module="test_lightning"),
    "fabric": Framework(module="test_lightning", function="drive_fabric", tells_total=False),
    "huggingface": Framework(module="test_huggingface", precisions=("fp32", "bf16")),  # it refuses fp16 on a CPU
    "accelerate": Framework(module="test_accelerate", precisions=("fp32", "bf16"), tells_total=False),  # so does this
    "ignite": Framework(module="test_ignite"),
    "fastai": Framework(module="test_fastai", precisions=("fp32",)),  # its mixed precision is for CUDA
    "fastai-adamw": Framework(module="test_fastai", function="drive_adamw", precisions=("fp32",)),
    "keras": Framework(module="test_keras", precisions=("fp32", "bf16"), accumulate=(1,)),
}


def matrix() -> list[Any]:
    """Every framework, guarded by its callback and by `trimtab run`, in every setting; each time, a part of them.

    All of them with `pytest -m ""`.
    """
    found: dict[str, tuple[str, str, Case]] = {}
    usual: list[str] = []
    for name, framework in FRAMEWORKS.items():
        for way in ("callback", "run"):
            for case in framework.cases():
                key = f"{name}-{way}-{case}"
                found[key] = (name, way, case)
                # Half of what the callback is given, so that every setting is in one of these; of `run` what is new.
                if (case.accumulate > 1) == (case.clip is not None) and (
                    way == "callback"
                    or ((case.accumulate > 1 or framework.accumulate == (1,)) and case.precision == "fp32")
                ):
                    usual.append(key)
    return sampled(found, usual)


class Net(nn.Module):
    """A classifier with buffers, which notes the loss of every training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


def data(case: Case) -> tuple[Tensor, Tensor]:
    """Samples in a fixed order, in one of which a feature may be NaN."""
    generator = torch.Generator().manual_seed(7)
    num = case.steps * case.accumulate * BATCH
    x = torch.randn(num, FEATURES, generator=generator)
    y = (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)
    if case.nan:
        x[NAN_STEP * case.accumulate * BATCH + 5, 2] = math.nan
    return x, y


def scaler() -> torch.amp.GradScaler:
    """One that does not begin with an overflow."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**10)


def fresh() -> Net:
    """The model of every run."""
    torch.manual_seed(3)
    return Net()


class Sink:
    """Keeps the samples of training and of validation."""

    def __init__(self) -> None:
        self.train: list[Sample] = []
        self.val: list[Sample] = []

    def write(self, record: Record) -> None:
        if isinstance(record, Sample):
            (self.train if record.phase == "train" else self.val).append(record)

    def close(self) -> None:
        pass


class Witness:
    """Sees gradients when they are accumulated, before anybody unscales or clips them, and losses when computed."""

    def __init__(self, model: nn.Module, accumulate: int) -> None:
        self._accumulate, self._sizes = accumulate, dict[int, float]()
        self.scale: Callable[[], float] = lambda: 1.0
        self._scale = 1.0
        self.losses: list[float] = []
        self.norms: list[float] = []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self._arrived)

    def loss(self, loss: Tensor) -> Tensor:
        if torch.is_grad_enabled() and loss.requires_grad:
            self.losses.append(loss.item())
            self._scale = self.scale()
        return loss

    def _arrived(self, p: Tensor) -> None:
        assert p.grad is not None
        self._sizes[id(p)] = float(p.grad.double().norm()) / self._scale

    def step(self, *_: object) -> None:
        """Call it right before or after a step."""
        self.norms.append(math.sqrt(sum(size**2 for size in self._sizes.values())))

    @property
    def step_losses(self) -> list[float]:
        """The mean over the micro-batches of each step."""
        n = self._accumulate
        return [sum(self.losses[i : i + n]) / n for i in range(0, len(self.losses), n)]


@dataclass(kw_only=True)
class Result:
    """What is left of a run."""

    model: nn.Module
    optimizer: Any
    witness: Witness
    sink: Sink
    findings: list[str] = field(default_factory=list)
    state: Mapping[str, Any] = field(default_factory=dict)
    rejected: int = 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.state_dict().items()
        inner = self.optimizer
        while hasattr(inner, "optimizer") and not isinstance(inner, torch.optim.Optimizer):
            inner = inner.optimizer
        for i, entry in enumerate(inner.state_dict()["state"].values()):
            yield from ((f"state {i} {k}", v) for k, v in entry.items() if isinstance(v, Tensor))


def equal(a: Result, b: Result) -> bool:
    mine, theirs = dict(a.tensors()), dict(b.tensors())
    return mine.keys() == theirs.keys() and all(torch.equal(v, theirs[k]) for k, v in mine.items())


def check_healthy(drive: Drive, case: Case, *, knows_total: bool = True) -> None:
    """Bit-identical and silent, and everything that happened is on record as it was, the number of steps at once."""
    bare, seen = drive(case, guarded=False), drive(case, guarded=True)
    assert equal(bare, seen)
    assert seen.findings == []
    assert seen.rejected == 0
    assert len(seen.sink.train) == case.steps
    told = seen.sink.train[0].scalars.get("total_steps")
    assert told == case.steps or (told is None and not knows_total)
    assert [s.scalars.get("loss") for s in seen.sink.train] == pytest.approx(seen.witness.step_losses, rel=1e-5)
    assert [s.scalars["grad_norm"] for s in seen.sink.train] == pytest.approx(seen.witness.norms, rel=1e-5)


def check_one_nan_sample(drive: Drive, case: Case) -> None:
    """Everything stays finite, the step is rejected, and nothing but what happened is named."""
    seen = drive(case, guarded=True)
    assert [name for name, value in seen.tensors() if not bool(torch.isfinite(value).all())] == []
    assert sorted(set(seen.findings)) == ["DATA001", "GRAD001", "LOSS001"]
    assert len(seen.sink.train) == case.steps
    assert math.isnan(seen.sink.train[NAN_STEP].scalars["loss"])


def differences(a: object, b: object, where: str = "") -> list[str]:
    """Where two states of plain data differ; NaN equals NaN."""
    if isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
        return [found for key in a for found in differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [found for i in range(len(a)) for found in differences(a[i], b[i], f"{where}/{i}")]
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return []
    return [] if a == b else [f"{where}: {a!r:.200} and {b!r:.200}"]


def under_run(drive: Drive) -> Drive:
    """The same training, its program not changed, as `trimtab run` guards it."""

    def run(case: Case, *, guarded: bool, **kwargs: Any) -> Result:
        if not guarded:
            return drive(case, guarded=False, **kwargs)
        sink = Sink()
        trainings: list[GuardedTraining] = []
        watching = AutoGuard({"sinks": [sink], "run_dir": False}, trainings.append)
        watching.start()
        try:
            seen = drive(case, guarded=False, **kwargs)
        finally:
            watching.finish()
        (training,) = trainings
        seen.sink, seen.rejected = sink, training.rejected
        seen.findings = [name.split()[0] for name in training.codes]
        return seen

    return run
