"""`trimtab export`: a run for other tools, as tables or as pictures of its charts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli._shell import OK, command, emit, fail
from trimtab.cli.report import RunArgument

if TYPE_CHECKING:
    from trimtab.record.reader import Run

NAME = "export"


@command
def run(
    run_dir: RunArgument = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="A table as CSV (what you get unless you say so).")] = False,
    parquet: Annotated[bool, typer.Option("--parquet", help="A table as Parquet; needs pyarrow.")] = False,
    svg: Annotated[bool, typer.Option("--svg", help="The charts as one SVG picture.")] = False,
    png: Annotated[bool, typer.Option("--png", help="The charts as one PNG picture; needs pillow.")] = False,
    table: Annotated[
        str,
        typer.Option(
            "--table",
            metavar="steps|findings|layers",
            help="Which table: a row per step, per finding, or per step and tensor.",
        ),
    ] = "steps",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="PATH", help="Where to write it; - is stdout.  [default: ./RUN-TABLE.csv]"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object that says what was written.")] = False,
) -> int:
    """Write a run as CSV or Parquet, or its charts as SVG or PNG, and print where it is."""
    kinds = [name for name, wanted in (("csv", as_csv), ("parquet", parquet), ("svg", svg), ("png", png)) if wanted]
    if len(kinds) > 1:
        fail(f"{' and '.join(f'--{kind}' for kind in kinds)} were given; expected one of them")
    from trimtab.core.errors import InputError
    from trimtab.record.frames import WHAT
    from trimtab.record.reader import find_run, read_run

    if table not in WHAT:
        raise InputError(f"--table is {table!r}; expected one of {', '.join(WHAT)}")
    kind = kinds[0] if kinds else "csv"
    folder = find_run(run_dir)
    found = read_run(folder, tables=table == "layers")
    what = "charts" if kind in ("svg", "png") else table
    path = output if output is not None else Path(f"{folder.resolve().name}-{what}.{kind}")
    if str(path) == "-" and kind in ("parquet", "png"):
        fail(f"--{kind} cannot go to a terminal or a pipe; give -o PATH")
    if str(path) != "-" and path.is_dir():
        path = path / f"{folder.resolve().name}-{what}.{kind}"
    num_rows = _write(found, kind, table, path)
    if as_json and str(path) != "-":
        emit({"run_dir": str(folder), "path": str(path), "format": kind, "table": what, "num_rows": num_rows})
    elif str(path) != "-":
        print(path)
    return OK


def _write(found: Run, kind: str, table: str, path: Path) -> int | None:
    from trimtab.record.frames import write_csv, write_parquet
    from trimtab.report.drawing import to_png, to_svg
    from trimtab.report.run_pictures import run_pictures

    if kind == "csv" and str(path) == "-":
        return write_csv(found, table, sys.stdout)
    if kind == "svg" and str(path) == "-":
        sys.stdout.write(to_svg(run_pictures(found)))
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            return write_csv(found, table, file)
    if kind == "parquet":
        return write_parquet(found, table, path)
    pictures = run_pictures(found)
    if not pictures:
        fail(f"{found.folder} holds no numbers to draw: no step was recorded")
    if kind == "svg":
        path.write_text(to_svg(pictures), encoding="utf-8")
    else:
        path.write_bytes(to_png(pictures))
    return None
