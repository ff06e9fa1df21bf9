"""Which object is taken for which logger, on which axis, in which process. These need no package."""

from __future__ import annotations

import types
from typing import Any

import pytest

from tests.integrations.loggers.kit import train
from tests.record.record_fakes import EVENTS, sample, verdict
from trimtab.core.errors import InputError
from trimtab.integrations.loggers import sink_for
from trimtab.record.sinks import DiscardSink, adapt


class Plain:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, values: dict[str, float]) -> None:
        self.rows.append(values)


class Board:
    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.points.append((tag, value, step))


class LightningLike:
    """As Lightning's TensorBoardLogger: its own method belongs to the training thread."""

    def __init__(self) -> None:
        self.board = Board()

    @property
    def experiment(self) -> Board:
        return self.board

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        raise AssertionError("what is inside is the one to call")


class TrackerLike:
    def __init__(self) -> None:
        self.inner = Board()

    @property
    def tracker(self) -> Board:
        return self.inner

    def store_init_configuration(self, values: object) -> None:
        raise AssertionError

    def log(self, values: dict[str, float], step: int) -> None:
        raise AssertionError("what is inside is the one to call")


@pytest.mark.parametrize("kind", [LightningLike, TrackerLike])
def test_a_wrapper_is_looked_into(kind: Any) -> None:
    logger = kind()
    sink_for(logger, step_of=lambda step: step + 100).write(sample(3, loss=2.0))
    inner = logger.board if isinstance(logger, LightningLike) else logger.inner
    assert ("trimtab/loss", 2.0, 103) in inner.points


def test_one_that_takes_no_step_gets_it_among_the_values() -> None:
    logger = Plain()
    train([logger], 5, nan_at=None)
    assert [row["trimtab/step"] for row in logger.rows] == [0, 1, 2, 3, 4]
    assert all(name.startswith("trimtab/") for row in logger.rows for name in row)


def test_what_was_done_is_said_too() -> None:
    told: list[str] = []
    logger = types.SimpleNamespace(log=lambda values: None, alert=lambda title, text: told.append(f"{title}: {text}"))
    sink = sink_for(logger)
    sink.write(verdict(1))
    sink.write(EVENTS[1])
    assert len(told) == 2
    assert "GRAD001" in told[0]
    assert "learning rate" in told[1]


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"LOCAL_RANK": "2"}, {"RANK": "3", "LOCAL_RANK": "0"}])
def test_only_rank_0_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for given in (Plain(), Board(), "csv:" + str(tmp_path / "a.csv"), f"jsonl:{tmp_path}/run"):
        sink = adapt(given)
        assert isinstance(sink, DiscardSink)
        sink.write(sample(0))
        sink.close()
    assert list(tmp_path.iterdir()) == []


def test_the_rest_is_refused() -> None:
    with pytest.raises(InputError, match="no logger that is known"):
        sink_for(3)


@pytest.mark.parametrize(("word", "package"), [("wandb", "wandb"), ("mlflow", "mlflow")])
def test_a_package_that_is_missing_is_named_with_its_install_line(
    monkeypatch: pytest.MonkeyPatch, word: str, package: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(InputError, match=rf"pip install 'trimtab\[{word}\]'"):
        adapt(word)
