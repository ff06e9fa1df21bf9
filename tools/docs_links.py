"""Links of the documentation: every page is reached from the menu, every link and anchor leads somewhere."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from docs_blocks import DOCS, ROOT, pages

LINK = re.compile(r"(?<!\\)\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
NAMED = re.compile(r"\bdocs/[\w./-]+\.(?:md|png|svg|txt)")
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
CODE = ("src", "tests", "benchmarks", "tools")


def prose(text: str) -> str:
    """The text without fenced blocks and inline code, in which brackets mean something else."""
    text = re.sub(r"^(\s*)(`{3,}).*?^\s*\2\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page: its headings as the site and GitHub name them, and explicit ids."""
    text = re.sub(r"^(`{3,}).*?^\1\s*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = set(re.findall(r"\bid=\"([\w-]+)\"", text)) | set(re.findall(r"\{\s*#([\w-]+)", text))
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", text, re.MULTILINE):
        found.add(slug(heading))
    return frozenset(found)


def slug(heading: str) -> str:
    """A heading as an anchor.

    Example:
        >>> slug("A clip threshold: `trimtab tune clip RUN`")
        'a-clip-threshold-trimtab-tune-clip-run'
    """
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def menu() -> list[str]:
    """The pages of the menu, in order."""
    return list(_leaves(tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]))


def _leaves(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from _leaves(value)
    else:
        for value in node:
            yield from _leaves(value)


def page_links(page: Path) -> Iterator[str]:
    """Links of one page that lead nowhere."""
    for target in LINK.findall(prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        if not aim.exists():
            yield f"{page.relative_to(ROOT)}: no such file: {target}"
        elif anchor and aim.suffix == ".md" and anchor not in anchors(aim):
            yield f"{page.relative_to(ROOT)}: no such heading: {target}"


def link_complaints() -> Iterator[str]:
    """Dead links and anchors, pages missing from the menu, and paths under docs/ that code names and nobody has."""
    for page in [*pages(), *(ROOT / name for name in OUTSIDE if (ROOT / name).exists())]:
        yield from page_links(page)
    listed = menu()
    made = {page.relative_to(DOCS).as_posix() for page in pages()}
    for name in sorted(made - set(listed)):
        yield f"docs/{name}: not in the menu of zensical.toml"
    for name in sorted(set(listed) - made):
        yield f"zensical.toml: no such page: docs/{name}"
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in NAMED.findall(path.read_text(encoding="utf-8")):
                if not (ROOT / name).exists():
                    yield f"{path.relative_to(ROOT)}: names {name}, which is not there"
