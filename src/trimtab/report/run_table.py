"""One row per run, for a terminal, a page or a program: the same words everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from trimtab.core.errors import RecordError
from trimtab.core.printable import brief
from trimtab.record.reader import read_run
from trimtab.record.run_list import RunEntry, State
from trimtab.report.summary import CLOSED, Health, Summary, count, summarise

MAX_JUDGED_BYTES = 8_000_000
"""Lines of a record that are read to judge a run for a list; of a longer record its last line must do."""
TONES = {"good": "green", "bad": "red", "unclear": "yellow"}
_TONE_OF = {
    Health.EMPTY: "unclear",
    Health.HEALTHY: "good",
    Health.RECOVERED: "good",
    Health.SICK: "bad",
    Health.STOPPED: "bad",
    Health.INTERRUPTED: "unclear",
    Health.UNFINISHED: "unclear",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """What a list says about a run; all texts are on one line and safe to show."""

    folder: str
    folder_name: str
    run_id: str
    started: str
    script: str
    model: str
    num_steps: int
    verdict: str
    tone: str
    size_bytes: int
    state: str

    @property
    def size(self) -> str:
        """Its size for a person."""
        return size_words(self.size_bytes)

    def when(self, now: datetime) -> str:
        """When it started, as short as can be."""
        if not self.started:
            return "?"
        started = datetime.fromisoformat(self.started)
        if started.date() == now.date():
            return started.strftime("today %H:%M")
        return started.strftime("%d %b %H:%M" if started.year == now.year else "%Y-%m-%d")


def row_of(entry: RunEntry) -> RunRow:
    """Judge one run of a list."""
    verdict, tone = _verdict(entry)
    info, started = entry.info, entry.started
    return RunRow(
        folder=str(entry.folder),
        folder_name=brief(entry.folder.name, 80),
        run_id=brief(entry.name, 80),
        started=started.isoformat() if started is not None else "",
        script=brief(info.script, 40) if info is not None else "",
        model=brief(info.model, 40) if info is not None else "",
        num_steps=entry.num_steps,
        verdict=verdict,
        tone=tone,
        size_bytes=entry.size_bytes,
        state=entry.state.value,
    )


def _verdict(entry: RunEntry) -> tuple[str, str]:
    if entry.problem:
        return brief(entry.problem), "unclear"
    if entry.lines_bytes > MAX_JUDGED_BYTES:
        return _closing_words(entry)
    try:
        summary = summarise(read_run(entry.folder, tables=False))
    except RecordError as error:
        return brief(error), "unclear"
    return verdict_words(summary, entry.state), _tone(summary, entry.state)


def _tone(summary: Summary, state: State) -> str:
    if state is State.LIVE:
        return "bad" if summary.incidents else "good"
    return _TONE_OF[summary.health]


def verdict_words(summary: Summary, state: State) -> str:
    """The verdict on a run, and what was found first.

    A live run is not unfinished: nothing found so far is all that can be said of it.
    """
    word = summary.health.value
    if state is State.LIVE:
        word = "trouble" if summary.incidents else "nothing found so far"
    elif summary.health is Health.INTERRUPTED:
        word = f"ended with {brief(summary.ending, 60)}"
    elif summary.health is Health.UNFINISHED:
        word = "not closed: killed, or its machine is gone"
    if not summary.incidents:
        return word
    cause = summary.incidents[0].cause
    more = f" and {count(len(summary.incidents) - 1, 'more incident')}" if len(summary.incidents) > 1 else ""
    return f"{word}: {brief(cause.name, 60)} at step {cause.step:,}{more}"


def _closing_words(entry: RunEntry) -> tuple[str, str]:
    closing = entry.closing
    if closing is None:
        return f"{entry.state.value}; long record, `trimtab report` judges it", "unclear"
    found = count(closing.findings, "finding") if closing.findings else "no findings"
    ended = "" if closing.reason == CLOSED else f"ended with {brief(closing.reason, 60)}, "
    return f"{ended}{found}", "good" if not closing.findings and not ended else "unclear"


def size_words(num_bytes: int) -> str:
    """A number of bytes for a person.

    Example:
        >>> size_words(0), size_words(2_500), size_words(3_000_000_000)
        ('0 kB', '2.5 kB', '3 GB')
    """
    size, unit = num_bytes / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"
