"""Lays the documentation out for the site generator: copies docs/ to build/docs and fills in what the code knows.

A line `<!-- generated: NAME -->` in a page stands for a table made here from rules, checks, commands and recipes, so
that it can never be out of date. Measurements (benchmarks/results) come along as pages of their own, and links that
leave docs/ lead to them; links to source files become plain text, because the site has no sources.

    python tools/docs_reference.py        # then: zensical build --strict
"""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from docs_blocks import DOCS, ROOT

BUILD = ROOT / "build" / "docs"
SOURCES = ROOT / "build" / "src"  # what the API pages are read from
RESULTS = ROOT / "benchmarks" / "results"
GENERATED = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
OUTWARD = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(((?:\.\./)+)((?!\.\.)[^)#\s]+)(#[^)\s]*)?\)")


FAMILIES = {
    "ACT": "activations and outputs",
    "AMP": "mixed precision",
    "CON": "contrastive training",
    "DIST": "several processes",
    "DATA": "inputs and targets",
    "EMA": "averaged weights",
    "GRAD": "gradients",
    "LOSS": "the loss",
    "MODE": "modes",
    "OPT": "the optimizer",
    "STEP": "the step itself",
    "UPD": "updates",
    "WGT": "weights and buffers",
    "WIRE": "wiring",
}


def cell(text: str) -> str:
    """Text for one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def demoted(text: str) -> str:
    """A docstring whose headings are no headings of the page."""
    return re.sub(r"^#+\s*(.+)$", r"**\1.**\n", inspect.cleandoc(text), flags=re.MULTILINE)


def catalogue(entries: list[Any], lead: Callable[[Any], str]) -> Iterator[str]:
    """A table of all, by family, and a section on each."""
    families: dict[str, list[Any]] = {}
    for one in sorted(entries, key=lambda e: e.code):
        families.setdefault(one.code.rstrip("0123456789"), []).append(one)
    yield "| code | name | |\n|---|---|---|"
    for family in families.values():
        for one in family:
            yield f"| {one.code} | [{one.name}](#{one.code.lower()}-{one.name}) | {cell(lead(one))} |"
    for name, family in families.items():
        yield f"\n## {name}: {FAMILIES[name]}" if name in FAMILIES else f"\n## {name}"
        for one in family:
            yield f"\n### {one.code} {one.name}\n\n{demoted(one.__doc__)}"


def rules() -> Iterator[str]:
    """Every rule: what it sees, why it matters, what to try."""
    from trimtab.core.registry import all_rules

    yield from catalogue(list(all_rules()), lambda rule: inspect.cleandoc(rule.__doc__).partition("\n\n")[0])


def checks() -> Iterator[str]:
    """Every check of doctor: its line, what it means, how it is checked."""
    from trimtab.doctor.examine import all_checks

    yield from catalogue(list(all_checks()), lambda check: check.title)


def kind(one: Any) -> str:
    """What a parameter takes, whichever release of typer describes it."""
    if getattr(one, "is_flag", False):
        return "flag"
    annotation = getattr(getattr(one, "type_descriptor", None), "annotation", None)
    name = getattr(annotation, "__name__", None) or getattr(getattr(one, "type", None), "name", "")
    return one.metavar or {"str": "text", "int": "whole number", "float": "number", "Path": "path"}.get(name, name)


def options(command: Any) -> Iterator[str]:
    """The parameters of a command as a table."""
    rows = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    if not rows:
        return
    yield "\n| option | value | default | |\n|---|---|---|---|"
    for one in rows:
        words = [word if word.startswith("-") else word.upper() for word in one.opts]
        default = "" if one.default in (None, False, "", ()) or callable(one.default) else f"`{one.default}`"
        names = ", ".join(f"`{word}`" for word in words)
        yield f"| {names} | {cell(kind(one))} | {default} | {cell(getattr(one, 'help', '') or '')} |"


def command(one: Any, path: str, level: str) -> Iterator[str]:
    """One command: what it says about itself, and its options."""
    text = inspect.cleandoc(one.help or "").replace("\f", "")
    yield f"\n{level} `{path}`\n\n{text}"
    if hasattr(one, "commands"):
        for name, child in one.commands.items():
            yield from command(child, f"{path} {name}", level + "#")
    else:
        yield from options(one)


def commands() -> Iterator[str]:
    """The whole command line, from what `--help` prints."""
    import typer

    from trimtab.cli.app import app

    root: Any = typer.main.get_command(app)
    for name, one in root.commands.items():
        yield from command(one, f"trimtab {name}", "##")


def recipes() -> Iterator[str]:
    """The recipes that there are, with their options and faults."""
    import typer

    from trimtab.cli.train import command_of
    from trimtab.train.recipes import RECIPES, load_recipe

    yield "| recipe | |\n|---|---|"
    for name, line in RECIPES:
        yield f"| [`{name}`](#trimtab-train-{name}) | {cell(line)} |"
    for name, _ in RECIPES:
        recipe = load_recipe(name)
        yield f"\n## `trimtab train {name}`\n\n{inspect.cleandoc(recipe.summary)}"
        faults: Any = recipe.faults
        if faults:
            yield "\n| `--fault` | |\n|---|---|"
            for fault in faults.values() if hasattr(faults, "values") else faults:
                yield f"| `{fault.name}` | {cell(fault.summary)} |"
        yield from options(typer.main.get_command(command_of(recipe)))


MADE: dict[str, Callable[[], Iterator[str]]] = {
    "rules": rules,
    "checks": checks,
    "commands": commands,
    "recipes": recipes,
}


def outward(page: Path, text: str) -> str:
    """Links that leave docs/: measurements are pages of the site, anything else is a name."""

    def replaced(match: re.Match[str]) -> str:
        words, ups, target, anchor = match[1], match[2], match[3], match[4] or ""
        aim = (page.parent / ups / target).resolve()
        if aim.is_relative_to(DOCS):
            return match[0]
        up = "../" * len(page.relative_to(DOCS).parent.parts)
        if aim == RESULTS:
            return f"[{words}]({up}results/index.md)"
        if aim.is_relative_to(RESULTS):
            return f"[{words}]({up}results/{aim.relative_to(RESULTS).as_posix()}{anchor})"
        return words

    return OUTWARD.sub(replaced, text)


def lay_out_sources() -> None:
    """Copy the package for mkdocstrings, which knows a section of examples only by its plural name."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    for path in (ROOT / "src").rglob("*.py"):
        copy = SOURCES / path.relative_to(ROOT / "src")
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8")
        copy.write_text(re.sub(r"^(\s+)Example:$", r"\1Examples:", text, flags=re.MULTILINE), encoding="utf-8")


def lay_out() -> int:
    """Make build/docs from scratch; returns the number of pages."""
    shutil.rmtree(BUILD, ignore_errors=True)
    shutil.copytree(DOCS, BUILD, ignore=shutil.ignore_patterns("recorded"))
    for page in sorted(DOCS.rglob("*.md")):
        text = outward(page, page.read_text(encoding="utf-8"))
        text = GENERATED.sub(lambda match: "\n".join(MADE[match[1]]()), text)
        (BUILD / page.relative_to(DOCS)).write_text(text, encoding="utf-8")
    folder = BUILD / "results"
    folder.mkdir()
    lines = ["# Measurements", "", "Each file was written by the script it names, on the machine it names.", ""]
    for result in sorted(RESULTS.glob("*.md")):
        text = re.sub(r"\]\((?!https?:)[^)]*\)", "]", result.read_text(encoding="utf-8"))
        (folder / result.name).write_text(text, encoding="utf-8")
        title = re.search(r"^#\s+(.+)$", text, re.MULTILINE)
        lines.append(f"- [{title[1] if title else result.stem}]({result.name})")
    (folder / "index.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(list(BUILD.rglob("*.md")))


if __name__ == "__main__":
    lay_out_sources()
    sys.stdout.write(f"{lay_out()} pages in {BUILD.relative_to(ROOT)}\n")
