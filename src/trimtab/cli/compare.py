"""`trimtab compare A B`: what differs between two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli._shell import OK, command, console, emit, fail

NAME = "compare"

By = Annotated[str, typer.Option("--by", metavar="step|epoch", help="What the runs are aligned by.")]
EpochSteps = Annotated[
    str | None,
    typer.Option(
        "--epoch-steps",
        metavar="N[,M]",
        help="Steps of one epoch, of both runs or of each, where the record does not say.",
        show_default=False,
    ),
]


@command
def run(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run directory, or a directory of runs: then the newest.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other one.")],
    by: By = "step",
    epoch_steps: EpochSteps = None,
    html: Annotated[bool, typer.Option("--html", help="Write a page with charts and print where it is.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="Where to write the page.  [default: beside A]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Compare two runs: settings, loss, gradient norms and findings, aligned by step or by epoch."""
    return show(a, b, by=by, epoch_steps=epoch_steps, html=html, output=output, as_json=as_json)


def show(a: Path, b: Path, *, by: str, epoch_steps: str | None, html: bool, output: Path | None, as_json: bool) -> int:
    """Compare and print; also behind `trimtab report A B`."""
    if output is not None and not html:
        fail(f"--output {output} is where a page goes, and none was asked for; add --html")
    from trimtab.record.reader import find_run, read_run
    from trimtab.report.compare import compare_runs, default_page
    from trimtab.report.compare_view import render_comparison, write_comparison

    folders = (find_run(a), find_run(b))
    one, other = (read_run(folder, tables=False) for folder in folders)
    found = compare_runs(one, other, by=by, epoch_steps=_lengths(epoch_steps))
    if html:
        path = default_page(folders) if output is None else output
        path = write_comparison(found, path / default_page(folders).name if path.is_dir() else path)
        if as_json:
            emit({"run_dirs": [str(f) for f in folders], "html": str(path)})
        else:
            print(path)
    elif as_json:
        names = ("names", "verdict", "same_until", "axis", "common", "measures", "found", "settings", "facts")
        emit(
            {"run_dirs": [str(f) for f in folders]}
            | {name: getattr(found, name) for name in names}
            | {"headlines": found.headlines}
        )
    else:
        out = console()
        out.print(render_comparison(found, out.width))
    return OK


def _lengths(text: str | None) -> list[int]:
    if text is None:
        return []
    parts = text.split(",")
    if len(parts) > 2 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        fail(f"--epoch-steps is {text!r}; expected the steps of one epoch, such as 390, or one number per run: 390,195")
    return [int(part) for part in parts]
