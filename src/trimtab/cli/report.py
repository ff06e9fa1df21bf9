"""`trimtab report`: what happened in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli._shell import OK, command, console, emit, fail

NAME = "report"

RunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run directory, or a directory of runs: then the newest.  "
        "[default: the newest in ./trimtab_runs or ./runs]",
        show_default=False,
    ),
]


@command
def run(
    run_dir: RunArgument = None,
    html: Annotated[
        bool, typer.Option("--html", help="Write a page with charts, one HTML file, and print where it is.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="Where to write the page.  [default: RUN/report.html]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Tell what happened in a run: its health, its findings, what was done."""
    if output is not None and not html:
        fail(f"--output {output} is where a page goes, and none was asked for; add --html")
    from trimtab.record.reader import find_run, read_run
    from trimtab.report.summary import summarise

    folder = find_run(run_dir)
    found = read_run(folder)
    if html:
        from trimtab.report.html import write_html

        path = write_html(found, output)
        if as_json:
            emit({"run_dir": str(folder), "html": str(path)})
        else:
            print(path)
        return OK
    summary = summarise(found)
    if as_json:
        emit({"run_dir": str(folder), "summary": summary})
        return OK
    from rich.text import Text

    from trimtab.report.text import render

    out = console()
    out.print(render(summary, width=out.width))
    out.print(Text(f"\nrecord: {folder}", style="dim"), soft_wrap=True)
    return OK
