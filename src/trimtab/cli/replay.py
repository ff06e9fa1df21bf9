"""`trimtab replay`: the verdicts of a run, made again from its record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli._shell import DIFFERENT, OK, command, console, emit
from trimtab.cli.report import RunArgument

if TYPE_CHECKING:
    from trimtab.report.replay import Replay

NAME = "replay"
NUM_SHOWN = 20


@command
def run(
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
    from trimtab.report.replay import replay

    folder = find_run(run_dir)
    made = replay(folder, Config.from_toml(config) if config is not None else None)
    if as_json:
        emit({"run_dir": str(folder), "replay": made})
    else:
        _show(made, folder)
    return OK if made.identical else DIFFERENT


def _show(made: Replay, folder: Path) -> None:
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
