"""The documented training tags in a real TensorBoard event file: a guard in mode `act`, written and read back."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from trimtab import Guard
from trimtab.compat.training_tags import TrainingTagsSink

needed = "tensorboard" in os.environ.get("TRIMTAB_REQUIRE", "")


@pytest.mark.skipif(find_spec("tensorboard") is None and not needed, reason="needs tensorboard")
@pytest.mark.filterwarnings("ignore")  # tensorboard's own imports warn
def test_d12_tags_reach_the_event_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path / "tb")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=1e-3)
    with Guard(model, optimizer, clip=0.5, mode="act", sinks=[TrainingTagsSink(writer)], run_dir=False) as guard:
        for step in range(40):
            loss = model(torch.randn(8, 4)).square().mean() * (float("nan") if step == 12 else 1.0)
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
            if step % 3 == 2:  # validation turns while training goes on falling
                guard.validate(1.0 if step < 9 else 1.0 + step, accuracy=0.5)
    writer.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"Training/GradNorm_Before", "Training/GradNorm_After", "Loss/Train", "Loss/Train_Epoch"} <= tags
    assert {"Loss/Val_Epoch", "Accuracy/Val_Epoch", "Training/CorrectiveAction", "Training/AdjustedLR"} <= tags
    before = {e.step: e.value for e in events.Scalars("Training/GradNorm_Before")}
    after = {e.step: e.value for e in events.Scalars("Training/GradNorm_After")}
    assert list(before) == list(range(40))
    clipped = [s for s, v in before.items() if v > 0.51]
    assert clipped, "nothing was clipped: the comparison says nothing"
    assert all(after[s] == pytest.approx(0.5, rel=1e-3) for s in clipped)
    adjusted = events.Scalars("Training/AdjustedLR")
    assert adjusted[0].step == 13
    assert adjusted[0].value == pytest.approx(0.005)
    assert events.Scalars("Training/CorrectiveAction")[0].step == 13
