"""Runs the checklist on a training: selects, runs, and lets a cause speak for its consequences."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from trimtab.checks.drive import Options
from trimtab.checks.label_range import LabelRange
from trimtab.checks.on_device import is_lost
from trimtab.checks.outcome import Check, Line, Status, not_applicable
from trimtab.checks.probe import Probe
from trimtab.checks.rebatch import smaller
from trimtab.checks.registry import all_checks, select_checks
from trimtab.checks.steps import StepView, view
from trimtab.checks.target import Target

log = logging.getLogger("trimtab")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The checklist of one training, in the order of cause and effect, and the steps it rests on."""

    lines: tuple[Line, ...]
    steps: tuple[StepView, ...] = field(default=(), repr=False)
    seconds: float = 0.0
    traces: tuple[str, ...] = ()

    def of(self, status: Status) -> list[Line]:
        """The lines that ended so."""
        return [line for line in self.lines if line.status is status]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.of(Status.FAIL)


def examine(
    target: Target,
    options: Options | None = None,
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    again: Callable[[], Target] | None = None,
) -> Report:
    """Run the checks on a training, and leave it exactly as it was.

    `again` builds the same training anew, to be held against a second one of its kind.

    Example:
        >>> from trimtab.checks.sample import build
        >>> from trimtab.checks.target import check_target
        >>> examine(check_target(build()), select=["OPT"]).ok
        True
    """
    options = options or Options()
    chosen = select_checks(tuple(select), tuple(ignore))
    if options.batch_size is not None:
        target = smaller(target, options.batch_size)
    began = time.perf_counter()
    probe = Probe(target, options, again)
    try:
        with warnings.catch_warnings(), probe:
            warnings.simplefilter("ignore")  # what a training says in experiments is no news
            lines = [line for check in chosen for line in _run(check, probe)]
            traces = tuple(c.failure.trace for c in probe.calls if c.failure is not None)
            steps = tuple(view(call, probe.batch(i), probe.roles) for i, call in enumerate(probe.calls))
    except RuntimeError as error:
        if not is_lost(error):
            raise
        lines, traces, steps = _after_assertion(chosen, probe, error), (), ()
    return Report(lines=tuple(explained(lines)), steps=steps, seconds=time.perf_counter() - began, traces=traces)


def _after_assertion(chosen: Iterable[Check], probe: Probe, error: Exception) -> list[Line]:
    """The list of a training whose GPU answers no more: what was noted before is all there is."""
    why = f"the GPU answers no more: {str(error).splitlines()[0][:120]}"
    asked = {check.name: check for check in chosen} | {LabelRange.name: LabelRange()}
    return [
        line
        for check in asked.values()
        for line in (check.after_assertion(probe) if isinstance(check, LabelRange) else [not_applicable(check, why)])
    ]


def examine_seen(probe: Probe, *, select: Iterable[str] = (), ignore: Iterable[str] = ()) -> Report:
    """Run the checks on a training that was only watched."""
    chosen = select_checks(tuple(select), tuple(ignore))
    began = time.perf_counter()
    lines = [line for check in chosen for line in _run(check, probe)]
    steps = tuple(view(call, tuple(call.inputs)) for call in probe.calls)
    traces = tuple(c.failure.trace for c in probe.calls if c.failure is not None)
    return Report(lines=tuple(explained(lines)), steps=steps, seconds=time.perf_counter() - began, traces=traces)


def explained(lines: Iterable[Line]) -> list[Line]:
    """The same lines, those that merely follow from an earlier failure marked so, and no alarm any more."""
    causes = {check.name: check.causes for check in all_checks()}
    out: list[Line] = []
    found: list[str] = []
    for line in lines:
        why = next((n for n in found if line.name != n and _explains(causes.get(n, ()), line)), "")
        if why and not line.ok:
            evidence = f"follows from {why}: {line.cause} {line.evidence}".strip()
            line = replace(line, status=Status.NA, evidence=evidence, follows=why)
        elif line.status is Status.FAIL:
            found.append(line.name)
        out.append(line)
    return out


EFFECTS = (
    "learning-rate",
    "weights-unchanged",
    "not-learning",
    "gradcheck",
    "initial-loss",
    "collapsed-output",
    "checkpoint-round-trip",
    "resume-differs",
)
"""What is seen by its effect: after any other failure it says nothing of its own."""


def _explains(consequences: tuple[str, ...], line: Line) -> bool:
    return "*" in consequences or line.name in consequences or line.name in EFFECTS


def _run(check: Check, probe: Probe) -> Iterable[Line]:
    try:
        lines = list(check.run(probe))
    except Exception as error:  # a check that breaks says nothing about the training
        log.debug("check %s broke", check.name, exc_info=True)
        return [not_applicable(check, f"the check itself ended with {type(error).__name__}: {str(error)[:200]}")]
    return lines
