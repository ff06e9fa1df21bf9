"""A summary as text a person takes in at a glance, and the console that it is printed on."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.text import Text

from trimtab.core.printable import printable
from trimtab.core.types import Severity
from trimtab.report.chart import BAD, MARK, Curve, chart, is_wide
from trimtab.report.headline import short
from trimtab.report.summary import Deed, Health, Incident, Summary, Track, Trouble, count, words_on

COLOURS = {
    Health.EMPTY: "yellow",
    Health.HEALTHY: "green",
    Health.RECOVERED: "green",
    Health.SICK: "red",
    Health.STOPPED: "red",
    Health.INTERRUPTED: "yellow",
    Health.UNFINISHED: "yellow",
}
SEVERITY_COLOURS = {Severity.WARN: "yellow", Severity.ERROR: "red", Severity.FATAL: "bold red"}
NUM_INCIDENTS = 8
NUM_ADVICE = 2
NUM_DEEDS = 12


def to_text(summary: Summary, width: int = 80) -> str:
    """Render a summary as plain text."""
    out = io.StringIO()
    SafeConsole(file=out, width=width, no_color=True).print(render(summary, width=width))
    return out.getvalue()


def render(summary: Summary, width: int = 80) -> RenderableType:
    """Render a summary for a rich console."""
    return Group(*_parts(summary, max(min(width, 100), 40)))


def _parts(summary: Summary, width: int) -> Iterator[RenderableType]:
    head = Text(f" {summary.health.value.upper()} ", style=f"bold reverse {COLOURS[summary.health]}")
    yield Text.assemble(head, " ", summary.headline)
    yield Text(_origin(summary), style="dim")
    if others := words_on(summary.ranks):
        yield wrapped(others, width, "")
    for track in summary.tracks:
        yield from _track(track, summary, width)
    if summary.incidents:
        yield Text(f"\nWhat was found ({count(len(summary.incidents), 'incident')})", style="bold")
    for number, incident in enumerate(summary.incidents[:NUM_INCIDENTS], start=1):
        yield from _incident(number, incident, width)
    if len(summary.incidents) > NUM_INCIDENTS:
        yield Text(f"… and {len(summary.incidents) - NUM_INCIDENTS} more; --json lists all of them.", style="dim")
    if summary.deeds:
        yield Text("\nWhat was done", style="bold")
        yield from _deeds(summary.deeds, width)
    if summary.problems:
        yield Text("\nWhat is wrong with the record", style="bold yellow")
        yield from (wrapped(p, width, "  - ") for p in summary.problems)


def _origin(summary: Summary) -> str:
    parts = [
        summary.run_id,
        f"{summary.model}, {summary.num_parameters:,} parameters" if summary.num_parameters else summary.model,
        f"mode {summary.mode}" if summary.mode else "",
        f"started {summary.started[:19]}" if summary.started else "",
    ]
    return " · ".join(p for p in parts if p)


def _track(track: Track, summary: Summary, width: int) -> Iterator[RenderableType]:
    name = f"{track.optimizer}: " if track.optimizer else ""
    marks = {t.finding.step for i in summary.incidents if i.optimizer == track.optimizer for t in i.troubles}
    shown = False
    for title, curve, facts in (
        ("loss", track.loss, _loss_facts(track.loss)),
        ("gradient norm", track.grad_norm, _norm_facts(track)),
    ):
        if curve is None:
            continue
        scale = " (log scale)" if is_wide(curve.values) else ""
        yield Text.assemble("\n", (f"{name}{title}", "bold"), (f"{scale}  {facts}", "dim"))
        yield _drawing(chart(curve, width=width - 12, marks=marks, bad=track.rejected_steps))
        shown = True
    if shown and (marks or track.rejected_steps):
        yield Text(f"{'':>10}{BAD} non-finite or rejected   {MARK} something was found", style="dim")
    if track.val_loss is not None:
        v = track.val_loss
        yield Text(f"{name}validation loss {v.first:.3g} → {v.last:.3g}, best {v.lowest:.3g}")


def _drawing(lines: list[str]) -> Text:
    drawing = Text("\n".join(lines), no_wrap=True, style="cyan")
    drawing.highlight_regex(f"[{BAD}{MARK}]", "bold red")
    return drawing


def _loss_facts(curve: Curve | None) -> str:
    if curve is None:
        return ""
    bad = f", {curve.num_nonfinite} non-finite" if curve.num_nonfinite else ""
    first, last = short(curve.began), short(curve.ended)
    return f"first {first}, best {curve.lowest:.3g}, last {last}{bad}"


def _norm_facts(track: Track) -> str:
    facts = []
    if track.grad_norm is not None:
        facts += [f"median {track.grad_norm.median:.3g}", f"max {track.grad_norm.highest:.3g}"]
    if track.clipped_frac:
        facts.append(f"clipped {100 * track.clipped_frac:.3g} %")
    if track.rejected_steps:
        facts.append(f"{len(track.rejected_steps)} rejected")
    return ", ".join(facts)


def _incident(number: int, incident: Incident, width: int) -> Iterator[RenderableType]:
    if incident.last_step > incident.onset:
        when = f"steps {incident.onset} to {incident.last_step}"
    else:
        when = f"step {incident.onset}"
    who = f" ({incident.optimizer})" if incident.optimizer else ""
    yield Text.assemble("\n", (f"{number}. {when}{who}", "bold"))
    for trouble in incident.troubles:
        yield from _trouble(trouble, width)
    for point in incident.cause.advice[:NUM_ADVICE]:
        yield wrapped(point, width, "   → ", style="green")


def _trouble(trouble: Trouble, width: int) -> Iterator[RenderableType]:
    finding = trouble.finding
    lasted = f" for {trouble.num_steps} steps" if trouble.num_steps > 1 else ""
    where = f"  in {_named(finding.subject)}" if finding.subject else ""
    yield Text.assemble(
        (f"   {finding.code} ", "bold"),
        (finding.name, SEVERITY_COLOURS[finding.severity]),
        (f"  step {finding.step}{lasted}{where}", "dim"),
    )
    yield wrapped(finding.message, width, "     ")


def _named(subject: tuple[str, ...], num: int = 3) -> str:
    more = f" and {len(subject) - num} more" if len(subject) > num else ""
    return ", ".join(subject[:num]) + more


def _deeds(deeds: tuple[Deed, ...], width: int) -> Iterator[RenderableType]:
    lines = list(_lines(deeds))
    for line in lines[:NUM_DEEDS]:
        yield wrapped(line, width, "  ")
    if len(lines) > NUM_DEEDS:
        yield Text(f"  … and {len(lines) - NUM_DEEDS} more", style="dim")


def _lines(deeds: tuple[Deed, ...]) -> Iterator[str]:
    """One line per step that was acted on; the same over and over is one line."""
    decided = [list(group) for _, group in groupby(deeds, key=lambda d: (d.about, d.optimizer))]
    for (what, because), group in groupby(decided, key=lambda g: (", ".join(map(_deed, g)), g[0].because)):
        several = [g[0].about for g in group]
        steps = f"step {several[0]}"
        if len(several) > 1:
            steps = f"steps {several[0]} to {several[-1]} ({len(several)} times)"
        yield f"{steps}, because of {', '.join(because)}: {what}"


def _deed(deed: Deed) -> str:
    failed = ", could not be done" if deed.applied is False else ""
    return f"{deed.words}{failed}{f' [{deed.detail}]' if deed.detail else ''}"


def wrapped(text: str, width: int, lead: str, style: str = "") -> Text:
    """Wrap a paragraph behind a lead such as `→ `; the lines after the first are indented as far."""
    lines = textwrap.fill(
        text, width - 1, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False
    )
    found = Text(lines)
    found.stylize(style, 0, len(lead))
    return found


class SafeConsole(Console):
    """A rich console that escapes control characters in all it prints, and takes `[bold]` for the text it is.

    Example:
        >>> import sys
        >>> SafeConsole(file=sys.stdout, width=40).print("a[red]b" + chr(27) + "[2J")
        a[red]b\\x1b[2J
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(**({"highlight": False, "emoji": False, "markup": False} | how))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What rich renders, with unsafe text escaped; colours and cursor movements are not text."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)
