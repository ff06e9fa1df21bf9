"""WIRE014: the schedule is stepped at the wrong place, or for the wrong optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed, warned
from trimtab.doctor.probe import Probe, current_rates
from trimtab.torchutil.optimizers import innermost

PER_BATCH = ("OneCycleLR", "CyclicLR")
LOW = 0.01
"""A rate that stays below this part of its peak for a whole epoch warms nothing up."""


class SchedulerOrder:
    """The schedule is stepped at the wrong place, or for the wrong optimizer.

    ## What it means
    Before the first `optimizer.step()` the first value of the schedule is lost. A schedule meant for epochs that is
    stepped with every batch ends before the first epoch does. A schedule of another optimizer changes nothing, and so
    does one that is never stepped.

    ## How it is checked
    The order of steps in each call, how often the schedule moves in one, and what becomes of the learning rate within
    half an epoch.

    ## What to try
    1. `optimizer.step()` first, `scheduler.step()` then.
    2. Once per batch or once per epoch, as the schedule was configured, not both.
    """

    code: ClassVar[str] = "WIRE014"
    name: ClassVar[str] = "scheduler-order"
    title: ClassVar[str] = "the schedule moves after the optimizer"
    causes: ClassVar[tuple[str, ...]] = ("learning-rate",)

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report schedules out of step."""
        if not probe.schedulers:
            yield not_applicable(self, "there is no scheduler")
            return
        mine = {id(o) for o in probe.optimizers}
        for scheduler in probe.schedulers:
            of = getattr(scheduler, "optimizer", None)
            if of is not None and id(innermost(of)) not in mine:
                yield self._wrong(
                    "the scheduler belongs to another optimizer than the one that trains.",
                    f"{type(scheduler).__name__} holds another {type(of).__name__}",
                    "scheduler = Scheduler(optimizer)  # after the optimizer is built",
                )
                return
        if probe.doctor_steps or not probe.through or not probe.num_steps:
            yield passed(
                self, f"{', '.join(type(s).__name__ for s in probe.schedulers)}; doctor steps it after the optimizer"
            )
            return
        events = [e for c in probe.through for e in c.events if e.kind in ("schedule", "step", "scaler-step")]
        moves = [e for e in events if e.kind == "schedule"]
        first = next((e.kind for e in events), "")
        per_call = max(
            (sum(e.who == who for e in c.of("schedule")) for c in probe.through for who in {e.who for e in moves}),
            default=0,
        )
        if first == "schedule":
            yield self._wrong(
                "scheduler.step() comes before the first optimizer.step().",
                "in the first call the schedule moved before the optimizer",
                "optimizer.step(); scheduler.step()",
            )
        elif per_call > max(1, max(len(c.of("step")) for c in probe.through)):
            yield self._wrong(
                f"the schedule is stepped {per_call} times for one step.",
                f"{len(moves)} moves of the schedule, {len(probe.events('step'))} optimizer steps",
                "scheduler.step()  # once",
            )
        elif moves and (left := half_way(probe)) is not None and left < 1e-3:
            yield self._wrong(
                "a schedule meant for epochs is stepped with every batch.",
                f"half an epoch ahead the learning rate is {left:.1e} of its peak",
                "scheduler.step()  # once per epoch, after the loop over batches",
            )
        elif not moves and (never := _never_moved(probe)):
            yield warned(
                self,
                "the step does not move the schedule.",
                f"{never}; {len(probe.through)} calls, none of which calls scheduler.step()",
                "optimizer.step(); scheduler.step()  # in every step",
                ("scheduler",),
            )
        else:
            yield passed(self, f"{len(moves)} moves in {len(probe.through)} calls, after the optimizer")

    def _wrong(self, cause: str, evidence: str, fix: str) -> Line:
        return failed(self, cause, evidence, fix, ("scheduler",))


def _never_moved(probe: Probe) -> str:
    """Why a schedule that stands still cannot be meant for epochs; empty where it may be."""
    for scheduler in probe.schedulers:
        if type(scheduler).__name__ in PER_BATCH:
            return f"{type(scheduler).__name__} is stepped with every batch"
    used = max((r for e in probe.events("step") for r in e.facts["rates"]), default=0.0)
    peak = max((r for rates in probe.peak_rates for r in rates), default=0.0)
    return f"the learning rate stays at {used:.2g}; its peak would be {peak:.2g}" if 0 < used < LOW * peak else ""


def _highest(probe: Probe) -> float:
    return max((rate for rates in current_rates(probe.optimizers) for rate in rates), default=0.0)


def half_way(probe: Probe) -> float | None:
    """The learning rate half an epoch ahead, as a part of its peak; None where the length of an epoch is not known."""
    try:
        num = len(probe.target.loader) // 2  # type: ignore[arg-type]
    except TypeError:
        num = probe.scan.num // 2 if probe.scan.complete else 0
    if num < 4:
        return None
    probe.rewind()
    top = _highest(probe)
    last = top
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for _ in range(num):
                for scheduler in probe.schedulers:
                    if not hasattr(scheduler, "num_bad_epochs"):
                        scheduler.step()
                last = _highest(probe)
                top = max(top, last)
        except Exception:
            return None
        finally:
            probe.rewind()
    return last / top if top > 0 else None
