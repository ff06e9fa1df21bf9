"""The build hook: it compiles where it can, and says what stood in the way where it cannot."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """hatch_build.py, without the build system that imports it."""
    name = "hatchling.builders.hooks.plugin.interface"
    interface: Any = ModuleType(name)
    interface.BuildHookInterface = object
    monkeypatch.setitem(sys.modules, name, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_compiler
def test_what_is_built_is_of_the_version_that_is_used(hook: Any, tmp_path: Path) -> None:
    from trimtab.sample.measure import native

    target = tmp_path / "compiled.abi3.so"
    assert hook.compiled(ROOT / hook.SOURCE, target) == ""
    spec = importlib.util.spec_from_file_location("compiled", target)
    assert spec is not None
    assert importlib.util.module_from_spec(spec).VERSION == native.VERSION  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == [target]


@needs_compiler
def test_a_source_that_does_not_compile_is_told_and_leaves_nothing(hook: Any, tmp_path: Path) -> None:
    source = tmp_path / "broken.c"
    source.write_text("int broken(")
    assert "error" in hook.compiled(source, tmp_path / "compiled.abi3.so")
    assert list(tmp_path.iterdir()) == [source]


def test_without_a_compiler_nothing_is_built(hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "nowhere"))
    assert "no compiler" in hook.compiled(ROOT / hook.SOURCE, tmp_path / "compiled.abi3.so")
    assert list(tmp_path.iterdir()) == []
