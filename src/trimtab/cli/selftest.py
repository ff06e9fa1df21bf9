"""`trimtab selftest`: test on this machine what trimtab promises."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli._shell import DIFFERENT, OK, command, console, emit, fail

if TYPE_CHECKING:
    from rich.console import Console

    from trimtab.train.selftest import Result

NAME = "selftest"
NO_BREAK = "\u00a0"


@command
def run(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> int:
    """Test on this machine what trimtab promises: real gradients, real faults, a record.

    On the CPU, and on the accelerator if there is one. Exit code 0: all passed; 1: a part failed.
    """
    if os.environ.get("TRIMTAB_DISABLE") not in (None, "", "0"):
        fail("TRIMTAB_DISABLE is set, so there is no guard to test; unset it and try again")
    from trimtab.train.selftest import run_selftest, versions

    if as_json:
        results = list(run_selftest())
        emit({"passed": all(r.passed for r in results), "versions": versions(), "parts": results})
    else:
        results = _show(console())
    return OK if all(r.passed for r in results) else DIFFERENT


def _show(out: Console) -> list[Result]:
    """Print each part as soon as it is done."""
    from rich.text import Text

    from trimtab.report.text import wrapped
    from trimtab.train.selftest import run_selftest, versions

    out.print(Text(", ".join(f"{name} {version}" for name, version in versions().items()), style="dim"))
    results: list[Result] = []
    shown = ""
    for result in run_selftest():
        results.append(result)
        heading = f"{result.heading} ({result.device})"
        if heading != shown:
            out.print(Text(f"\n{heading}", style="bold"))
            shown = heading
        if result.passed:
            out.print(Text.assemble(("  ✓ ", "bold green"), f"{result.name} passed!"))
        else:
            out.print(Text.assemble(("  ✗ ", "bold red"), f"{result.name} failed:"))
            out.print(wrapped(result.problem, min(out.width, 100), "      "))
        _show_facts(out, result)
    bad = [r for r in results if not r.passed]
    out.print()
    if bad:
        out.print(Text(f"{len(bad)} of {len(results)} tests failed on this machine.", style="bold red"))
        out.print("Please report it with this output, or with that of: trimtab selftest --json")
    else:
        out.print(Text("ALL TESTS COMPLETED!", style="bold green"), Text(f"{len(results)} passed."))
    return results


def _show_facts(out: Console, result: Result) -> None:
    from trimtab.report.text import wrapped

    if result.facts:
        line = "  ".join(f"{name}: {value}".replace(" ", NO_BREAK) for name, value in result.facts.items())
        text = wrapped(line, min(out.width, 100), "      ")
        text.plain = text.plain.replace(NO_BREAK, " ")
        text.stylize("dim")
        out.print(text)
