"""What the first lines of a report say: cause, place, consequence, action."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.report.conftest import WriteRun
from trimtab.record.reader import read_run
from trimtab.report.headline import make_headline, of_incident
from trimtab.report.summary import Health, summarise
from trimtab.report.traces import read_traces

CALM = [1.0 / (1 + 0.05 * i) for i in range(60)]


def traced(folder: Path, step: int, **origin: object) -> None:
    where = folder / "incidents" / f"step-{step:08d}"
    where.mkdir(parents=True)
    (where / "incident.json").write_text(json.dumps({"format": 1, "step": step, "origin": origin}))


def test_a_healthy_run_has_nothing_to_do(write_run: WriteRun) -> None:
    headline = make_headline(summarise(read_run(write_run(CALM))))
    assert headline.incident is None
    assert (
        headline.sentence()
        == "60 steps: Nothing to fix: no findings. Loss 1 → 0.253. Do: Nothing: this run needs no fix."
    )


def test_a_nan_step_names_cause_consequence_and_action(write_run: WriteRun) -> None:
    losses = [*CALM]
    losses[30] = math.nan
    headline = make_headline(summarise(read_run(write_run(losses))))
    assert headline.incident == 1
    assert headline.when == "Step 30"
    assert headline.cause.startswith("The loss is NaN")
    assert "kept out" not in headline.cause
    assert "trimtab rejected the update" in headline.consequence
    assert "quiet" in headline.consequence
    assert headline.action
    assert "gradient is NaN or Inf (step 30)" in headline.led_to
    assert "`" not in headline.sentence()


def test_a_stored_trace_says_why_and_where(write_run: WriteRun) -> None:
    losses = [*CALM]
    losses[30] = math.nan
    folder = write_run(losses)
    origin = {"cause": "op", "op": "aten.log.default", "module": "head", "file": "/x/train.py", "line": 7}
    traced(folder, 30, **origin, why="the logarithm of 0", samples=[3])
    headline = make_headline(summarise(read_run(folder)), read_traces(folder))
    assert headline.why == "the logarithm of 0"
    assert headline.place == "module head, train.py:7, aten.log.default, sample 3"


def test_a_bad_batch_names_its_sample(write_run: WriteRun) -> None:
    losses = [*CALM]
    losses[30] = math.nan
    folder = write_run(losses)
    traced(folder, 30, cause="input", subject="the input", samples=[17])
    headline = make_headline(summarise(read_run(folder)), read_traces(folder))
    assert headline.why == "the batch contained NaN or Inf (sample 17)"


def test_a_loss_far_above_all_before_has_not_come_back(write_run: WriteRun) -> None:
    losses = [*CALM, *[1e6] * 40]
    summary = summarise(read_run(write_run(losses, [*[1.0] * 60, *[1e5] * 40], fixed=False)))
    assert summary.health is Health.SICK
    assert "has not come back" in make_headline(summary).consequence


def test_every_incident_has_a_headline(write_run: WriteRun) -> None:
    losses = [*CALM, *CALM[::-1]]
    losses[30] = losses[90] = math.nan
    summary = summarise(read_run(write_run(losses)))
    assert [of_incident(n, summary).when for n in (1, 2)] == ["Step 30", "Step 90"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"step": 3}',
        '{"step": "x", "origin": {}}',
        '{"step": -1, "origin": {}}',
        '{"step": 3, "origin": {"cause": 5}}',
        '{"step": 3, "origin": {"samples": "all"}}',
        '{"step": 3, "origin": {"samples": [1.5]}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_trace_is_left_out(tmp_path: Path, text: str) -> None:
    where = tmp_path / "incidents" / "step-00000003"
    where.mkdir(parents=True)
    (where / "incident.json").write_text(text)
    assert read_traces(tmp_path) == ()


def test_a_run_without_traces_has_none(tmp_path: Path) -> None:
    assert read_traces(tmp_path) == ()
