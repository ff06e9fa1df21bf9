"""The documentation: its four parts, its links, what its pages promise, and the blocks that are quick enough to run.

`.ci/docs` runs all the others and builds the site. The tools under test are in tools/docs*.py.
"""

from __future__ import annotations

import doctest
import importlib
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from tests.matrix import sampled
from trimtab.core.config import Config, PolicyConfig

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from docs_blocks import CONTINUES, DOCS, README, Block, blocks, complaints, pages  # noqa: E402
from docs_links import anchors, link_complaints, menu  # noqa: E402
from docs_normal import same, tidy  # noqa: E402
from docs_outputs import quote_complaints  # noqa: E402
from docs_session import Session, environment  # noqa: E402
from docs_site import site_complaints  # noqa: E402
from docs_static import static_complaints  # noqa: E402
from docs_warm import start  # noqa: E402

ALL = [block for page in (*pages(), README) for block in blocks(page)]


def quick() -> list[tuple[Block, Block | None]]:
    """Blocks that say they are quick, each with the output that is shown below it."""
    found = []
    for one, after in zip(ALL, [*ALL[1:], None], strict=True):
        if "quick" in one.options:
            shown = after if after is not None and after.kind == "output" and after.page == one.page else None
            found.append((one, shown))
    return found


def test_a37_the_guide_has_what_was_promised() -> None:
    """The N-way problem, the maths of gradient flow, integration step by step, performance, troubleshooting."""
    for part in ("tutorials", "how-to", "reference", "explanation"):
        assert len(list((DOCS / part).glob("*.md"))) >= 4
    assert "the-product-of-unit-vectors-vanishes" in "".join(anchors(DOCS / "explanation" / "nway.md"))
    assert "clipping-is-a-change-of-the-learning-rate" in anchors(DOCS / "explanation" / "gradient-flow.md")
    assert "benchmarks/results" in (DOCS / "explanation" / "performance.md").read_text()
    assert "the-checklist" in anchors(DOCS / "how-to" / "troubleshoot.md")
    names = (DOCS / "explanation" / "references.md").read_text()
    assert all(name in names for name in ("Glorot", "Bengio", "Ramachandran", "Micikevicius"))


def test_a29_integration_in_three_tiers() -> None:
    assert {"tier-1-five-minutes", "tier-2-fifteen-minutes", "tier-3-twenty-minutes"} <= anchors(
        DOCS / "how-to" / "integrate.md"
    )


def test_every_block_says_where_it_comes_from() -> None:
    assert len(ALL) > 100
    assert [text for block in ALL for text in complaints(block)] == []


def test_every_quotation_stands_where_it_is_said_to() -> None:
    quoted = [block for block in ALL if block.kind in ("from", "recorded")]
    assert len(quoted) > 8
    assert [text for block in quoted for text in quote_complaints(block)] == []


def test_names_commands_and_settings_exist() -> None:
    assert [text for block in ALL if block.kind != "from" for text in static_complaints(block)] == []


def test_links_anchors_menu_and_paths_named_in_code() -> None:
    assert list(link_complaints()) == []
    assert len(menu()) == len(set(menu()))


@pytest.fixture(scope="module")
def warm() -> Iterator[Path]:
    """Commands that fork a process with torch imported, and nothing of ours."""
    with tempfile.TemporaryDirectory(
        prefix="docs-"
    ) as made:  # a short path: a socket takes no more than 107 characters
        processes = start(Path(made), environment(), ("python",))
        yield Path(made) / "bin"
        for process in processes:
            process.terminate()
            process.wait()


@pytest.mark.parametrize(
    ("block", "shown"),
    sampled({one[0].where: one for one in quick()}, [block.where for block, _ in quick()[::4]]),
)
def test_blocks_run_alone_in_a_fresh_interpreter(block: Block, shown: Block | None, tmp_path: Path, warm: Path) -> None:
    session = Session(tmp_path, warm)
    printed, code = session.python(block.text, block.kind, *block.options)
    session.close()
    assert code == 0, printed
    assert shown is not None, "a quick block that prints nothing proves nothing"
    assert same(shown.text, tidy(printed, tmp_path), shown.options), printed


def test_an_interpreter_is_fresh_for_every_block_but_one_that_continues(tmp_path: Path, warm: Path) -> None:
    session = Session(tmp_path, warm)
    assert session.python("import trimtab\nvalue = 1\nprint(value)") == ("1\n", 0)
    assert session.python(f"{CONTINUES}\nprint(value + 1)", continues=True) == ("2\n", 0)
    printed, code = session.python("print(value)")
    assert code == 1
    assert "NameError" in printed
    # A part of the package that nobody imported is not there, as in the reader's interpreter.
    printed, code = session.python("import trimtab\ntrimtab.launch.runner")
    assert code == 1
    assert "no attribute 'launch'" in printed
    assert session.python("print(model is not None, 'torch' in globals())", "fragment") == ("True False\n", 0)
    session.close()


def test_a_block_that_continues_says_so_where_readers_see_it(tmp_path: Path) -> None:
    text = "<!-- run -->\n```python\nx = 1\n```\n\n<!-- run -->\n```python\n# continues above\nprint(x)\n```\n"
    assert [block.continues for block in page_of(tmp_path, text)] == [False, True]
    (block,) = page_of(tmp_path, "<!-- file: a.py -->\n```python\n# continues above\n```\n")
    assert any("only a block that is run" in found for found in complaints(block))


def documented() -> list[str]:
    """Every name on the page of the Python API."""
    return re.findall(r"^::: (\S+)", (DOCS / "reference" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", documented())
def test_examples_of_the_api_page_bring_their_imports(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are shown without the module around them: pasted, they must run."""
    monkeypatch.chdir(tmp_path)
    home, _, last = name.rpartition(".")
    found = getattr(importlib.import_module(home), last, None) or importlib.import_module(name)
    for test in doctest.DocTestFinder(exclude_empty=True).find(found, name, globs={}):
        test.globs = {"__name__": "__main__"}
        out: list[str] = []
        doctest.DocTestRunner(verbose=False).run(test, out=out.append)
        assert not out, "".join(out)


def test_the_table_of_settings_is_complete_and_right() -> None:
    page = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    rows = dict(line.split(" | ")[:2] for line in page.splitlines() if line.startswith("| `"))
    told = {name.strip("| `"): default.strip("` ") for name, default in rows.items()}
    as_toml = {None: "none", True: "true", False: "false", "ALL": "ALL"}
    for kind in (Config, PolicyConfig):
        for field in fields(kind):
            assert field.name in told, f"{field.name} is not in docs/reference/settings.md"
            value = getattr(kind(), field.name)
            if isinstance(value, bool) or value is None:
                assert told[field.name] == as_toml[value]
            elif isinstance(value, int | float):
                assert float(told[field.name]) == value
            elif isinstance(value, str):
                assert told[field.name] == f'"{value}"'


# -- the tools themselves: each must be able to fail -------------------------------------------------------------------


def page_of(folder: Path, text: str) -> list[Block]:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return list(blocks(page))


def test_a_block_without_a_mark_is_refused(tmp_path: Path) -> None:
    (block,) = page_of(tmp_path, "```console\n$ trimtab rules\nmade up\n```\n")
    assert "without a mark" in next(complaints(block))
    (block,) = page_of(tmp_path, "<!-- run -->\n\nSomething between.\n\n```console\n$ ls\n```\n")
    assert "without a mark" in next(complaints(block))
    (block,) = page_of(tmp_path, "<!-- sketch -->\n```text\n$ trimtab rules\nmade up\n```\n")
    assert "a sketch holds a command" in next(complaints(block))


def test_a_made_up_quotation_is_refused(tmp_path: Path) -> None:
    source = max((ROOT / "benchmarks" / "results").glob("overhead_cpu2_*.md")).relative_to(ROOT).as_posix()
    line = next(one for one in (ROOT / source).read_text().splitlines() if one.startswith("|"))
    (block,) = page_of(tmp_path, f"<!-- from: {source} -->\n{line}\n| guard | +0.1 | 0 |\n")
    assert [text.rpartition(": ")[2] for text in quote_complaints(block)] == ["| guard | +0.1 | 0 |"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<!-- commands -->\n```bash\ntrimtab report --htlm\n```\n", "takes no --htlm"),
        ("<!-- commands -->\n```bash\ntrimtab reprot\n```\n", "has no command 'reprot'"),
        ("<!-- commands -->\n```bash\ntrimtab train nonsense --quick\n```\n", "has no recipe 'nonsense'"),
        ("<!-- settings -->\n```toml\nclpi = 1.0\n```\n", "did you mean 'clip'"),
        ("<!-- fragment -->\n```python\nfrom trimtab import Gaurd\n```\n", "no Gaurd in trimtab"),
        ("<!-- fragment -->\n```python\ntrimtab.Guard(m, o, clpi=1)\n```\n", "Guard takes no clpi"),
        ("<!-- fragment -->\n```python\nfor x in\n```\n", "not Python"),
    ],
)
def test_what_does_not_exist_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    (block,) = page_of(tmp_path, text)
    assert any(complaint in found for found in static_complaints(block))


def test_a_page_that_loads_from_elsewhere_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    page.write_text('<a href="https://arxiv.org/abs/1">fine</a><script src="assets/a.js"></script>')
    assert [text for text in site_complaints(tmp_path) if "loads" in text] == []
    page.write_text('<script src="https://unpkg.com/x"></script><link rel="stylesheet" href="//fonts.example/a.css">')
    assert len([text for text in site_complaints(tmp_path) if "index.html: loads" in text]) == 2


def test_what_may_differ_between_two_runs() -> None:
    nothing, numbers, excerpt = frozenset[str](), frozenset({"numbers"}), frozenset({"excerpt"})
    assert same("took 3 s in runs/20261115-211811-26549-d529", "took 0.4 s in runs/20261116-010203-1-ffff", nothing)
    assert not same("loss 0.31", "loss 0.32", nothing)
    assert same("loss 0.31,\nnorm 1e-3", "loss 12, norm 0.5", numbers)
    assert not same("loss 0.31", "norm 0.31", numbers)
    assert same("a\n…\nc", "a\nb\nc\nd", excerpt)
    assert not same("c\n…\na", "a\nb\nc", excerpt)
