"""Runs one program, mutated or as it is, as `trimtab run --mode observe` does, in a forked child.

The parent has imported PyTorch and trimtab but computed nothing, so that a child starts in milliseconds.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import functools
import importlib
import json
import os
import pkgutil
import re
import shutil
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

import trimtab
from tests.mutants import effects
from tests.mutants.apply import mutate
from tests.mutants.operators import BY_NAME, Operator
from tests.runs.shape_runs import FOLDER
from trimtab.core.config import resolve
from trimtab.run.runner import run_guarded
from trimtab.run.script import Program

DONE = "made.json"
RECORDS = "records"
SCRIPT = "program.py"
STEPS = {
    "a2c": 500, "actor_critic": 800, "adder": 500, "c51": 800, "char_lm": 200, "converged": 600, "dcgan": 600,
    "distillation": 1000, "dqn": 800, "forward_forward": 800, "growing_values": 1000, "hinge_gan": 600, "hogwild": 600,
    "lbfgs_sequence": 40, "lora": 400, "loss_tuple": 500, "moe": 250, "ppo": 640, "reinforce": 700, "sac": 600,
    "td3": 700, "unet": 150,
}  # fmt: skip
"""Enough for a program to learn visibly, in a few seconds."""
USUAL_STEPS = 300
LIMIT_S = 120


@dataclass(frozen=True)
class Job:
    """One run to be made; without an operator it is a healthy one."""

    program: str
    seed: int
    operator: str = ""

    @property
    def name(self) -> str:
        return f"{self.operator or 'clean'}__{self.program}__{self.seed}"

    @property
    def steps(self) -> int:
        return STEPS.get(self.program, USUAL_STEPS)


@dataclass(frozen=True)
class Made:
    """What came of a run: how well the program did in the end, the exception that ended it, and where it went wrong."""

    program: str
    seed: int
    operator: str
    steps: int
    final: float | None
    error: str
    seconds: float
    had: int = 0
    onsets: tuple[int, ...] = ()


def import_all() -> None:
    """Import, before a fork, what every child would import: a child then costs a third."""
    importlib.import_module("torch._dynamo")  # the first step of an optimizer does
    for module in pkgutil.walk_packages(trimtab.__path__, "trimtab."):
        if module.name.split(".")[1] in ("run", "guard", "rules", "record", "sample", "advice", "core", "remedies"):
            with contextlib.suppress(ModuleNotFoundError):  # of an extra: no program needs those
                importlib.import_module(module.name)


def source_of(job: Job) -> str | None:
    """The text of the program to run; None where the operator has nothing to change in it."""
    text = (FOLDER / f"{job.program}.py").read_text(encoding="utf-8")
    return mutate(text, BY_NAME[job.operator], job.seed) if job.operator else text


@functools.cache
def _tree(program: str) -> ast.Module:
    return ast.parse((FOLDER / f"{program}.py").read_text(encoding="utf-8"))


def applies(operator: Operator, program: str) -> bool:
    """Whether the operator has anything to change in a program."""
    return bool(operator.find(_tree(program)))


def onset_of(job: Job) -> int:
    return job.steps // 3 if job.operator and BY_NAME[job.operator].late else 0


def make(job: Job, folder: Path) -> Made:
    """Run it and keep its record in the folder."""
    source = source_of(job)
    if source is None:
        raise ValueError(f"{job.operator} has nothing to change in {job.program}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / SCRIPT).write_text(source, encoding="utf-8")
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _child(job, folder)
    error, seconds = _wait(pid, began)
    out = (folder / "out").read_text(encoding="utf-8", errors="replace")
    said = re.search(r"^final (\S+)$", out, re.MULTILINE)
    ended = folder / "ended.json"
    told: dict[str, Any] = json.loads(ended.read_text()) if ended.exists() else {}
    made = Made(
        program=job.program,
        seed=job.seed,
        operator=job.operator,
        steps=job.steps,
        final=float(said[1]) if said else None,
        error=error or told.get("error", "") or ("" if said else "did not end properly"),
        seconds=round(seconds, 2),
        had=told.get("had", 0),
        onsets=tuple(told.get("onsets", ())),
    )
    # Written last, and in one go: a run with this file is a complete one.
    (folder / "part").write_text(json.dumps(asdict(made)))
    (folder / "part").rename(folder / DONE)
    return made


def load(folder: Path) -> Made:
    data = json.loads((folder / DONE).read_text())
    return Made(**{**data, "onsets": tuple(data["onsets"])})


def _wait(pid: int, began: float) -> tuple[str, float]:
    """Wait for the child: what ended it, if it did not end by itself, and its processor time."""
    killed = ""
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return killed or (f"ended by signal {-code}" if code < 0 else ""), usage.ru_utime + usage.ru_stime
        if time.monotonic() - began > LIMIT_S and not killed:
            os.kill(pid, signal.SIGKILL)
            killed = f"took longer than {LIMIT_S} s"
        time.sleep(0.01)


def _child(job: Job, folder: Path) -> NoReturn:
    error = ""
    try:
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # the parent's may be something else
        os.chdir(folder)
        torch.set_num_threads(1)
        sys.path += [str(FOLDER)]
        effects.begin(onset_of(job))
        settings = {"config": resolve(None, mode="observe", dir=str(folder / RECORDS))}
        try:
            run_guarded(Program(target=str(folder / SCRIPT), args=[str(job.steps), str(job.seed)]), settings)
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"[:300]
            traceback.print_exc()
        (folder / "ended.json").write_text(json.dumps({"error": error, **effects.report()}))
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(0)
