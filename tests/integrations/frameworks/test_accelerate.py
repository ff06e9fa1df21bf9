"""A loop with Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trimtab
from tests.integrations.frameworks.harness import (
    BATCH,
    STEPS,
    Case,
    Result,
    Sink,
    Witness,
    data,
    differences,
    equal,
    fresh,
    needs,
)

accelerate = needs("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")


class Run:
    """A training that can be stopped, saved and gone on with."""

    def __init__(self, case: Case, *, guarded: bool, **settings: Any) -> None:
        accelerate.state.AcceleratorState._reset_state(True)
        self.case = case
        self.accelerator = accelerate.Accelerator(
            cpu=True,
            mixed_precision={"fp32": "no", "bf16": "bf16"}[case.precision],
            gradient_accumulation_steps=case.accumulate,
        )
        self.net, self.sink = fresh(), Sink()
        self.witness = Witness(self.net, case.accumulate)
        loader = DataLoader(TensorDataset(*data(case)), batch_size=BATCH, shuffle=False)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            self.net, torch.optim.AdamW(self.net.parameters(), lr=1e-2), loader
        )
        self.guard = None
        if guarded:
            self.guard = trimtab.accelerate.guard(
                self.accelerator, self.model, self.optimizer, sinks=[self.sink], run_dir=False, **settings
            )

    def train(self, first: int = 0, last: int | None = None) -> Result:
        """From one micro-batch to another."""
        for i, (x, y) in enumerate(self.loader):
            if i < first or (last is not None and i >= last):
                continue
            with self.accelerator.accumulate(self.model):
                loss = self.witness.loss(nn.functional.cross_entropy(self.model(x).float(), y))
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.witness.step()
                    if self.case.clip is not None:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), self.case.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
        guard = self.guard
        return Result(
            model=self.net,
            optimizer=self.optimizer,
            witness=self.witness,
            sink=self.sink,
            findings=[f.code for f in guard.findings] if guard is not None else [],
            rejected=guard.rejected if guard is not None else 0,
        )

    def close(self) -> None:
        if self.guard is not None:
            self.guard.close()


def drive(case: Case, *, guarded: bool) -> Result:
    run = Run(case, guarded=guarded)
    out = run.train()
    run.close()
    return out


def test_a_resumed_training_goes_on_exactly(tmp_path: Path) -> None:
    case = Case(clip=0.05)
    whole = Run(case, guarded=True)
    first = whole.train(last=12)
    whole.accelerator.save_state(str(tmp_path))
    whole.close()
    assert whole.guard is not None
    straight = drive(case, guarded=True)
    later = Run(case, guarded=True)
    later.accelerator.load_state(str(tmp_path))
    assert later.guard is not None
    assert differences(later.guard.state_dict(), torch.load(tmp_path / "trimtab_guard_0.pt", weights_only=True)) == []
    resumed = later.train(first=12)
    later.close()
    assert len(first.sink.train) == 12
    assert [s.step for s in later.sink.train] == list(range(12, STEPS))
    assert equal(straight, resumed)


def test_a_checkpoint_without_a_guard_is_loaded_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Run(Case(), guarded=False).accelerator.save_state(str(tmp_path))
    run = Run(Case(), guarded=True)
    run.accelerator.load_state(str(tmp_path))
    run.close()
    assert "begins without a history" in caplog.text


def test_a_closed_guard_leaves_nothing_behind() -> None:
    run, before = Run(Case(), guarded=True), torch.nn.utils.clip_grad_norm_
    run.close()
    assert "backward" not in vars(run.accelerator)
    assert torch.nn.utils.clip_grad_norm_ is not before
    assert not run.net._forward_pre_hooks


def test_mode_raise_raises() -> None:
    run = Run(Case(nan=True), guarded=True, mode="raise")
    with pytest.raises(trimtab.TrainingStopped):
        run.train()
