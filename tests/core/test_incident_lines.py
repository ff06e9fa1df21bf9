"""One line per incident, and actions in words wherever a person reads them."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path

import pytest
import torch

from tests.record.record_fakes import CUT, finding
from trimtab import Guard
from trimtab.core import journal
from trimtab.core.journal import IncidentLines, Said
from trimtab.core.types import Action, Outcome, Severity, Verdict
from trimtab.integrations.loggers.metric_sink import MetricSink
from trimtab.record.reader import read_run
from trimtab.record.sinks import ConsoleSink, adapt
from trimtab.report.summary import summarise
from trimtab.report.text import to_text


def verdict(
    step: int, *codes: str, severity: Severity = Severity.ERROR, streak: int = 1, optimizer: str = ""
) -> Verdict:
    found = tuple(
        finding(step, code=code, name=code.lower(), severity=severity, streak=streak, message="It broke.")
        for code in codes
    )
    return Verdict(step=step, seen_at=step, findings=found, optimizer=optimizer)


def said(lines: IncidentLines, *verdicts: Verdict) -> list[str]:
    return [str(line) for one in verdicts if (line := lines.of(one)) is not None]


def test_findings_that_begin_together_are_one_line_with_the_cause_first() -> None:
    assert said(IncidentLines(), verdict(7, "DATA001", "LOSS001", "GRAD001")) == [
        "step 7: DATA001 data001: It broke. Also LOSS001 loss001, GRAD001 grad001."
    ]


def test_what_follows_within_a_few_steps_belongs_to_it_unless_it_is_graver() -> None:
    lines = IncidentLines()
    first = said(lines, verdict(10, "GRAD002"), verdict(11, "GRAD002", streak=2), verdict(10 + journal.GAP, "LOSS002"))
    assert len(first) == 1
    assert said(lines, verdict(14, "WGT001", severity=Severity.FATAL)) == ["step 14: WGT001 wgt001: It broke."]


def test_an_incident_that_goes_on_and_on_is_told_the_tenth_time() -> None:
    told = said(IncidentLines(), *(verdict(3 * i, "GRAD001") for i in range(120)))
    assert [text.split(":")[0] for text in told] == ["step 0", "step 27", "step 297"]


def test_a_trouble_of_another_kind_is_told_while_an_old_one_lasts() -> None:
    lines = IncidentLines()
    lasting = [verdict(step, "GRAD007", streak=step + 1) for step in range(100)]
    new = verdict(100, "LOSS002")
    assert [text.split(":")[0] for text in said(lines, *lasting, new)] == ["step 0", "step 100"]


def test_what_recurs_is_told_less_and_less_often() -> None:
    lines = IncidentLines()
    told = said(lines, *(verdict(20 * i, "GRAD001") for i in range(1_000)))
    assert [re.findall(r"\((.*) time\)", text) for text in told] == [[], ["10th"], ["100th"], ["1,000th"]]
    assert said(lines, verdict(20_000, "GRAD001", "LOSS003")) == [
        "step 20000: LOSS003 loss003: It broke. Also GRAD001 grad001."
    ]


def test_optimizers_are_told_apart() -> None:
    lines = IncidentLines()
    assert len(said(lines, verdict(3, "GRAD001", optimizer="gen"), verdict(3, "GRAD001", optimizer="disc"))) == 2


def test_what_fifty_guards_find_at_once_is_one_line() -> None:
    stream, shared = io.StringIO(), Said()
    sinks = [ConsoleSink(stream, said=shared) for _ in range(58)]
    for sink in sinks:
        sink.write(verdict(3, "GRAD001"))
        sink.write(Outcome(at=4, action=CUT, applied=True))
    assert len(stream.getvalue().splitlines()) == 2
    ConsoleSink(stream, said=shared).write(verdict(30, "GRAD001"))  # at another place: not the same trouble
    assert len(stream.getvalue().splitlines()) == 3
    for sink in sinks:
        sink.close()
    ConsoleSink(stream, said=shared).write(verdict(3, "GRAD001"))  # a training that came later
    assert len(stream.getvalue().splitlines()) == 4


def test_outcomes_are_folded_in_the_same_way() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    for step in range(58):
        sink.write(Outcome(at=step, action=Action(kind="skip"), applied=True, detail="kept out"))
    assert stream.getvalue().splitlines() == [
        "trimtab: step 0: skip the update: done; kept out",
        "trimtab: step 9: skip the update: done; kept out (10th time)",
    ]


def test_loggers_get_one_alert_per_incident() -> None:
    class Run:
        def __init__(self) -> None:
            self.alerts: list[str] = []

        def log(self, values: object, step: int) -> None:
            pass

        def alert(self, title: str, text: str) -> None:
            self.alerts.append(title)

    run = Run()
    sink = adapt(run)
    assert isinstance(sink, MetricSink)
    for step in (3, 4, 60, 90):
        sink.write(verdict(step, "DATA001", "GRAD001"))
    assert run.alerts == ["DATA001 data001"]


def broken_training(tmp_path: Path, stream: io.StringIO, steps: int = 60) -> Guard:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, mode="act", run_dir=tmp_path / "run", sinks=[ConsoleSink(stream)]) as guard:
        for step in range(steps):
            loss = model(torch.randn(8, 4) * (float("nan") if step == 30 else 1.0)).square().mean()
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
    return guard


def test_a_guard_logs_one_line_per_incident(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    guard = broken_training(tmp_path, stream)
    assert len(guard.findings) >= 3
    warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warned) == 1
    assert all(f.code in warned[0] for f in guard.findings)
    errors = [line for line in stream.getvalue().splitlines() if line.startswith("trimtab ERROR")]
    assert len(errors) == 1


KINDS = {
    "skip": {},
    "stop": {},
    "skip_data": {},
    "rewind": {"before": 48.0, "back": 2.0, "limit": 1.0},
    "cut_lr": {"factor": 0.1, "after_rewind": 0.5},
    "back_off_scaler": {"factor": 0.5},
    "raise_weight_decay": {"factor": 1.5, "max": 0.1},
    "freeze_some_layers": {"how_many": 3.0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_actions_are_described_in_words(kind: str) -> None:
    words = str(Action(kind=kind, args=KINDS[kind]))
    assert "_" not in words
    assert "=" not in words
    assert words
    assert str(Action(kind=kind))


def test_every_remedy_has_words_of_its_own() -> None:
    from trimtab.core.types import _WORDS
    from trimtab.remedies import BUILTIN

    assert {*BUILTIN, "trials"} == set(_WORDS)  # trials are the guard's own: they run whole steps


def test_the_variants_of_going_back_and_cutting() -> None:
    def words(kind: str, **args: float) -> str:
        return str(Action(kind=kind, args=args))

    assert words("rewind", before=7, buffers=1) == "put the buffers back to before step 7"
    assert words("rewind", before=7, back=1) == (
        "roll the weights back to before step 7, 1 state further back than the last good one"
    )
    assert words("cut_lr", factor=0.1, after_rewind=1.0) == (
        "multiply the learning rate by 0.1, unless the weights went back"
    )


def test_no_view_of_a_run_shows_an_action_as_a_call(tmp_path: Path) -> None:
    from trimtab.report.html import write_html
    from trimtab.report.replay import replay

    stream = io.StringIO()
    broken_training(tmp_path, stream)
    run = read_run(tmp_path / "run")
    assert {a.kind for d in run.decisions for a in d.actions} >= {"skip", "cut_lr"}
    from trimtab.core.config import Config

    other = replay(tmp_path / "run", Config.from_dict({"mode": "act", "ignore": ["ALL"]}))
    views = [
        stream.getvalue(),
        to_text(summarise(run)),
        write_html(run).read_text(encoding="utf-8"),
        " ".join(other.differences),
    ]
    for view in views:
        flat = " ".join(view.split())
        assert "multiply the learning rate by 0.5" in flat
        assert "cut_lr" not in flat.replace('"cut_lr"', "")
        assert "factor=" not in flat


def test_a_line_names_what_the_incident_began_with() -> None:
    growing = [verdict(step, "OPT001", streak=step - 99) for step in range(100, 180)]
    assert said(IncidentLines(), *growing, verdict(180, "GRAD002")) == [
        "step 100: OPT001 opt001: It broke.",
        "step 180: GRAD002 grad002, after OPT001 opt001 at step 100: It broke.",
    ]


def test_what_is_over_is_not_named_as_the_cause_of_what_comes_later() -> None:
    lines = said(IncidentLines(), verdict(10, "DATA001"), verdict(40, "GRAD002"))
    assert lines[1] == "step 40: GRAD002 grad002: It broke."
