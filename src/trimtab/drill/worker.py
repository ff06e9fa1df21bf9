"""The child processes that runs are made in: started when needed, stopped after a time limit, and always ended.

`Child` is the side that asks. `main` is what the process runs: one task as a line of JSON in, one result out, until
its input ends.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from typing import IO, Any, TextIO

import numpy as np
import torch
from torch import nn

from trimtab.core.errors import TrimtabError
from trimtab.doctor.target import Target, load_target
from trimtab.drill.faults import FAULTS
from trimtab.drill.score import Alarm, Result, Task
from trimtab.drill.trial import Run, measure_cost, place

TAIL = 600


class Child:
    """One child process. It lives until it is closed, breaks, or takes too long; a new one takes its place."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = dict(os.environ if env is None else env)
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.single = False

    def ask(self, task: Task, timeout_s: float) -> Result:
        """Have one run made. What came of it is always an answer: an overrun and a crash are, too."""
        result = self._ask(task, timeout_s)
        if result.reused:  # the target returns the same objects again: only another process builds new ones
            self.close()
            result = self._ask(task, timeout_s)
            self.single = not task.cost
        if self.single or result.broken or result.could_not:
            self.close()  # an accelerator that has failed once stays broken in its process
        return result

    def _ask(self, task: Task, timeout_s: float) -> Result:
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(asdict(task)) + "\n")
            process.stdin.flush()
            line = self._lines.get(timeout=max(timeout_s, 0.1))
        except queue.Empty:
            self.close()
            return Result(could_not=f"stopped after {timeout_s:.0f} s")
        except BrokenPipeError:
            line = None
        if line is None:
            code, tail = process.wait(), self._tail()
            self.close()
            return Result(could_not=f"the process ended with code {code}{tail}")
        return read(json.loads(line))

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._lines = queue.Queue()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trimtab.drill.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, encoding="utf-8",
                env=self._env,
            )  # fmt: skip
            threading.Thread(target=_read_all, args=(self._process, self._lines), daemon=True).start()
        return self._process

    def _tail(self) -> str:
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(self._errors.tell() - TAIL, 0))
        text = self._errors.read().decode("utf-8", "replace").strip()
        return f": {text.splitlines()[-1]}" if text else ""

    def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue  # the process is gone: what was not sent to it does not matter

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self._errors.close()


def _read_all(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.put(line)
    except ValueError:
        return  # closed while reading
    finally:
        lines.put(None)


def read(data: dict[str, Any]) -> Result:
    """A result as it came over the wire.

    Example:
        >>> read({"losses": [1.0], "alarms": []}).losses
        (1.0,)
    """
    alarms = tuple(Alarm(**one) for one in data["alarms"])
    lists = {key: tuple(value) for key, value in data.items() if isinstance(value, list) and key != "alarms"}
    return Result(**{**data, **lists, "alarms": alarms})


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
    """Do what a task asks; `kept` has the model built last, to see whether the next one is new."""
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
    """A new training, with every generator seeded before and after, however many numbers building it draws."""
    _seed(task.seed)
    target = load_target(task.target)
    _seed(task.seed)
    return target


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _own_stdout() -> TextIO:
    """The way back to who asked; what the training prints goes to stderr from now on."""
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return os.fdopen(ours, "w", encoding="utf-8")


if __name__ == "__main__":
    main(sys.stdin, _own_stdout())
