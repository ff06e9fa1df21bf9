"""Checks that every block of the documentation is what it claims to be, by running it; or writes what was produced.

    python tools/docs_outputs.py --check                 every page; exit 1 with a list of what is not so
    python tools/docs_outputs.py --write docs/how-to     puts the real output into the pages named (or all)
    python tools/docs_outputs.py --show docs/index.md    prints the real output of each block
    python tools/docs_outputs.py --record docs/how-to/drill.md    makes the slow outputs again (docs/recorded)

Which marks there are is told in tools/docs_blocks.py; what may differ between two runs, in tools/docs_normal.py.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from docs_blocks import DOCS, README, ROOT, Block, blocks, commands, complaints, pages
from docs_links import link_complaints
from docs_normal import plain, same, tidy
from docs_session import Session, environment
from docs_static import static_complaints
from docs_warm import start

RECORDED = DOCS / "recorded"
Produced = dict[int, str]  # by the first line of a block: the text it should have


def quote_complaints(block: Block) -> Iterator[str]:
    """Lines of a quotation that do not stand where they are said to come from."""
    source = ROOT / block.argument if block.kind == "from" else RECORDED / block.argument
    if not source.is_file():
        yield f"{block.where}: there is no {source.relative_to(ROOT)} to quote from"
        return
    held = {line.strip() for line in source.read_text(encoding="utf-8").splitlines()}
    for line in block.text.splitlines():
        if line.strip() and line.strip() != "…" and line.strip() not in held:
            yield f"{block.where}: not in {source.relative_to(ROOT)}: {line.strip()}"


def difference(block: Block, what: str, shown: str, real: str, folder: Path) -> Iterator[str]:
    """A complaint where a page shows something else than was produced."""
    real = tidy(real, folder)
    if not same(shown, real, block.options):
        yield f"{block.where}: {what} gives something else:\n--- shown\n{plain(shown)}\n--- real\n{plain(real)}\n---"


def run_page(page: Path, found: list[Block], *first: Path) -> tuple[list[str], Produced, float]:
    """Run a page from top to bottom: what is not so, what its blocks should hold, and how long it took."""
    wrong: list[str] = []
    produced: Produced = {}
    began, printed = time.monotonic(), ""
    with tempfile.TemporaryDirectory(prefix="trimtab-docs-") as made:
        session = Session(Path(made), *first)
        try:
            for block in found:
                wanted = next((int(o[5:]) for o in block.options if o.startswith("exit=")), 0)
                if block.kind == "file":
                    path = session.folder / block.argument
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(block.text + "\n", encoding="utf-8")
                elif block.language == "python" and block.kind in ("run", "fragment") and is_possible(block):
                    options = [block.kind, *block.options]
                    printed, code = session.python(block.text, *options, continues=block.continues)
                    if code != wanted:
                        wrong.append(f"{block.where}: the block raised:\n{printed}")
                elif block.kind == "output":
                    wrong += difference(block, "the block above", block.text, printed, session.folder)
                    produced[block.line] = tidy(printed, session.folder)
                elif block.kind == "run":
                    texts, last = [], 0
                    for command, shown in commands(block):
                        real, last = session.shell(command)
                        wrong += difference(block, f"`{command}`", shown, real, session.folder)
                        texts.append(f"$ {command}\n{tidy(real, session.folder)}".rstrip("\n"))
                    if last != wanted:
                        wrong.append(f"{block.where}: exit code {last}, not {wanted} (declare it by exit={last})")
                    produced[block.line] = "\n".join(texts)
        finally:
            session.close()
    return wrong, produced, time.monotonic() - began


def is_possible(block: Block) -> bool:
    """Whether what a block says it needs is installed."""
    return all(find_spec(o.removeprefix("needs=")) for o in block.options if o.startswith("needs="))


def needs_running(found: list[Block]) -> bool:
    """Whether a page has anything to run."""
    return any(block.kind in ("run", "output", "fragment") for block in found)


def write_page(page: Path, found: list[Block], produced: Produced) -> int:
    """Put what was produced into a page; excerpts are the writer's own choice and stay. Returns how many changed."""
    lines, changed = page.read_text(encoding="utf-8").splitlines(), 0
    for block in reversed(found):
        text = produced.get(block.line)
        if text is None or same(block.text, text, block.options) or "excerpt" in block.options:
            continue
        end = block.line - 1 + len(block.text.splitlines())
        lines[block.line - 1 : end] = [f"{block.indent}{line}".rstrip() for line in text.splitlines()]
        changed += 1
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return changed


def record_page(found: list[Block]) -> None:
    """Run the slow commands of a page and keep what they print."""
    RECORDED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="trimtab-docs-") as made:
        session = Session(Path(made))
        for block in found:
            if block.kind == "file":
                (session.folder / block.argument).write_text(block.text + "\n", encoding="utf-8")
            for command, _ in commands(block) if block.kind == "recorded" else ():
                real, _ = session.shell(command)
                head = f"# {datetime.now(UTC):%Y-%m-%d}, by tools/docs_outputs.py --record"
                text = f"{head}\n$ {command}\n{tidy(real, session.folder)}\n"
                (RECORDED / block.argument).write_text(text, encoding="utf-8")
        session.close()


def wanted_pages(names: list[str]) -> list[Path]:
    """The pages named, by file or folder; all where none is, and the README."""
    chosen = [Path(name).resolve() for name in names]
    return [p for p in (*pages(), README) if not chosen or any(p == c or p.is_relative_to(c) for c in chosen)]


def main() -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("check", "write", "show", "record"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--cold", action="store_true", help="a fresh process for every command: four times as long")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("pages", nargs="*")
    args = parser.parse_args()
    wrong: list[str] = []
    if not args.pages:
        wrong += link_complaints()
    all_blocks = {page: list(blocks(page)) for page in wanted_pages(args.pages)}
    if args.record:
        for found in all_blocks.values():
            record_page(found)
        return 0
    for block in (b for found in all_blocks.values() for b in found):
        wrong += complaints(block)
        wrong += quote_complaints(block) if block.kind in ("from", "recorded") else static_complaints(block)
    to_run = {page: found for page, found in all_blocks.items() if needs_running(found)}
    with tempfile.TemporaryDirectory(prefix="trimtab-docs-") as made:
        warm = [] if args.cold or not to_run else start(Path(made), environment())
        first = [Path(made) / "bin"] if warm else []
        with ThreadPoolExecutor(args.jobs) as pool:
            results = list(pool.map(lambda page: run_page(page, to_run[page], *first), to_run))
        for process in warm:
            process.terminate()
            process.wait()
    for (page, found), (bad, produced, took) in zip(to_run.items(), results, strict=True):
        sys.stdout.write(f"{took:5.1f} s  {page.relative_to(ROOT)}\n")
        wrong += bad
        if args.write:
            sys.stdout.write(f"         {write_page(page, found, produced)} blocks written\n")
        for line, text in produced.items() if args.show else ():
            sys.stdout.write(f"--- {page.relative_to(ROOT)}:{line}\n{text}\n")
    num, used = sum(len(found) for found in all_blocks.values()), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = f"{used.ru_utime + used.ru_stime:.0f} s of processor time"
    sys.stdout.write("\n".join([*wrong, f"{num} blocks on {len(all_blocks)} pages, {len(wrong)} complaints; {cpu}\n"]))
    return int(bool(wrong) and not args.write)


if __name__ == "__main__":
    sys.exit(main())
