"""`trimtab explain`: what a rule sees, why it matters, and what to try."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from trimtab.cli._shell import OK, command, console, emit

NAME = "explain"


@command
def run(
    rule: Annotated[str, typer.Argument(metavar="RULE", help="A code such as GRAD001, or a name.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Explain a rule: what it sees, why it matters, what to try."""
    from trimtab.core.registry import find_rule

    found = find_rule(rule)
    text = inspect.getdoc(found) or ""
    if as_json:
        emit({"code": found.code, "name": found.name, "severity": found().severity, "text": text})
        return OK
    from rich.markdown import Markdown
    from rich.rule import Rule

    out = console()
    out.print(Rule(f"[bold]{found.code}[/bold] {found.name}", align="left"))
    # A terminal gets it rendered; a pipe gets the Markdown itself, which reads as well and can be pasted.
    if out.is_terminal:
        out.print(Markdown(text))
    else:
        print(text)
    return OK
