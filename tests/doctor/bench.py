"""Builds a project, sound or with its code changed, and asks doctor about it."""

from __future__ import annotations

import linecache
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from trimtab.doctor.checklist import Report, Status
from trimtab.doctor.examine import examine
from trimtab.doctor.observed_step import Options
from trimtab.doctor.target import check_target

FOLDER = Path(__file__).parent / "projects"
PROJECTS = tuple(sorted(p.stem for p in FOLDER.glob("*.py") if p.stem != "__init__"))
Built = dict[str, Any]
Edit = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One way to break a training: lines of its code are changed, or what it returns is.

    `causes` are the names that say what is wrong, the best first. `held` marks those that were written after the
    checks, and that no check was made for.
    """

    name: str
    projects: tuple[str, ...]
    causes: tuple[str, ...]
    edits: tuple[Edit, ...] = ()
    change: Callable[[Built], Built | None] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What doctor said: names of failures and warnings in their order, failures first where `first` is asked."""

    fails: tuple[str, ...]
    warns: tuple[str, ...]
    seconds: float
    report: Report

    @property
    def first(self) -> str:
        """The first failure, else the first warning: what a user looks at."""
        return next(iter(self.fails + self.warns), "")


def build(project: str, mutation: Mutation | None = None) -> Built:
    """What the project's `build()` returns after the changes; an edit whose place is gone is an error."""
    path = FOLDER / f"{project}.py"
    text = path.read_text()
    for old, new in mutation.edits if mutation else ():
        if old not in text:
            raise AssertionError(f"{mutation and mutation.name}: {project}.py has no {old!r} any more")
        text = text.replace(old, new)
    label = f"{path.stem}_{mutation.name}.py" if mutation and mutation.edits else str(path)
    linecache.cache[label] = (len(text), None, text.splitlines(keepends=True), label)
    module = ModuleType(f"doctor_project_{path.stem}")
    exec(compile(text, label, "exec"), vars(module))
    built = module.build()
    if mutation and mutation.change:
        built = mutation.change(built) or built
    return dict(built)


def examined(project: str, mutation: Mutation | None = None) -> Verdict:
    """Build and ask; what a broken project switched off for everybody is switched on again."""
    grad = torch.is_grad_enabled()
    try:
        with warnings.catch_warnings():
            if mutation is not None:
                warnings.simplefilter("ignore")  # PyTorch itself has a word about some of them
            built = build(project, mutation)
        return ask(built, **(mutation.options if mutation else {}))
    finally:
        torch.set_grad_enabled(grad)


def ask(built: Built, **options: Any) -> Verdict:
    """Run doctor in this process."""
    began = time.perf_counter()
    report = examine(check_target(built, lenient=True), Options(**options))
    return Verdict(
        fails=tuple(line.name for line in report.lines if line.status is Status.FAIL),
        warns=tuple(line.name for line in report.lines if line.status is Status.WARN),
        seconds=time.perf_counter() - began,
        report=report,
    )


def broken(
    name: str,
    projects: str,
    causes: str,
    *edits: Edit,
    change: Callable[[Built], Built | None] | None = None,
    **options: Any,
) -> Mutation:
    """A mutation in one line; `projects` and `causes` are names with spaces between them."""
    return Mutation(
        name=name,
        projects=tuple(projects.split()),
        causes=tuple(causes.split()),
        edits=edits,
        change=change,
        options=options,
    )
