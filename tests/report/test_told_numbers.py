"""What a loop tells the guard beside the loss reaches the page under the documented names."""

from __future__ import annotations

from pathlib import Path

import torch

import trimtab
from trimtab.record.reader import read_run
from trimtab.report.figures import make_figures, on_page


def test_epoch_clock_and_machine_numbers_have_axes_and_charts(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with trimtab.Guard(model, optimizer, run_dir=tmp_path / "run") as guard:
        for step in range(30):
            model(torch.randn(8, 4)).square().mean().backward()
            guard.observe(epoch=step / 10, clock=1e9 + step, gpu_memory=2e9, gpu_utilisation=0.5, data_wait=0.1)
            guard.step(torch.tensor(1.0))
            optimizer.zero_grad()
    (figures,) = make_figures(read_run(tmp_path / "run", keep=on_page), {})
    assert [axis.name for axis in figures.axes] == ["epoch", "time"]
    assert figures.axes[1].values[-1] == 29.0
    assert {"GPU memory", "GPU utilisation", "Waiting for data"} <= {panel.title for panel in figures.panels}
