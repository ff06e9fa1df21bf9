"""The fenced blocks of the documentation, and what each of them claims: nothing is shown that nobody produced.

Every fence names its language and stands under a mark, an HTML comment that says where its content comes from:

    <!-- run -->                 it is run: `$ command` lines with their output, or Python
    <!-- run: numbers -->        the same, but digits (and the layout of lines) may differ from machine to machine
    <!-- run: excerpt -->        what is shown are parts of the output, with `…` on a line of its own between them
    <!-- run: exit=1 -->         the last command ends with this exit code (0 unless told)
    <!-- run: quick -->          Python that takes about a second: the test suite runs it as well
    <!-- output -->              what the Python block above it printed (takes `numbers` and `excerpt`)
    <!-- file: train.py -->      a file that later commands of the page find in their folder
    <!-- fragment -->            Python that needs the reader's own objects: it is run with those of docs_reader.py
    <!-- fragment: needs=NAME --> the same, where the module NAME is installed (all of them are in CI); it may warn
    <!-- fragment: cuda -->      the same, for a GPU: warnings that there is none are let pass
    <!-- commands -->            commands without output: they and their options must exist
    <!-- settings -->            TOML that `trimtab.Config` must accept
    <!-- from: FILE -->          every line stands in this file of the repository (also above tables and pictures)
    <!-- recorded: NAME -->      the output of a command too slow for every check: docs/recorded/NAME, by --record
    <!-- sketch -->              neither code nor output: a formula, a drawing, a layout of folders

Readers paste one block. So every Python block runs alone, in a fresh interpreter, unless its first line is the comment
`# continues above`, which the reader sees as well: then it goes on where the Python block above it ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
KINDS = ("run", "output", "file", "fragment", "commands", "settings", "from", "recorded", "sketch")
OPTIONS = re.compile(r"numbers|excerpt|quick|cuda|needs=\w+|exit=\d+")
CONTINUES = "# continues above"
README = ROOT / "README.md"
MARK = re.compile(r"^\s*<!--\s*([a-z]+)(?::\s*(.*?))?\s*-->\s*$")
FENCE = re.compile(r"^(\s*)(`{3,})\s*([\w+-]*)\s*(.*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One marked block: a fence, or (under `from`) the paragraph or table below the mark."""

    page: Path
    line: int  # the first line of its content, from 1
    language: str
    kind: str  # "" without a mark
    argument: str
    text: str
    indent: str = ""

    @property
    def options(self) -> frozenset[str]:
        """The words after the colon, for the kinds that take options."""
        if self.kind not in ("run", "output", "fragment"):
            return frozenset()
        return frozenset(word.strip() for word in self.argument.split(",") if word.strip())

    @property
    def continues(self) -> bool:
        """Whether it goes on where the Python block above it ended, as its first line tells the reader."""
        return self.language == "python" and self.text.startswith(CONTINUES)

    @property
    def where(self) -> str:
        """The place, as an editor understands it."""
        name = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page
        return f"{name}:{self.line}"


def pages(folder: Path = DOCS) -> list[Path]:
    """Every page of the documentation, in a fixed order."""
    return sorted(folder.rglob("*.md"))


def blocks(page: Path) -> Iterator[Block]:
    """The fences of a page and the paragraphs under a `from`, in their order; of the README those that are marked."""
    return (block for block in _blocks(page) if block.kind or page != README)


def _blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    mark, place = ("", ""), 0
    while place < len(lines):
        line = lines[place]
        said = MARK.match(line)
        fence = FENCE.match(line)
        if said and said[1] in KINDS:
            mark = (said[1], said[2] or "")
        elif fence:
            end = next((n for n in range(place + 1, len(lines)) if lines[n].strip() == fence[2]), len(lines))
            indent = fence[1]
            text = "\n".join(one.removeprefix(indent) for one in lines[place + 1 : end])
            yield Block(
                page=page, line=place + 2, language=fence[3], kind=mark[0], argument=mark[1], text=text, indent=indent
            )
            mark, place = ("", ""), end
        elif line.strip():
            if mark[0] == "from":
                end = next((n for n in range(place, len(lines)) if not lines[n].strip()), len(lines))
                text = "\n".join(lines[place:end])
                yield Block(page=page, line=place + 1, language="", kind="from", argument=mark[1], text=text)
                place = end - 1
            mark = ("", "")
        place += 1


def complaints(block: Block) -> Iterator[str]:
    """What is wrong with how a block is marked."""
    if not block.kind:
        yield f"{block.where}: a block without a mark; tools/docs_blocks.py says which there are"
        return
    if block.kind == "from" and not block.argument:
        yield f"{block.where}: `from` names no file"
    if not block.language and block.kind != "from":
        yield f"{block.where}: a fence without a language; use `text` where there is none"
    for option in block.options:
        if not OPTIONS.fullmatch(option):
            yield f"{block.where}: unknown option {option!r} of `{block.kind}`"
    allowed = {
        "run": ("console", "python"),
        "output": ("text",),
        "fragment": ("python",),
        "commands": ("bash",),
        "settings": ("toml",),
        "sketch": ("text",),
        "recorded": ("console",),
    }
    if block.kind in allowed and block.language not in allowed[block.kind]:
        yield f"{block.where}: `{block.kind}` goes with {' or '.join(allowed[block.kind])}, not {block.language!r}"
    if block.continues and block.kind not in ("run", "fragment"):
        yield f"{block.where}: only a block that is run can go on where another one ended"
    if block.kind == "sketch" and re.search(r"^\s*\$ ", block.text, re.MULTILINE):
        yield f"{block.where}: a sketch holds a command; run it, or record it"


def commands(block: Block) -> list[tuple[str, str]]:
    """The `$ command` lines of a console block, each with the output below it; a line that ends in \\ goes on."""
    found: list[tuple[str, list[str]]] = []
    lines = iter(block.text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while command.endswith("\\"):
                command = f"{command}\n{next(lines, '')}"
            found.append((command, []))
        elif found:
            found[-1][1].append(line)
    return [(command, "\n".join(output)) for command, output in found]
