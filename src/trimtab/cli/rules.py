"""`trimtab rules`: all rules, or those that a selection would run."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from trimtab.cli._shell import OK, command, console, emit

NAME = "rules"


@command
def run(
    select: Annotated[
        list[str] | None,
        typer.Option("--select", help="Only these codes, families (GRAD) or names; repeat, or separate by commas."),
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option("--ignore", help="Not these.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """List the rules: what trimtab looks for.

    With --select and --ignore: which of them a run with these settings would use.
    """
    from trimtab.core.config import Config
    from trimtab.core.registry import all_rules, select_rules

    settings: dict[str, object] = {}
    if select:
        settings["select"] = _split(select)
    if ignore:
        settings["ignore"] = _split(ignore)
    chosen = {rule.code: rule for rule in select_rules(Config.from_dict(settings))}
    listed = [r for r in all_rules() if not settings or r.code in chosen]
    rows = [
        {
            "code": r.code,
            "name": r.name,
            "severity": chosen[r.code].severity.name.lower() if r.code in chosen else "off",
            "summary": (inspect.getdoc(r) or "").partition("\n")[0],
        }
        for r in listed
    ]
    if as_json:
        emit({"rules": rows, "num_rules": len(all_rules())})
    else:
        _show(rows, num_rules=len(all_rules()))
    return OK


def _show(rows: list[dict[str, str]], *, num_rules: int) -> None:
    from rich.table import Table

    out = console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title, style in (("code", "bold"), ("name", "cyan"), ("severity", "yellow"), ("what it sees", "")):
        table.add_column(title, style=style, no_wrap=title != "what it sees")
    for row in rows:
        table.add_row(row["code"], row["name"], row["severity"], row["summary"])
    out.print(table)
    out.print(
        f"\n{len(rows)} of {num_rules} rules. More about one: trimtab explain {rows[0]['code']}"
        if rows
        else f"None of the {num_rules} rules is selected."
    )


def _split(words: list[str]) -> list[str]:
    return [w.strip() for word in words for w in word.split(",") if w.strip()]
