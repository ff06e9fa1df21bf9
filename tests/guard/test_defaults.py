"""What PyTorch makes tensors of by default is the program's business: a guard sees the same under every default.

`meta` stands for any device that is not the host: whatever is made without saying where has no values there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from trimtab import Checkpointer, Finding, Guard
from trimtab.core.types import Record, Sample
from trimtab.guard.resources import NAMES
from trimtab.losses import nway_loss

STEPS = 60


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(kind: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def nothing() -> Iterator[None]:
    yield


DEFAULTS = {
    "set_default_device": lambda: default_device("meta"),
    "device as a context": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
}


def adam_steps_under_a_default_device() -> bool:
    """PyTorch 2.6 puts the step count of an Adam that is not fused on the default device, and cannot read it there."""
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.Adam([weight]).step()  # imports what must not be imported under another default
    with torch.device("meta"):
        try:
            torch.optim.Adam([weight]).step()
        except RuntimeError:
            return False
    return True


ADAM = {} if adam_steps_under_a_default_device() else {"fused": True}


class Kept:
    """A sink that keeps all it is given."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


def make(kind: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    rate = {"lr": 0.05}
    if kind == "sgd":
        return model, torch.optim.SGD(model.parameters(), **rate), {}
    if kind == "fused":
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), {"clip": 0.5}
    if kind == "agc":
        return model, torch.optim.SGD(model.parameters(), **rate), {"clip": "agc"}
    if kind == "scaled":
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))  # it makes its scale on the default device when first used
        return model, torch.optim.Adam(model.parameters(), lr=1e-2, **ADAM), {"scaler": scaler}
    ema = torch.optim.swa_utils.AveragedModel(model)
    config = {"activations": True, "full_every": 5}
    return model, torch.optim.Adam(model.parameters(), lr=1e-2, **ADAM), {"ema": ema, "mode": "act", "config": config}


def batches(bad: bool) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(0)
    out = []
    for i in range(STEPS):
        x = torch.randn(16, 8, generator=source)
        if bad and i == 40:
            x[3, 2] = float("nan")
        out.append((x, x[:, :4].nan_to_num().argmax(1)))
    return out


def train(kind: str, around: Any, *, bad: bool) -> tuple[list[Tensor], list[Finding], list[Sample]]:
    model, optimizer, settings = make(kind)
    data, kept = batches(bad), Kept()
    scaler, ema = settings.get("scaler"), settings.get("ema")
    with around:
        guard = Guard(model, optimizer, run_dir=False, sinks=[kept], **settings)
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            (loss if scaler is None else scaler.scale(loss)).backward()
            guard.step(loss, (x, y))
            optimizer.zero_grad()
            if ema is not None:
                ema.update_parameters(model)
        guard.validate(0.5, accuracy=0.9)
        guard.close()
    samples = [r for r in kept.records if isinstance(r, Sample)]
    return [t.clone() for t in model.state_dict().values()], guard.findings, samples


def seen(sample: Sample) -> dict[str, float]:
    """What was measured of the training, without what the machine did meanwhile."""
    return {name: value for name, value in sample.scalars.items() if name not in NAMES}


@cache
def without(kind: str, *, bad: bool) -> tuple[list[Tensor], list[Finding], list[Sample]]:
    """What is seen and done while every default is PyTorch's own."""
    return train(kind, nothing(), bad=bad)


@pytest.mark.parametrize("bad", [False, True], ids=["healthy", "nan"])
@pytest.mark.parametrize("kind", ["sgd", "fused", "agc", "scaled", "acting"])
@pytest.mark.parametrize("default", DEFAULTS)
def test_the_same_is_seen_and_done_under_every_default(
    default: str, kind: str, bad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    weights, findings, samples = without(kind, bad=bad)
    caplog.clear()
    other_weights, other_findings, other_samples = train(kind, DEFAULTS[default](), bad=bad)
    assert [r.message for r in caplog.records if "failed" in r.getMessage()] == []
    assert all(map(torch.equal, other_weights, weights))
    assert [(f.code, f.step, f.message) for f in other_findings] == [(f.code, f.step, f.message) for f in findings]
    assert bool(findings) is bad
    assert len(other_samples) == len(samples) == STEPS + 1
    for mine, theirs in zip(other_samples, samples, strict=True):
        assert seen(mine) == pytest.approx(seen(theirs), nan_ok=True)
        assert mine.table == pytest.approx(theirs.table, nan_ok=True)


@pytest.mark.parametrize("default", DEFAULTS)
def test_checkpoints_and_losses_are_the_same_under_every_default(default: str, tmp_path: Path) -> None:
    model, optimizer, _ = make("sgd")
    views = [torch.randn(6, 5, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    want = [float(nway_loss(views, objective=objective)) for objective in ("axis", "full", "pairwise")]
    with DEFAULTS[default]():
        ckpt = Checkpointer(tmp_path)
        ckpt.save(3, model=model, optimizer=optimizer)
        with torch.no_grad():
            kept = [p.clone() for p in model.parameters()]
            for p in model.parameters():
                p.add_(1)
        snapshot = ckpt.resume(model=model, optimizer=optimizer)
        got = [float(nway_loss(views, objective=objective)) for objective in ("axis", "full", "pairwise")]
    assert snapshot is not None
    assert all(map(torch.equal, model.parameters(), kept))
    assert got == want
