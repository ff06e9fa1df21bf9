"""What benchmarks/recipes.py runs: one job is one training, one command or one experiment, and gives plain data.

A job is a record of strings and numbers, so that it travels to a worker process and into the cache; `do` carries it
out. Nothing here knows what would be a good result.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # a worker process needs the seeded faults of the tests

Value = dict[str, Any]
KEPT_FACT = 400
"""Longer texts are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Something to run, under a name that is unique in its section. `alone`: nothing else may run at that time."""

    section: str
    name: str
    kind: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False


def do(job: Job) -> Value:
    """Carry a job out in this process."""
    logging.getLogger("trimtab").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    return KINDS[job.kind](**job.spec)


def train(
    recipe: str,
    seed: int,
    *,
    fault: str | None = None,
    guarded: bool = True,
    quick: bool = False,
    **given: Any,
) -> Value:
    """One training in this process, one thread."""
    from trimtab.train.recipe import run_recipe

    said: list[str] = []
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        result = run_recipe(
            _with_more_faults(recipe),
            {"seed": seed, **given},
            fault=fault,
            guarded=guarded,
            quick=quick,
            run_dir=Path(folder) / "run" if guarded else False,  # recorded as in real use
            say=said.append,
        )
    return {
        "score": result.score,
        "metrics": dict(result.metrics),
        "steps": result.num_steps,
        "seconds": result.seconds,
        "processor_s": round(time.process_time() - began, 1),
        "rejected": result.rejected,
        "finite": result.weights_finite,
        "findings": list(result.findings),
        "actions": list(result.actions),
        "stopped": result.stopped,
        "facts": {name: _plain(fact) for name, fact in result.facts.items()},
        "first_line": said[0] if said else "",
        "rates": [max(row["learning_rates"], default=0.0) for row in result.history],
        "issues": [row.get("issues", []) for row in result.history],
        "group_rates": [(row["stage"], row["learning_rates"]) for row in result.history[1:-1]],
    }


def _plain(fact: Any) -> Any:
    """A fact as JSON knows it."""
    if is_dataclass(fact) and not isinstance(fact, type):
        return asdict(fact)
    return fact if isinstance(fact, bool | int | float | dict | list | None) else str(fact)[:KEPT_FACT]


def several(runs: Mapping[str, Mapping[str, Any]]) -> Value:
    """Short trainings one after the other, by name."""
    return {name: train(**spec) for name, spec in runs.items()}


def _with_more_faults(name: str) -> Any:
    """The recipe, and for the language model a purer form of its shuffled targets: the loss stays a mean."""
    from trimtab.train.recipe import Fault
    from trimtab.train.recipes import load_recipe

    recipe = load_recipe(name)
    if name != "charlm":
        return recipe
    shuffled = recipe.fault("shuffled-targets")
    pure = Fault(
        name="only-shuffled",
        summary="targets of other places, and nothing else",
        inject=lambda parts, settings: replace(shuffled.inject(parts, settings), loss_fn=parts.loss_fn),
    )
    return replace(recipe, faults=(*recipe.faults, pure))


def letter_counts() -> Value:
    """What counting letters, or pairs of them, in the training part loses per letter of the held-out part (nats)."""
    from trimtab.train.recipe import build_parts, settings_of
    from trimtab.train.recipes import load_recipe

    recipe = load_recipe("charlm")
    parts = build_parts(recipe, settings_of(recipe, {"metrics_file": "", "preset": "documented"}))
    (seen, then), (asked, right) = (
        (torch.stack(some) for some in zip(*(one.dataset[i] for i in range(len(one.dataset))), strict=True))
        for one in (parts.train_loader, parts.val_loader)
    )
    num = int(max(seen.max(), then.max(), asked.max(), right.max())) + 1
    counts = torch.full((num, num), 0.01, dtype=torch.float64)
    counts.view(-1).index_add_(0, (seen * num + then).flatten(), torch.ones(seen.numel(), dtype=torch.float64))
    single, pair = counts.sum(0) / counts.sum(), counts / counts.sum(1, keepdim=True)
    known = {tuple(row) for row in then.tolist()}
    return {
        "letters": float(-single[right].log().mean()),
        "pairs": float(-pair[asked, right].log().mean()),
        "windows": len(right),
        "windows_seen": sum(tuple(row) in known for row in right.tolist()),
    }


def command(words: Sequence[str], *, as_json: bool = True) -> Value:
    """A command of ours as people call it, with all threads it takes: how long, how it ended, what it said."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = _trimtab([*words, "--json"] if as_json else words, folder)
        wall_s = time.perf_counter() - began
    out: Value = {"code": done.returncode, "wall_s": round(wall_s, 2), "said": done.stderr[-KEPT_FACT:]}
    if as_json and done.stdout:
        out["answer"] = _shortened(json.loads(done.stdout))
    return out


def _trimtab(words: Sequence[str], folder: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {"NO_COLOR": "1"}
    line = [sys.executable, "-m", "trimtab", *words]
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, check=False)


def _shortened(answer: Any) -> Any:
    """An answer without its longest parts."""
    if isinstance(answer, dict):
        return {name: _shortened(value) for name, value in answer.items() if name not in ("history", "run_dirs")}
    if isinstance(answer, list):
        return [_shortened(value) for value in answer]
    return answer[:KEPT_FACT] if isinstance(answer, str) else answer


def overhead(recipe: str, rounds: int, block: int, **given: Any) -> Value:
    """Guarded and bare trainings in turns."""
    import recipes_overhead

    return recipes_overhead.measure(recipe, rounds, block, given)


def trial(name: str, **how: Any) -> Value:
    """An experiment of recipes_trials."""
    import recipes_trials

    out: Value = getattr(recipes_trials, name)(**how)
    return out


KINDS = {
    "train": train,
    "several": several,
    "trial": trial,
    "letter_counts": letter_counts,
    "command": command,
    "overhead": overhead,
}


def known_recipes() -> tuple[str, ...]:
    """The recipes there are."""
    return tuple(name for name, _ in importlib.import_module("trimtab.train.recipes").RECIPES)
