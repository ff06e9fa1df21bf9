"""`trimtab runs`: every run in a directory, the newest first."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli._shell import OK, command, console, emit

if TYPE_CHECKING:
    from trimtab.report.run_table import RunRow

NAME = "runs"


@command
def run(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", help="A directory of runs.  [default: ./trimtab_runs and ./runs]", show_default=False
        ),
    ] = None,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Show at most this many, the newest.")] = 20,
    live: Annotated[bool, typer.Option("--live", help="Only runs that are still going.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """List runs: when, which script, how many steps, the verdict, the size, and whether it is still going."""
    from trimtab.record.run_list import State, list_runs
    from trimtab.report.run_table import row_of

    entries = [e for e in list_runs(directory) if not live or e.state is State.LIVE]
    rows = [row_of(entry) for entry in entries[:number]]
    if as_json:
        emit({"runs": rows, "num_runs": len(entries)})
    elif not rows:
        which = "live run" if live else "run"
        print(f"no {which} in {directory or './trimtab_runs or ./runs'}; `trimtab demo` records one")
    else:
        _show(rows, num_more=len(entries) - len(rows))
    return OK


def _show(rows: list[RunRow], *, num_more: int) -> None:
    from rich.table import Table
    from rich.text import Text

    from trimtab.report.run_table import TONES

    out = console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("when", no_wrap=True)
    table.add_column("run", style="cyan", no_wrap=out.width >= 100, overflow="fold")
    table.add_column("script", overflow="fold")
    table.add_column("steps", justify="right", no_wrap=True)
    table.add_column("verdict", ratio=1, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    now = datetime.now().astimezone()
    for row in rows:
        table.add_row(
            row.when(now),
            row.folder_name,
            row.script or "-",
            f"{row.num_steps:,}",
            Text(row.verdict, style=TONES.get(row.tone, "")),
            row.size,
            Text(row.state, style="bold green" if row.state == "live" else "dim"),
        )
    out.print(table)
    if num_more:
        out.print(Text(f"… and {num_more:,} more; --number {num_more + len(rows)} shows all", style="dim"))
