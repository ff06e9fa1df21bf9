"""A real TensorBoard event file, written through the guard and read back."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from trimtab import Guard

needed = "tensorboard" in os.environ.get("TRIMTAB_REQUIRE", "")


@pytest.mark.skipif(find_spec("tensorboard") is None and not needed, reason="needs tensorboard")
@pytest.mark.filterwarnings("ignore")  # tensorboard's own imports warn
def test_scalars_and_findings_reach_the_event_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path / "tb")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, clip=1.0, sinks=[writer], run_dir=False) as guard:
        for step in range(10):
            loss = model(torch.randn(8, 4)).square().mean() * (float("nan") if step == 7 else 1.0)
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
    writer.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"loss", "grad/global_norm", "grad/clip_coef", "lr"} <= tags
    assert [e.step for e in events.Scalars("grad/global_norm")] == list(range(10))
    assert [e.step for e in events.Scalars("health/GRAD001")] == [7]
