"""What the pull-style monitor logs, in a real TensorBoard event file read back."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from trimtab.compat.monitors import GradientHealthMonitor

needed = "tensorboard" in os.environ.get("TRIMTAB_REQUIRE", "")


@pytest.mark.skipif(find_spec("tensorboard") is None and not needed, reason="needs tensorboard")
@pytest.mark.filterwarnings("ignore")  # tensorboard's own imports warn
def test_a15_statistics_reach_the_event_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path / "tb")
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    monitor = GradientHealthMonitor(model, log_frequency=2)
    wanted: dict[int, float] = {}
    for step in range(6):
        model.zero_grad()
        (model(torch.randn(8, 4)).square().mean() * (math.nan if step == 4 else 1.0)).backward()
        stats = monitor.check_gradients()
        wanted[step] = stats["global_grad_norm"]
        monitor.log_statistics(stats, step=step, logger=writer)
    writer.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    layers = {f"grad_layer/{n}/{w}/{k}" for n in "02" for w in ("weight", "bias") for k in ("norm", "mean", "std")}
    names = {"global_norm", "max_norm", "min_norm", "mean_norm", "has_nan", "has_inf"}
    assert set(events.Tags()["scalars"]) == layers | {f"grad/{name}" for name in names}
    points = events.Scalars("grad/global_norm")
    assert [p.step for p in points] == [0, 2, 4], "every second step"
    assert points[1].value == pytest.approx(wanted[2], rel=1e-6)
    assert [p.value for p in events.Scalars("grad/has_nan")] == [0.0, 0.0, 1.0]
    assert math.isnan(points[2].value)
