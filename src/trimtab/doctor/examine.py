"""Runs the checklist on a training: selects checks, runs them, and marks findings that follow from another."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points

from trimtab.core.errors import ConfigError
from trimtab.core.suggest_name import nearest_name
from trimtab.doctor.checklist import Check, Line, Report, Status, not_applicable, step_view
from trimtab.doctor.checks import BUILTIN
from trimtab.doctor.checks.label_range import LabelRange
from trimtab.doctor.observed_step import Options, is_lost
from trimtab.doctor.probe import Probe
from trimtab.doctor.target import Target, smaller

log = logging.getLogger("trimtab")


def examine(
    target: Target,
    options: Options | None = None,
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    again: Callable[[], Target] | None = None,
) -> Report:
    """Run the checks on a training, and leave it exactly as it was.

    Args:
        target: The training: model, optimizer, loader and loss, as `check_target` returns them.
        options: How many steps, which precision, how much time; None: the defaults of `trimtab doctor`.
        select: Codes, families or names of the checks to run; empty: all.
        ignore: Codes, families or names of checks to leave out.
        again: Builds the same training a second time, for checks that compare two of them.

    Example:
        >>> from trimtab.doctor.sample_training import build
        >>> from trimtab.doctor.target import check_target
        >>> examine(check_target(build()), select=["OPT"]).ok
        True
    """
    options = options or Options()
    chosen = select_checks(tuple(select), tuple(ignore))
    if options.batch_size is not None:
        target = smaller(target, options.batch_size)
    began = time.perf_counter()
    probe = Probe.of_target(target, options, again)
    try:
        with warnings.catch_warnings(), probe:
            warnings.simplefilter("ignore")  # warnings of the experiments are not shown
            lines = [line for check in chosen for line in _run(check, probe)]
            traces = probe.traces
            steps = tuple(step_view(call, probe.batch(i), probe.roles) for i, call in enumerate(probe.calls))
    except RuntimeError as error:
        if not is_lost(error):
            raise
        lines, traces, steps = _after_assertion(chosen, probe, error), (), ()
    return Report(lines=tuple(explained(lines)), steps=steps, seconds=time.perf_counter() - began, traces=traces)


def _after_assertion(chosen: Iterable[Check], probe: Probe, error: Exception) -> list[Line]:
    """The list of a training whose GPU has failed: it uses only what was noted before."""
    why = f"the GPU has failed: {str(error).splitlines()[0][:120]}"
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
    steps = tuple(step_view(call, tuple(call.inputs)) for call in probe.calls)
    return Report(lines=tuple(explained(lines)), steps=steps, seconds=time.perf_counter() - began, traces=probe.traces)


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


@cache
def all_checks() -> tuple[Check, ...]:
    """Every known check: the built-in ones, then those of installed plug-ins (entry points `trimtab.checks`)."""
    found: list[Check] = [make() for make in BUILTIN]
    taken = {c.name for c in found}
    for point in entry_points(group="trimtab.checks"):
        try:
            check: Check = point.load()()
            if check.name in taken:
                raise ValueError(f"its name {check.name} is taken")
        except Exception as error:
            log.warning("check plug-in %s could not be loaded (%s): it is left out", point.value, error)
            continue
        taken.add(check.name)
        found.append(check)
    return tuple(found)


def find_check(code_or_name: str) -> Check | None:
    """The check with this code or name, in any case; None where there is none."""
    wanted = code_or_name.strip().lower().replace("_", "-")
    return next((c for c in all_checks() if wanted in (c.code.lower(), c.name)), None)


def select_checks(select: tuple[str, ...], ignore: tuple[str, ...]) -> tuple[Check, ...]:
    """Those that are selected (all, if nothing is) and not ignored, by code, family or name.

    Example:
        >>> [check.name for check in select_checks(("MODE",), ("no-grad",))]
        ['eval-mode']
    """
    for word in (*select, *ignore):
        if not any(_matches(word, c) for c in all_checks()):
            names = {n.lower(): n for c in all_checks() for n in (c.code, c.name, c.code.rstrip("0123456789"))}
            near = nearest_name(word.lower().replace("_", "-"), names)
            hint = "`trimtab doctor --json` names them all." if near is None else f"did you mean {names[near]!r}?"
            raise ConfigError(f"there is no check {word!r}; {hint}")
    return tuple(
        c
        for c in all_checks()
        if (not select or any(_matches(w, c) for w in select)) and not any(_matches(w, c) for w in ignore)
    )


def _matches(word: str, check: Check) -> bool:
    w = word.strip().upper().replace("_", "-")
    return w == "ALL" or w in (check.code, check.name.upper(), check.code.rstrip("0123456789"))
