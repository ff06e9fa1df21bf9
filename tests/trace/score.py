"""How right an answer about the origin of a bad value is, by parts: operation, line, module, phase, cause, samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.trace.faults_base import Fault, Program, Truth

PARTS = ("found", "op", "line", "module", "phase", "cause", "reason", "subject", "sample")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a tool says; None is no answer."""

    op: str | None = None  # "aten.log.default", or "log"
    file: str = ""
    line: int | None = None
    module: str | None = None
    phase: str | None = None
    cause: str | None = None
    reason: str | None = None
    subject: str | None = None
    samples: tuple[int, ...] | None = None
    micro_batch: int | None = None
    said: str = ""


def answer_of(origin: Any) -> Answer:
    """What trimtab's `Origin` answers."""
    names = ("op", "file", "line", "module", "phase", "cause", "reason", "subject", "samples", "micro_batch")
    return Answer(**{name: getattr(origin, name) for name in names}, said=origin.sentence())


def bare(op: str) -> str:
    """The name of an operation without library and overload.

    Example:
        >>> bare("aten.log.default"), bare("log")
        ('log', 'log')
    """
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def judged(fault: Fault, answer: Answer | None) -> dict[str, bool]:
    """For each part that has a right answer, whether it was given. A healthy program has one: nothing."""
    truth = fault.truth
    if truth is None:
        return {"silent": answer is None}
    got = answer or Answer()
    right: dict[str, bool] = {"found": answer is not None, "cause": got.cause in truth.causes}
    if truth.ops:
        right["op"] = got.op is not None and bare(got.op) in truth.ops
        right["phase"] = got.phase == truth.phase
    elif truth.phase == "optimizer":
        right["phase"] = got.phase == truth.phase
    if fault.lines:
        same_file = Path(got.file).name in ("", Path(fault.build.__code__.co_filename).name)
        right["line"] = got.line in fault.lines and same_file
    if "input" not in truth.causes and truth.phase != "optimizer":  # bad data and updates belong to no module
        right["module"] = _module_is_right(truth, got)
    if truth.reasons:
        right["reason"] = got.reason in truth.reasons
    if truth.subjects:
        right["subject"] = got.subject in truth.subjects
    if truth.samples is not None:
        right["sample"] = got.samples == truth.samples or (got.micro_batch, got.samples) == truth.micro
    return {part: right[part] for part in PARTS if part in right}


def _module_is_right(truth: Truth, got: Answer) -> bool:
    if truth.subjects:  # the module of a bad weight is in its name
        return got.subject in truth.subjects or got.module in [one for one in truth.modules if one]
    return got.module is not None and got.module in truth.modules


def guarded(program: Program, run_dir: Path) -> Answer | None:
    """What a guard stores about a program that it knows nothing of but model, optimizer, loss and batch."""
    import torch

    from trimtab import Guard
    from trimtab.trace import bundle

    if program.optimizer is not None:  # the step calls it
        with Guard.attach(program.model, program.optimizer, run_dir=run_dir):
            for _ in range(2):  # what an update did to the weights shows in the next step
                program.step(program.batch)
    else:
        with Guard(program.model, torch.optim.SGD(program.model.parameters(), lr=1e-3), run_dir=run_dir) as guard:
            guard.step(program.step(program.batch), batch=program.batch)
    found = bundle.incidents_of(run_dir)
    return answer_of(bundle.read(found[0]).origin) if found else None


def traced(program: Program) -> Answer | None:
    """What trimtab says about a program, from its whole step."""
    from trimtab.trace.trace import trace_call

    found = trace_call(lambda: program.step(program.batch), model=program.model, batch=program.batch)
    assert not found.error, found.error
    return None if found.origin is None else answer_of(found.origin)
