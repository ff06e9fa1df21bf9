"""The drill: clean runs first, then every fault in a child process, then the cost, all within a budget of time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from queue import SimpleQueue

from trimtab.core.errors import InputError
from trimtab.drill.faults import fairly
from trimtab.drill.score import Alarm, Fault, Report, Result, Row, Task, judge
from trimtab.drill.worker import Child

COST_STEPS = 60
LEAST_S = 20.0
"""A child has at least this long for a run: starting Python and importing torch is not the training's fault."""
Progress = Callable[[Row], object]


def drill(
    task: Task,
    faults: Sequence[Fault],
    *,
    seeds: int = 1,
    jobs: int = 1,
    budget_s: float = 300.0,
    on_row: Progress = lambda row: None,
) -> Report:
    """Inject every fault into the training that `task` names, one at a time, and count what the guard reports.

    Args:
        task: The training, the length of a run, the step at which faults begin, and the guard's mode.
        faults: The faults to inject.
        seeds: How many runs there are of every fault, each with a different seed.
        jobs: How many runs are made at the same time, each in a child process.
        budget_s: Seconds for all of it; faults that do not fit are reported as not run.
        on_row: Called with the row of each fault as soon as it is known.

    Raises:
        InputError: The training does not run without a fault, so that there is nothing to compare with.
    """
    _check(task, seeds, jobs, budget_s)
    began = time.perf_counter()

    def left() -> float:
        return budget_s - (time.perf_counter() - began)

    with ExitStack() as stack:
        free: SimpleQueue[Child] = SimpleQueue()
        children = [stack.enter_context(Child(_env(jobs))) for _ in range(jobs)]
        for child in children:
            free.put(child)
        pool = stack.enter_context(ThreadPoolExecutor(jobs))

        def ask(one: Task, timeout_s: float) -> Result:
            child = free.get()
            try:
                return child.ask(one, timeout_s)
            finally:
                free.put(child)

        cleans, alarms, slowest = {}, list[Alarm](), 0.0
        for seed in range(seeds):
            clean = _clean(ask(replace(task, seed=seed), left()), task, seed)
            task = replace(task, steps_itself=clean.steps_itself)
            alarms += clean.alarms
            if task.mode != "observe":  # what a guard that acts changed is no measure of harm
                clean = replace(
                    _clean(ask(replace(task, seed=seed, guarded=False), left()), task, seed), alarms=clean.alarms
                )
            cleans[seed], slowest = clean, max(slowest, clean.seconds)

        def one_fault(fault: Fault, seed: int) -> Row:
            row = _row(fault, replace(task, fault=fault.name, seed=seed), cleans[seed], ask, left, slowest)
            on_row(row)
            return row

        pairs = [(fault, seed) for fault in fairly(faults) for seed in range(seeds)]
        try:
            rows = list(pool.map(lambda pair: one_fault(*pair), pairs))
        except BaseException:  # interrupted: do not wait for the rest
            pool.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.close()
            raise
        cost = Result(could_not="no time was left")
        if left() > LEAST_S / 2:
            cost = ask(replace(task, cost=True, num_steps=min(task.num_steps, COST_STEPS)), left())
    order = {fault.name: i for i, fault in enumerate(faults)}
    return Report(
        target=task.target,
        mode=task.mode,
        num_steps=task.num_steps,
        onset=task.onset,
        seeds=tuple(range(seeds)),
        rows=tuple(sorted(rows, key=lambda row: (order[row.fault], row.seed))),
        false_alarms=tuple(alarms),
        clean_steps=sum(len(one.losses) for one in cleans.values()),
        clean_end=cleans[0].losses[-1],
        cost_percent=cost.cost_percent,
        noise_percent=cost.noise_percent,
        step_ms=cost.step_ms,
        cpu_time=cost.cpu_time,
        cost_reason="the target gives the same model whenever it is called" if cost.reused else cost.could_not,
        seconds=time.perf_counter() - began,
    )


def _row(
    fault: Fault,
    task: Task,
    clean: Result,
    ask: Callable[[Task, float], Result],
    left: Callable[[], float],
    clean_s: float,
) -> Row:
    """One fault, guarded; and unguarded, too, where the guard may change the run."""
    limit = LEAST_S + 10 * clean_s
    if left() <= 0:
        spent = Result(could_not="the budget was spent; --budget-s gives more")
        return judge(fault, task.seed, task.onset, clean, spent)
    run = ask(task, min(limit, left()))
    alone = None
    if task.mode != "observe" and not run.reason and not run.could_not:
        alone = ask(replace(task, guarded=False), min(limit, max(left(), 1.0)))
        if alone.could_not:
            run, alone = replace(run, could_not=alone.could_not), None
    return judge(fault, task.seed, task.onset, clean, run, alone)


def _clean(result: Result, task: Task, seed: int) -> Result:
    """The clean run, or the reason why there can be no drill."""
    if result.could_not:
        raise InputError(f"{task.target} could not be run without any fault: {result.could_not}")
    if result.error:
        raise InputError(
            f"{task.target} raised without any fault at step {len(result.losses)} (seed {seed}): {result.error}; "
            f"fix it first, `trimtab doctor {task.target}` says more"
        )
    if not any(loss == loss for loss in result.losses):
        raise InputError(f"{task.target} gave no finite loss without any fault; try `trimtab doctor {task.target}`")
    return result


def _check(task: Task, seeds: int, jobs: int, budget_s: float) -> None:
    if not 0 < task.onset < task.num_steps:
        raise InputError(
            f"the onset is step {task.onset} of {task.num_steps}; expected one after the first and before the last"
        )
    if task.mode not in ("observe", "advise", "act"):
        raise InputError(f"the mode is {task.mode!r}; expected observe, advise or act")
    if seeds < 1 or jobs < 1 or budget_s <= 0:
        raise InputError(f"seeds {seeds}, jobs {jobs}, budget {budget_s} s; expected more than zero of each")


def _env(jobs: int) -> dict[str, str]:
    env = dict(os.environ)
    env.pop("TRIMTAB_DISABLE", None)  # a drill without a guard would find nothing
    if jobs > 1:
        env.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // jobs, 1)))
    return env
