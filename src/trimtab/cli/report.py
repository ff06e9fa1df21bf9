"""`trimtab report` and `trimtab replay`: what happened in a run, and its verdicts made again from its record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli import compare
from trimtab.cli._shell import DIFFERENT, OK, command, console, emit, fail

if TYPE_CHECKING:
    from trimtab.report.replay import Replay

NAME = "report"
REPLAY = "replay"
NUM_SHOWN = 20

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
    other: Annotated[
        Path | None,
        typer.Argument(metavar="[OTHER]", help="Another run: shows what differs, as `trimtab compare` does."),
    ] = None,
    html: Annotated[
        bool, typer.Option("--html", help="Write a page with charts, one HTML file, and print where it is.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="Where to write the page.  [default: RUN/report.html]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Show what happened in a run: its health, its findings, what was done."""
    if output is not None and not html:
        fail(f"--output {output} is where a page goes, and none was asked for; add --html")
    if run_dir is not None and other is not None:
        return compare.show(run_dir, other, by="step", epoch_steps=None, html=html, output=output, as_json=as_json)
    from trimtab.record.reader import find_run, read_run
    from trimtab.report.summary import summarise

    folder = find_run(run_dir)
    if html:
        from trimtab.report.figures import on_page
        from trimtab.report.html import write_html

        found = read_run(folder, keep=on_page)
        path = write_html(found, output)
        if as_json:
            emit({"run_dir": str(folder), "html": str(path)})
        else:
            print(path)
        return OK
    found = read_run(folder)
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


@command
def replay(
    run_dir: RunArgument = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A TOML file of other settings: what would they have found?")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Make a run's verdicts again from its record.

    Exit code 0: the same as recorded; 1: they differ; 2: the record cannot be read.
    """
    from trimtab.core.config import Config
    from trimtab.record.reader import find_run
    from trimtab.report.replay import replay as judge_again

    folder = find_run(run_dir)
    made = judge_again(folder, Config.from_toml(config) if config is not None else None)
    if as_json:
        emit({"run_dir": str(folder), "replay": made})
    else:
        _show_replay(made, folder)
    return OK if made.identical else DIFFERENT


def _show_replay(made: Replay, folder: Path) -> None:
    from rich.text import Text

    from trimtab.report.text import wrapped

    out = console()
    num_findings = sum(len(v.findings) for v in made.verdicts)
    label, colour = ("IDENTICAL", "green") if made.identical else ("DIFFERENT", "red")
    what = "under other settings" if made.other_config else "from the record"
    out.print(
        Text.assemble(
            (f" {label} ", f"bold reverse {colour}"),
            f" {made.num_samples:,} samples judged again {what}: {num_findings} findings, "
            f"{len(made.decisions)} decisions, {made.num_differences} differences.",
        )
    )
    for optimizer, start in made.exact_from.items():
        who = f"{optimizer}: " if optimizer else ""
        if start is None:
            out.print(f"  {who}not exact anywhere: the record is too thin or damaged to start from")
        elif start > 0:
            out.print(f"  {who}exact from step {start} on; the steps before it were thinned out")
    for line in made.differences[:NUM_SHOWN]:
        out.print(wrapped(line, min(out.width, 100), "  - "))
    if made.num_differences > NUM_SHOWN:
        out.print(f"  … and {made.num_differences - NUM_SHOWN} more; --json lists them")
    out.print(Text(f"record: {folder}", style="dim"), soft_wrap=True)
