"""A guard stores what a trace found in its run directory; whatever happens to that, training goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import trimtab
from trimtab.checkpoint.format import container
from trimtab.trace import bundle

BAD = 5


class Model(nn.Module):
    """Takes the logarithm of what is 0 for a row of zeros."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(self.drop(self.body(x)))
        return torch.log(self.head(self.body(x)).square()) + normal.mean(1, keepdim=True)


def run(folder: Path | bool, settings: dict[str, object], drop: float = 0.0) -> trimtab.Guard:
    torch.manual_seed(0)
    model = Model(drop)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with trimtab.Guard(model, optimizer, settings, run_dir=folder) as guard:
        for step in range(8):
            x = torch.randn(6, 4)
            if step == BAD:
                x[2] = 0.0
            loss = model(x).mean()
            loss.backward()
            guard.step(loss, batch=x)
            optimizer.zero_grad()
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return guard


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_a_bad_step_is_stored_once_with_all_that_reproduces_it(tmp_path: Path, drop: float) -> None:
    guard = run(tmp_path / "run", {}, drop)
    assert guard.run_dir is not None
    (path,) = bundle.incidents_of(Path(guard.run_dir))
    found = bundle.read(path)
    assert (found.step, found.origin.samples, found.left_out) == (BAD, (2,), ())
    assert found.origin.op == "aten.log.default"
    assert found.config["mode"] == "advise"
    assert set(found.sections) == {"batch", "model", "operands"} | ({"rng"} if drop else set())
    stored = container.read(path / "data").sections
    model = stored["model"]
    assert isinstance(model, dict)
    assert int(model["norm.num_batches_tracked"]) == BAD, "the statistics are those before the step"
    batch = stored["batch"]
    assert isinstance(batch, dict)
    assert bool((batch["batch"][2] == 0).all())
    done = subprocess.run([sys.executable, str(path / "repro.py")], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "aten.log.default: NaN or Inf values: 1\n"


@pytest.mark.parametrize("settings", [{"trace": False}, {"record": False}])
def test_nothing_is_stored_where_nothing_is_asked_for(
    tmp_path: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "run", settings)
    assert bundle.incidents_of(tmp_path / "run") == []
    assert not list(tmp_path.rglob("incidents"))


def test_a_disk_that_refuses_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trimtab.guard.incidents.write", refuse)
    guard = run(tmp_path / "run", {})
    named = [finding for finding in guard.findings if finding.name.startswith("nonfinite")]
    assert any("sample 2" in finding.subject for finding in named), "the finding says it all the same"
