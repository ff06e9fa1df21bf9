"""A real MLflow store on disk: every row in the user's run, none in a second one, and only what was begun is ended."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.loggers.kit import NAN_AT, needs, train
from trimtab.integrations.loggers import sink_for

pytestmark = [needs("mlflow"), pytest.mark.filterwarnings("ignore")]  # mlflow's own imports warn
NUM = 40


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """MLflow with a store of its own: files, or the database that the parameter asks for."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)  # where artifacts of a database go
    for name in ("RANK", "LOCAL_RANK", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    mlflow = pytest.importorskip("mlflow")
    before = mlflow.get_tracking_uri()
    database = getattr(request, "param", "file") == "database"
    if database:
        pytest.importorskip("sqlalchemy")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/store.db" if database else (tmp_path / "store").as_uri())
    mlflow.set_experiment("forest")
    yield mlflow
    mlflow.end_run()
    mlflow.set_tracking_uri(before)


def check(mlflow: Any, run_id: str, num: int = NUM, status: str = "FINISHED") -> None:
    """Every row, in this run, and no other run beside it."""
    client = mlflow.MlflowClient()
    places = [one.experiment_id for one in client.search_experiments()]
    assert [run.info.run_id for run in client.search_runs(places)] == [run_id]
    assert client.get_run(run_id).info.status == status
    history = {one.step: one.value for one in client.get_metric_history(run_id, "trimtab/grad/global_norm")}
    assert sorted(history) == list(range(num))
    assert math.isnan({m.step: m.value for m in client.get_metric_history(run_id, "trimtab/loss")}[NAN_AT])
    assert [m.step for m in client.get_metric_history(run_id, "trimtab/health/GRAD001")] == [NAN_AT]


@pytest.mark.parametrize(
    ("mlflow", "given"),
    [*(("file", given) for given in ("module", "run", "pair", "client", "name")), ("database", "module")],
    indirect=["mlflow"],
)
def test_every_row_is_in_the_users_run(mlflow: Any, given: str, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        client = mlflow.MlflowClient()
        pair = client, run.info.run_id
        logger = {"module": mlflow, "run": run, "pair": pair, "client": client, "name": "mlflow"}[given]
        train([logger], NUM, lambda i: mlflow.log_metric("mine", i, step=3 * i), run_dir=tmp_path / "record")
        assert mlflow.active_run().info.run_id == run.info.run_id, "it goes on"
        assert client.get_run(run.info.run_id).info.status == "RUNNING"
    check(mlflow, run.info.run_id)
    mine = client.get_metric_history(run.info.run_id, "mine")
    assert sorted(one.step for one in mine) == [3 * i for i in range(NUM)]
    tags = client.get_run(run.info.run_id).data.tags
    assert any("GRAD001" in value and "step 7" in value for name, value in tags.items() if name.startswith("trimtab."))
    assert [one.path for one in client.list_artifacts(run.info.run_id, "trimtab")] == ["trimtab/report.html"]


def test_a_run_of_its_own_is_ended_and_is_nobody_elses(mlflow: Any) -> None:
    train(["mlflow"], NUM)
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient()
    places = [one.experiment_id for one in client.search_experiments()]
    (run,) = client.search_runs(places)
    assert client.get_experiment(run.info.experiment_id).name == "forest"
    check(mlflow, run.info.run_id)


def test_the_users_run_may_begin_after_the_guard(mlflow: Any) -> None:
    def each(step: int) -> None:
        if step == 3:
            mlflow.start_run()  # raises where another one is active

    train([mlflow], 5, each)
    assert mlflow.active_run() is not None


def test_a_server_that_does_not_answer_costs_rows_and_a_line(
    mlflow: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.integrations.loggers.mlflow_logger.MOST_WAITING", 100)
    with mlflow.start_run() as run:
        client = mlflow.MlflowClient()

        def refuse(*args: object, **kwargs: object) -> None:
            raise ConnectionError("no server")

        monkeypatch.setattr(client, "log_batch", refuse)
        train([(client, run.info.run_id)], NUM)
    assert "no server" in caplog.text


def test_names_that_mlflow_refuses_are_changed(mlflow: Any) -> None:
    with mlflow.start_run() as run:
        sink = sink_for(run)
        target = sink._target  # type: ignore[attr-defined]
        target.scalars({"trimtab/a<b>,c": 1.0}, 0)
        sink.close()
    assert mlflow.MlflowClient().get_metric_history(run.info.run_id, "trimtab/a_b__c")[0].value == 1.0
