"""`trimtab drill`: inject known faults into a training and see whether the guard finds them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli._shell import DIFFERENT, NO, OK, YES, command, console, emit, fail

if TYPE_CHECKING:
    from rich.console import Console

    from trimtab.drill.score import Report, Row

NAME = "drill"
PAGE = "drill.html"
STYLES = {"good": "green", "bad": "bold red", "unclear": "yellow"}


@command
def run(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[TARGET]", help="module:function or path/to/file.py:function.", show_default=False),
    ] = None,
    num_steps: Annotated[int, typer.Option("--steps", min=2, help="Steps of every run.")] = 120,
    onset: Annotated[int, typer.Option("--onset", min=1, help="The step at which a fault begins.")] = 40,
    select: Annotated[str, typer.Option("--select", help="Only these faults or groups.")] = "",
    ignore: Annotated[str, typer.Option("--ignore", help="All but these.")] = "",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of every fault, each with a different seed.")] = 1,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs at the same time.")] = 1,
    budget_s: Annotated[float, typer.Option("--budget-s", help="Seconds for all of it.")] = 300.0,
    mode: Annotated[str, typer.Option("--mode", help="The guard's: observe, advise or act.")] = "observe",
    min_recall: Annotated[
        float, typer.Option("--min-recall", min=0.0, max=1.0, help="Exit 1 if recall on harmful faults is lower.")
    ] = 0.8,
    html: Annotated[bool, typer.Option("--html", help="Also write a page, and print where it is.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="Where to write the page.  [default: ./drill.html]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Inject known faults into your own training, one by one, and measure what the guard finds.

    Every run is made in a child process from a fresh build of the target (the same as for `trimtab doctor`; without
    one: `doctor` in \\[tool.trimtab], else a bundled sample). Exit code 0: no false alarm, and recall of at least
    --min-recall; 1: otherwise; 2: could not run.
    """
    if output is not None and not html:
        fail(f"--output {output} is where a page goes, and none was asked for; add --html")
    from trimtab.cli.doctor import target_spec
    from trimtab.core.config_read import words
    from trimtab.drill.faults import choose
    from trimtab.drill.page import write_page
    from trimtab.drill.score import Task
    from trimtab.drill.session import drill

    spec = target_spec([target] if target else None)
    faults = choose(words(select, "--select"), words(ignore, "--ignore"))
    task = Task(target=spec, num_steps=num_steps, onset=onset, mode=mode)
    progress = _Progress(len(faults) * seeds, silent=as_json)
    report = drill(task, faults, seeds=seeds, jobs=jobs, budget_s=budget_s, on_row=progress)
    progress.clear()
    page = write_page(report, output or Path(PAGE), min_recall) if html else None
    if not report.ran:
        parts = [*report.not_applicable, *report.not_run]
        fail(f"no fault could be injected into {spec}: {'; '.join(f'{names}: {reason}' for reason, names in parts)}")
    held = report.holds(min_recall)
    if as_json:
        emit({"report": report, "score": report.score, "passed": held, "html": page and str(page)})
    else:
        _show(console(), report, passed=held)
        if page is not None:
            print(f"page: {page}")
    return OK if held else DIFFERENT


def today(argv: Sequence[str]) -> list[str]:
    """Words in the spelling of today: `--html PATH` was one option, and is `--html -o PATH` now.

    Example:
        >>> today(["drill", "--html", "out.html", "m:f"]), today(["drill", "--html", "m:f"])
        (['drill', '--html', '-o', 'out.html', 'm:f'], ['drill', '--html', 'm:f'])
    """
    out: list[str] = []
    for word in argv:
        name, equals, value = word.partition("=")
        is_path = word.endswith((".html", ".htm")) and out[-1:] == ["--html"]
        if name == "--html" and equals and value.lower() not in YES | NO:
            out += ["--html", "-o", value]
        else:
            out += ["-o", word] if is_path else [word]
    return out


class _Progress:
    """Shows progress in one line of stderr, on a terminal only."""

    def __init__(self, num: int, *, silent: bool) -> None:
        self._num, self._done = num, 0
        self._on = not silent and sys.stderr.isatty()

    def __call__(self, row: Row) -> None:
        self._done += 1
        self._say(f"{self._done} of {self._num}: {row.fault} {row.status}")

    def clear(self) -> None:
        """Remove the line."""
        self._say("")

    def _say(self, text: str) -> None:
        if self._on:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _show(out: Console, report: Report, *, passed: bool) -> None:
    from rich.text import Text

    from trimtab.report.text import wrapped

    width = min(out.width, 110)
    num = len({row.fault for row in report.rows})
    out.print(
        Text(
            f"{report.target}: {num} fault{'s' if num != 1 else ''}, {report.num_steps} steps each, "
            f"from step {report.onset} on, mode {report.mode}\n",
            style="dim",
        )
    )
    _table(out, report)
    out.print()
    for title, parts in (("not applicable", report.not_applicable), ("NOT RUN", report.not_run)):
        for reason, names in parts:
            out.print(wrapped(f"{names}: {reason}", width, f"{title}  ", style="dim"))
    for text in report.alarms:
        out.print(wrapped(text, width, "FALSE ALARM  ", style="bold red"))
    out.print(wrapped(report.counts, width, "", style="dim"))
    out.print(wrapped(f"Cost: {report.cost}.", width, "", style="dim"))
    out.print(Text(f"{report.seconds:.0f} s; all of it in child processes.", style="dim"))
    out.print(Text(report.sentence, style="bold green" if passed else "bold red"), soft_wrap=True)


def _table(out: Console, report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    several, changed = len(report.seeds) > 1, report.mode != "observe"
    for title in ("fault", "group", *(["seed"] if several else []), "found by"):
        table.add_column(title, no_wrap=title != "found by", overflow="fold")
    table.add_column("after", justify="right", no_wrap=True)
    table.add_column("unguarded")
    if changed:
        table.add_column("guarded")
    for row in report.ran:
        found = Text(row.found_by, style=STYLES[row.tone])
        parts = [Text(row.fault), Text(row.group), *([Text(str(row.seed))] if several else []), found]
        parts += [Text(row.after), Text(row.unguarded, style="" if row.harmful else "dim")]
        table.add_row(*parts, *([Text(row.kept)] if changed else []))
    out.print(table)
