"""Walks through trimtab as a call does: which files one flow visits, in which order, and how often it changes package.

    python tools/walk.py                 a table of all flows, and of the tree
    python tools/walk.py quiet-step      the files of one flow, in the order of their first call

A flow that needs few files and changes package seldom is one that a reader can follow. What is imported for the first
time inside a flow counts only for `doctor`, where importing is part of what the command does.
"""

from __future__ import annotations

import ast
import contextlib
import io
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import trimtab

HOME = Path(trimtab.__file__).parent


class Walk:
    """What one flow visited."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.functions: set[tuple[str, str]] = set()
        self.changes = 0
        self._package = ""

    def see(self, frame: FrameType, event: str, arg: object) -> None:
        """A profile function: notes every call of ours."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(HOME)) or code.co_name == "<module>":
            return
        name = Path(code.co_filename).relative_to(HOME).as_posix()
        if name not in self.files:
            self.files.append(name)
        self.functions.add((name, code.co_qualname))
        package = name.partition("/")[0]
        self.changes += package != self._package and self._package != ""
        self._package = package


@contextlib.contextmanager
def walking() -> Iterator[Walk]:
    """Note what is called inside."""
    walk = Walk()
    sys.setprofile(walk.see)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def training(**settings: Any) -> Callable[[float], None]:
    """A small guarded training: each call is one iteration, its inputs times a number."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = trimtab.Guard(model, optimizer, run_dir=False, **settings)

    def step(factor: float) -> None:
        x = torch.randn(16, 8) * factor
        loss = torch.nn.functional.cross_entropy(model(x), torch.randint(0, 4, (16,)))
        loss.backward()
        guard.step(loss)
        optimizer.zero_grad()

    return step


def quiet_step() -> Walk:
    """Step 31 of a healthy run in mode advise."""
    step = training()
    for _ in range(31):
        step(1.0)
    with walking() as walk:
        step(1.0)
    return walk


def nan_step() -> Walk:
    """A NaN in the inputs of step 31, in mode act."""
    step = training(mode="act")
    for _ in range(31):
        step(1.0)
    with walking() as walk:
        step(float("nan"))
    return walk


def save() -> Walk:
    """The second checkpoint of a model and its optimizer."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = trimtab.Checkpointer(folder)
        checkpointer.save(1, model=model, optimizer=optimizer)
        with walking() as walk:
            checkpointer.save(2, model=model, optimizer=optimizer)
    return walk


def doctor() -> Walk:
    """`trimtab doctor` on the bundled training."""
    from trimtab.cli.app import main

    with walking() as walk, contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        sys.argv = ["trimtab", "doctor"]
        main()
    return walk


FLOWS = {"quiet-step": quiet_step, "nan-step": nan_step, "save": save, "doctor": doctor}


def tree() -> str:
    """The tree in numbers."""
    files = sorted(HOME.rglob("*.py"))
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    importers: Counter[str] = Counter()
    signatures = 0
    for path in files:
        parsed = ast.parse(path.read_text(encoding="utf-8"))
        named = {n.module for n in ast.walk(parsed) if isinstance(n, ast.ImportFrom) and n.module}
        named |= {f"{n.module}.{a.name}" for n in ast.walk(parsed) if isinstance(n, ast.ImportFrom) for a in n.names}
        importers.update(named)
        for node in ast.walk(parsed):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                every = [
                    *node.args.posonlyargs,
                    *node.args.args,
                    *node.args.kwonlyargs,
                    node.args.vararg,
                    node.args.kwarg,
                ]
                hints = [a.annotation for a in every if a is not None and a.annotation is not None] + [node.returns]
                signatures += sum(
                    isinstance(x, ast.Name) and x.id == "Any" for h in hints if h is not None for x in ast.walk(h)
                )
    modules = ["trimtab." + p.relative_to(HOME).as_posix().removesuffix(".py").replace("/", ".") for p in files]
    once = sum(importers[m] == 1 for m in modules if not m.endswith("__init__"))
    folders = Counter(path.parent.relative_to(HOME).as_posix() for path in files)
    largest = max(lines, key=lambda path: lines[path])
    crowded = ", ".join(f"{folder} {num}" for folder, num in folders.most_common(3))
    return (
        f"{len(files)} files, {sum(lines.values()):,} lines, median {statistics.median(lines.values()):.0f}, largest "
        f"{lines[largest]} ({largest.relative_to(HOME).as_posix()}); most files per folder: {crowded}; "
        f"{once} modules with one importer; {signatures} Any in signatures"
    )


def main() -> int:
    """Print what was asked for."""
    if len(sys.argv) > 1:
        walk = FLOWS[sys.argv[1]]()
        sys.stdout.write("".join(f"{name}\n" for name in walk.files))
        return 0
    sys.stdout.write(f"{tree()}\n\n| flow | files | functions | changes of package |\n|---|--:|--:|--:|\n")
    for name, flow in FLOWS.items():
        walk = flow()
        sys.stdout.write(f"| {name} | {len(walk.files)} | {len(walk.functions)} | {walk.changes} |\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
