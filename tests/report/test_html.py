"""The page: complete, self-contained, inert whatever the run was called, and honest about what is missing."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.conftest import LAYOUT, WriteRun, make_sample
from trimtab.core.config import Config
from trimtab.core.types import (
    NORM_COLUMNS,
    Action,
    Closing,
    Decision,
    Finding,
    Kind,
    Layout,
    Outcome,
    RunInfo,
    Sample,
    Severity,
    Verdict,
)
from trimtab.record.reader import read_run
from trimtab.record.writer import RunWriter
from trimtab.report.html import NAME, to_html, to_script, write_html
from trimtab.report.summary import Health, summarise

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&</style>{{ 7 * 7 }}\u2028ü漢"


class Page(HTMLParser):
    """Collects the elements, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open = tag
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.open = ""

    def handle_data(self, data: str) -> None:
        if self.open == "script":
            self.scripts[-1] += data
        elif self.open != "style":
            self.texts.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))

    @property
    def data(self) -> dict[str, Any]:
        def refuse(text: str) -> None:
            raise AssertionError(f"{text} is not JSON")

        found: dict[str, Any] = json.loads(self.scripts[0], parse_constant=refuse)
        return found


def page_of(folder: Path) -> Page:
    return Page(to_html(read_run(folder)))


def evil_run(folder: Path) -> Path:
    """A record in which every text that a user or an exception may choose is hostile."""
    writer = RunWriter(folder)
    writer.write(
        RunInfo(
            run_id=EVIL,
            started=EVIL,
            config=Config().to_dict() | {"ignore": [EVIL]},
            versions={EVIL: EVIL},
            model=EVIL,
            num_parameters=3,
            optimizers=(EVIL,),
            rules=(EVIL,),
        )
    )
    layout = Layout(names=(EVIL, "b"), kinds=(Kind.GRAD,) * 2, numel=(1, 1), columns=NORM_COLUMNS, optimizer=EVIL)
    for step in range(5):
        table = np.ones((2, 1), np.float32)
        writer.write(Sample(step=step, layout=layout, table=table, scalars={"loss": 1.0, f"lr/{EVIL}": 1.0}))
    finding = Finding(
        code=EVIL,
        name=EVIL,
        step=2,
        severity=Severity.FATAL,
        message=EVIL,
        subject=(EVIL,),
        evidence={EVIL: math.nan},
        advice=(EVIL,),
        optimizer=EVIL,
    )
    writer.write(Verdict(step=2, seen_at=2, findings=(finding,), optimizer=EVIL))
    action = Action(kind=EVIL, args={EVIL: math.inf})
    writer.write(Decision(about=2, at=3, actions=(action,), because=(EVIL,), optimizer=EVIL))
    writer.write(Outcome(at=3, action=action, applied=False, detail=EVIL, optimizer=EVIL))
    writer.write(Closing(steps={EVIL: 5}, rejected=0, findings=1, reason=EVIL))
    writer.close()
    with (folder / "run.jsonl").open("a", encoding="utf-8") as file:
        file.write(EVIL + "\n")
    return folder


def test_hostile_text_is_inert(tmp_path: Path) -> None:
    calm = page_of(evil_run(tmp_path / "evil"))
    assert calm.tags.count("script") == 2  # the data and the charts
    assert "img" not in calm.tags
    assert not [a for a in calm.attributes if a[1].startswith("on")]
    assert "49" not in calm.words.split()  # a name is no template
    assert calm.words.count("alert(1)") >= 10
    (section,) = calm.data["sections"]
    assert section["optimizer"] == EVIL
    assert section["heats"][0]["names"] == [EVIL, "b"]
    assert section["named"] == [EVIL]
    assert EVIL in section["incidents"][0]["text"]
    assert "<" not in calm.scripts[0]


def test_half_a_surrogate_does_not_stop_the_page(tmp_path: Path) -> None:
    folder = evil_run(tmp_path / "run")
    path = folder / "run.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"b"', b'"\\ud800"'))
    assert write_html(read_run(folder)).stat().st_size > 1000


def test_the_page_asks_nobody_for_anything(write_run: WriteRun) -> None:
    text = to_html(read_run(write_run([1.0] * 40)))
    page = Page(text)
    for tag, name, value in page.attributes:
        assert name not in ("src", "srcset", "action", "background", "ping", "style"), (tag, name, value)
        if name == "href":
            assert value.startswith("#")
    assert not {"link", "img", "iframe", "object", "embed", "form", "base"} & set(page.tags)
    assert not re.search(r"https?://|@import|url\(", text)
    policy = next(v for t, n, v in page.attributes if t == "meta" and n == "content" and "default-src" in v)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert text.index("Content-Security-Policy") < text.index("<style>")


def test_data_cannot_end_its_element() -> None:
    assert json.loads(to_script([EVIL])) == [EVIL]
    assert "<" not in to_script([EVIL])


def test_what_a_run_was_and_what_was_found(write_run: WriteRun) -> None:
    losses = [2.0 - s / 100 for s in range(30)] + [math.nan] + [1.6 - s / 100 for s in range(60)]
    page = page_of(write_run(losses, settings={"mode": "act", "clip": 1.0, "full_every": 7}))
    summary = summarise(read_run(write_run(losses, name="again")))
    assert summary.health is Health.RECOVERED
    order = [
        "Recovered",
        "Step 30: The loss is NaN",
        "Do first",
        "Over time",
        "Gradients by layer",
        "What was found",
        "How to go on",
        "Settings and versions",
    ]
    assert sorted(order, key=page.words.index) == order
    for part in ("Toy, 6 parameters", "clip.norm = 1.0", "full_every = 7", "torch 2.13.0", "2025-01-01 00:00:00 UTC"):
        assert part in page.words, part
    for trouble in summary.incidents[0].troubles:
        for part in (trouble.finding.code, trouble.finding.message, *trouble.finding.advice[:5]):
            for piece in re.sub(r"\s+", " ", part).split("`"):
                assert piece.strip() in page.words, part
    assert "2 of 2 gradients" in page.words
    for inside in ("num_tensors", "num_measured", "grad_norm", "`"):
        assert inside not in page.words
    for part in ("error", "Step 30", "trimtab explain LOSS001", "trimtab replay", "What was done"):
        assert part in page.words, part
    for deed in summary.deeds:
        assert deed.words in page.words
    marks = page.data["sections"][0]["incidents"]
    assert [(m["number"], m["from"], m["severity"]) for m in marks] == [(1, 30, "error")]
    assert ("article", "id", "incident-1") in page.attributes


@pytest.mark.parametrize(
    ("make", "tone", "words"),
    [
        ({"losses": [1.0] * 60}, "good", ("Healthy", "Nothing. No rule had anything to say")),
        ({"losses": [1.0] * 30 + [math.nan] + [1.0] * 60}, "good", ("Recovered", "What to try")),
        ({"losses": [1.0] * 30 + [math.nan] * 3}, "bad", ("Sick", "What was found")),
        ({"losses": [1.0] * 30, "closed": "stopped"}, "bad", ("Stopped", "stopped for its health")),
        ({"losses": [1.0] * 30, "closed": None}, "unclear", ("Unfinished", "The record was not closed")),
        ({"losses": [1.0] * 30, "closed": "OSError"}, "unclear", ("Interrupted", "The run ended with: OSError")),
        ({"losses": []}, "unclear", ("Nothing recorded", "No training step was recorded")),
        ({"losses": [], "closed": None}, "unclear", ("Unfinished", "was not closed")),
        ({"losses": [math.nan] * 20}, "bad", ("Sick",)),
        ({"losses": [0.0]}, "good", ("Healthy",)),
    ],
)
def test_every_state_of_a_run(write_run: WriteRun, make: dict[str, Any], tone: str, words: tuple[str, ...]) -> None:
    page = page_of(write_run(**make))
    assert ("header", "class", f"verdict {tone}") in page.attributes
    for part in words:
        assert part in page.words, part
    assert page.data["sections"] or not make["losses"]


def test_a_run_without_loss_says_so(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    for step in range(5):
        sample = make_sample(step, 1.0, 1.0)
        scalars = {"grad_norm": 1.0}
        writer.write(Sample(step=step, layout=LAYOUT, table=sample.table, scalars=scalars))
    writer.close()
    page = page_of(tmp_path)
    assert "No loss was recorded." in page.words
    assert [p["title"] for p in page.data["sections"][0]["panels"]] == ["Gradient norm"]
    assert "unknown model" in page.words  # the first line, too, is missing


def test_damage_is_told(write_run: WriteRun) -> None:
    folder = write_run([1.0] * 20)
    path = folder / "run.jsonl"
    path.write_bytes(path.read_bytes()[:-40] + b"\n")
    (folder / "tables.f32").unlink()
    page = page_of(folder)
    assert "What is wrong with the record" in page.words
    assert "tables.f32 is missing" in page.words
    assert page.data["sections"][0]["heats"] == []


def test_what_was_traced_is_shown_with_its_command(write_run: WriteRun) -> None:
    folder = write_run([1.0] * 30 + [math.nan] + [1.0] * 30)
    where = folder / "incidents" / "step-00000030"
    where.mkdir(parents=True)
    origin = {"cause": "op", "op": "aten.log.default", "module": EVIL, "file": "/a/train.py", "line": 7, "code": EVIL}
    body = {"format": 1, "step": 30, "origin": {**origin, "why": "the logarithm of 0", "remedy": "add 1e-8"}}
    (where / "incident.json").write_text(json.dumps(body))
    page = page_of(folder)
    for part in ("the logarithm of 0", "train.py:7", "aten.log.default", "add 1e-8", f"trimtab trace {where}"):
        assert part in page.words, part
    assert page.tags.count("script") == 2
    assert "img" not in page.tags


def test_consequences_are_folded_and_the_last_value_may_be_nan(write_run: WriteRun) -> None:
    page = page_of(write_run([1.0] * 30 + [math.nan] * 3))
    assert ("details", "class", "followed") in page.attributes
    assert "1 → NaN" in page.words


def test_many_incidents_do_not_make_an_endless_page(write_run: WriteRun) -> None:
    losses = [math.nan if s % 10 == 9 else 1.0 for s in range(2500)]
    page = page_of(write_run(losses))
    assert page.tags.count("article") == 200
    assert "more incidents" in page.words


def test_a_page_is_written_whole_or_not_at_all(write_run: WriteRun, tmp_path: Path) -> None:
    run = read_run(write_run([1.0] * 5))
    assert write_html(run) == run.folder / NAME
    assert write_html(run, tmp_path / "new" / "x.html") == tmp_path / "new" / "x.html"
    assert write_html(run, tmp_path) == tmp_path / NAME
    assert not list(tmp_path.rglob("*.writing"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        write_html(run, tmp_path / "file" / "x.html")
    assert len(read_run(run.folder)) == 5  # the page beside it does not disturb the record
