"""The process that runs are made in: one task as a line of JSON in, one result out, until nobody asks any more."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import weakref
from dataclasses import asdict
from typing import Any, TextIO

import numpy as np
import torch
from torch import nn

from trimtab.checks.target import Target, load_target
from trimtab.core.errors import TrimtabError
from trimtab.drill.after import place
from trimtab.drill.cost import measure_cost
from trimtab.drill.faults import FAULTS
from trimtab.drill.one_run import Run
from trimtab.drill.outcome import Result, Task

Kept = weakref.ref[nn.Module]


def main(asked: TextIO, answers: TextIO) -> None:
    """Answer every line; a training that cannot be built is an answer, too."""
    logging.getLogger("trimtab").setLevel(logging.CRITICAL)  # what is found is handed over, not logged
    kept: list[Kept] = []
    for line in asked:
        result = answer(Task(**json.loads(line)), kept)
        answers.write(json.dumps(asdict(result)) + "\n")
        answers.flush()


def answer(task: Task, kept: list[Kept]) -> Result:
    """Do what a task asks; `kept` knows the model built last, to see whether the next one is another."""
    try:
        target = build(task)
        reused = any(target.model is one() for one in kept)
        kept[:] = [weakref.ref(target.model)]  # not the model itself: two of them may not fit
        if reused:
            return Result(reused=True)
        if not task.cost:
            return Run(target, task, FAULTS[task.fault] if task.fault else None).train()
        second = build(task)
        if second.model is target.model:
            return Result(reused=True)
        return measure_cost(target, second, task)
    except TrimtabError as error:
        return Result(could_not=str(error))
    except Exception as error:
        return Result(could_not=f"{type(error).__name__}: {error}{place(error)}")


def build(task: Task) -> Target:
    """The training anew, with all chance seeded before and after: how much of it building takes must not matter."""
    _seed(task.seed)
    target = load_target(task.target)
    _seed(task.seed)
    return target


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _own_stdout() -> Any:
    """The way back to who asked; what the training prints goes to stderr from now on."""
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return os.fdopen(ours, "w", encoding="utf-8")


if __name__ == "__main__":
    main(sys.stdin, _own_stdout())
