"""`trimtab explain`: what a rule or a check sees and what to try about it, or what to do about a symptom."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli._shell import OK, command, console, emit

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from trimtab.advice.engine import Recommendation
    from trimtab.advice.guides import Guide

NAME = "explain"
MOST_COLUMNS = 100
SUPPORTED = "What the evidence of a finding supports comes with it, with the numbers of the run:"


@command
def run(
    rule: Annotated[str | None, typer.Argument(metavar="[RULE]", help="A code such as GRAD001, or a name.")] = None,
    problem: Annotated[
        str | None, typer.Option("--problem", help="A symptom: nan, plateau, explosion, slow, or checklist.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Explain a rule: what it sees, why it matters, what to try.

    With --problem: what to do about a symptom, step by step.
    """
    from trimtab.advice.guides import GUIDES, find_guide
    from trimtab.core.errors import InputError

    if (rule is None) == (problem is None):
        raise InputError(
            f"give either a rule (`trimtab explain GRAD001`; `trimtab rules` lists them) or --problem with one of "
            f"{', '.join(GUIDES)}"
        )
    if problem is not None:
        _guide(find_guide(problem), as_json=as_json)
    else:
        _rule(str(rule), as_json=as_json)
    return OK


# -- a rule ----------------------------------------------------------------------------------------------------------


def _rule(name: str, *, as_json: bool) -> None:
    from trimtab.advice.recommendations import recommendations_for
    from trimtab.core.errors import ConfigError
    from trimtab.core.registry import find_rule

    try:
        found = find_rule(name)
    except ConfigError:
        if not _check(name, as_json=as_json):
            raise
        return
    text = inspect.getdoc(found) or ""
    points = recommendations_for(found.name)
    if as_json:
        advice = [{"topic": r.topic, "when": r.when, "text": r.text} for r in points]
        emit(
            {
                "code": found.code,
                "name": found.name,
                "severity": found().severity,
                "text": text,
                "by_evidence": advice,
            }
        )
        return
    from rich.markdown import Markdown
    from rich.rule import Rule
    from rich.text import Text

    out = console()
    width = min(out.width, MOST_COLUMNS)
    out.print(Rule(Text.assemble((found.code, "bold"), f" {found.name}"), align="left"))
    # A terminal gets it rendered; a pipe gets the Markdown itself, which reads as well and can be pasted.
    if out.is_terminal:
        out.print(Markdown(text), width=width)
        _by_evidence(out, points, width)
    else:
        print("\n".join((text, *_in_markdown(points, width))))


def _check(name: str, *, as_json: bool) -> bool:
    """Explain a check of `trimtab doctor` that is not a rule; False if there is no check of this name."""
    from trimtab.doctor.examine import find_check

    found = find_check(name)
    if found is None:
        return False
    text = inspect.getdoc(type(found)) or ""
    if as_json:
        emit({"code": found.code, "name": found.name, "severity": "check", "text": text, "by_evidence": []})
        return True
    from rich.markdown import Markdown
    from rich.rule import Rule
    from rich.text import Text

    out = console()
    out.print(Rule(Text.assemble((found.code, "bold"), f" {found.name}"), align="left"))
    if out.is_terminal:
        out.print(Markdown(text), width=min(out.width, MOST_COLUMNS))
    else:
        print(text)
    return True


def _in_markdown(points: tuple[Recommendation, ...], width: int) -> Iterator[str]:
    if points:
        yield f"\n## By evidence\n{SUPPORTED}\n"
    for point in points:
        yield _fill(f"**{_when(point)}**: {point.text}", width, "- ")


def _by_evidence(out: Console, points: tuple[Recommendation, ...], width: int) -> None:
    from rich.markdown import Markdown
    from rich.text import Text

    if points:
        out.print(Markdown(f"## By evidence\n\n{SUPPORTED}"), width=width)
    for point in points:
        out.print(Text.assemble("\n", (_fill(_when(point), width), "cyan")))
        out.print(_led("→ ", "green", point.text, width))


def _when(point: Recommendation) -> str:
    words = point.when if point.when.startswith(("always", "before", "from")) else f"when {point.when}"
    return words[:1].upper() + words[1:]


def _fill(text: str, width: int, lead: str = "") -> str:
    """Wrap a paragraph, at spaces only."""
    indent = " " * len(lead)
    return textwrap.fill(text, width - 1, initial_indent=lead, subsequent_indent=indent, break_on_hyphens=False)


def _led(lead: str, style: str, text: str, width: int, of_text: str = "") -> Text:
    """A paragraph behind a lead such as an arrow or a number."""
    from rich.text import Text

    found = Text(_fill(text, width, lead), style=of_text)
    found.stylize(style, 0, len(lead))
    return found


# -- a symptom -------------------------------------------------------------------------------------------------------


def _guide(guide: Guide, *, as_json: bool) -> None:
    if as_json:
        steps = [{"do": p.do, "check": p.check} for p in guide.points]
        emit(
            {
                "problem": guide.problem,
                "title": guide.title,
                "signs": guide.signs,
                "findings": guide.findings,
                "steps": steps,
                "beware": guide.beware,
            }
        )
        return
    from rich.rule import Rule
    from rich.text import Text

    out = console()
    width = min(out.width, MOST_COLUMNS)
    out.print(Rule(Text(guide.title, style="bold"), align="left"), width=width)
    for part in _parts(guide, width):
        out.print(part)


def _parts(guide: Guide, width: int) -> Iterator[RenderableType]:
    from rich.text import Text

    yield _fill(guide.signs, width)
    if guide.findings:
        yield _led("Findings: ", "bold", ", ".join(guide.findings), width)
    yield Text("Try in this order; → shows how to see whether it applies.", style="dim")
    for number, point in enumerate(guide.points, 1):
        yield Text()
        yield _led(f"{number:>2}. ", "bold", point.do, width, of_text="bold")
        yield _led("    → ", "green", point.check, width)
    if guide.beware:
        yield Text("\nBeware", style="bold yellow")
        for line in guide.beware:
            yield _led("  - ", "yellow", line, width)
    yield Text("\nMore about a finding:  trimtab explain NAME", style="dim")
    if guide.problem != "checklist":
        yield Text("Ten points to check:   trimtab explain --problem checklist", style="dim")
