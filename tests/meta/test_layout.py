"""The rules of the tree: what keeps a file findable by its name, and a folder readable."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import trimtab
from trimtab.aliases import TABLE, resolve

HOME = Path(trimtab.__file__).parent
FILES = sorted(HOME.rglob("*.py"))
CATALOGUES = ("rules", "remedies", "doctor/checks", "train/recipes")
"""One entry per file: names may repeat those of other catalogues, and there may be any number of entries."""
MOST_FILES = 25


def folder_of(path: Path) -> str:
    return path.parent.relative_to(HOME).as_posix()


def is_in_catalogue(path: Path) -> bool:
    return any(folder_of(path) == one or folder_of(path).startswith(f"{one}/") for one in CATALOGUES)


def private_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trimtab"):
            for one in node.names:
                if one.name.startswith("_") and not one.name.startswith("__"):
                    yield f"{path.relative_to(HOME)}:{node.lineno}: {one.name} of {node.module}"


def test_no_private_name_is_imported_from_another_file() -> None:
    assert [found for path in FILES for found in private_imports(path)] == []


def test_no_folder_of_machinery_has_too_many_files() -> None:
    counts = Counter(folder_of(path) for path in FILES if not is_in_catalogue(path))
    assert {folder: num for folder, num in counts.items() if num > MOST_FILES} == {}


def test_a_module_is_found_by_its_name() -> None:
    free = (path for path in FILES if not is_in_catalogue(path) and folder_of(path) != "cli")
    counts = Counter(path.stem for path in free if path.stem not in ("__init__", "__main__"))
    assert [name for name, num in counts.items() if num > 1] == []


def test_a_private_import_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HOME", tmp_path)
    path = tmp_path / "one.py"
    path.write_text("from trimtab.guard.lane import Lane, _hidden\n", encoding="utf-8")
    assert list(private_imports(path)) == ["one.py:1: _hidden of trimtab.guard.lane"]


@pytest.mark.parametrize("old", sorted(TABLE))
def test_a_documented_path_leads_to_the_very_module(old: str) -> None:
    module = importlib.import_module(old)
    assert module is importlib.import_module(TABLE[old])
    assert module.__name__ == TABLE[old]
    assert module.__spec__ is not None
    assert module.__spec__.name == TABLE[old]
    assert not HOME.joinpath(*old.split(".")[1:]).with_suffix(".py").exists(), "no stub modules"


def test_what_lies_in_a_package_that_moved_is_found_too() -> None:
    from trimtab.checkpoint.loader import ResumableLoader

    old = importlib.import_module("trimtab.recover.loader")
    assert old.ResumableLoader is ResumableLoader
    assert resolve("trimtab.guard.lane") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("trimtab.recover.nothing_of_that_name")


def test_old_paths_cost_nothing_until_they_are_used() -> None:
    code = "import sys, trimtab; print('torch' in sys.modules, 'trimtab.checkpoint' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
