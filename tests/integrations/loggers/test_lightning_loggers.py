"""Loggers of Lightning, given to a guard as they are: every row, in the run inside them, on their own axis."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.integrations.loggers.kit import WandbFile, needs, offline, train

__all__ = ["offline"]
pytestmark = [needs("lightning", "frameworks"), pytest.mark.filterwarnings("ignore")]  # its own imports warn
NUM = 10


@needs("tensorboard")
def test_tensorboard(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    train([logger], NUM, lambda i: logger.log_metrics({"mine": i}, step=i))
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    for name in ("trimtab/loss", "mine"):
        assert [e.step for e in events.Scalars(name)] == list(range(NUM))


def test_csv(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    train([logger], NUM, lambda i: logger.log_metrics({"mine": i}, step=i))
    logger.finalize("success")
    (path,) = tmp_path.rglob("metrics.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(int(row["step"]) for row in rows if row["trimtab/loss"]) == list(range(NUM))
    assert sum(bool(row["mine"]) for row in rows) == NUM


@needs("mlflow")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from lightning.pytorch.loggers import MLFlowLogger

    logger = MLFlowLogger(experiment_name="forest", tracking_uri=(tmp_path / "store").as_uri())
    train([logger], NUM, lambda i: logger.log_metrics({"mine": i}, step=i))
    client = logger.experiment
    for name in ("trimtab/loss", "mine"):
        assert sorted(m.step for m in client.get_metric_history(logger.run_id, name)) == list(range(NUM))
    assert len(client.search_runs([logger.experiment_id])) == 1


@needs("wandb")
def test_wandb_is_on_lightnings_axis(offline: Path) -> None:
    from lightning.pytorch.loggers import WandbLogger

    logger = WandbLogger(save_dir=offline, offline=True, project="forest")
    train([logger], NUM, lambda i: logger.log_metrics({"mine": i}, step=i))
    logger.experiment.finish()
    file = WandbFile(offline)
    for name in ("trimtab/loss", "mine"):
        assert sorted(file.series(name, "trainer/global_step")) == list(range(NUM))
