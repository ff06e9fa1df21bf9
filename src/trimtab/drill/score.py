"""What a drill is made of (a fault, one run with it, the row it fills, the whole report), and how its runs are judged:
found or not, by what, how late; harmed or not, and how; recall, latency, false alarms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.drill.trial import Run

MIN_RECALL = 0.8
FOUND, OTHERWISE, MISSED, NA, NOT_RUN = "found", "found otherwise", "missed", "not applicable", "not run"


class NotApplicableError(Exception):
    """A fault does not apply to this training; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that can be injected into any training.

    `names` are the findings that name it rightly. `inject(run)` is called at the beginning of the step at which the
    fault begins: the onset, or the first one where it is `from_start`. `silent` marks what does its harm where the
    training loss does not show it: there every change of the run counts as harm.
    """

    name: str
    group: str
    what: str
    names: tuple[str, ...]
    inject: Callable[[Run], None]
    from_start: bool = False
    silent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run that is asked of a child process; without a fault it is a clean one. Plain data, as JSON holds it."""

    target: str
    fault: str = ""
    seed: int = 0
    num_steps: int = 120
    onset: int = 40
    mode: str = "observe"
    guarded: bool = True
    cost: bool = False
    steps_itself: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A finding: what was said, about which step, and in which step of the loop it was said."""

    code: str
    name: str
    step: int
    said_at: int
    severity: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one run. `nonfinite` lists what was not finite at its end; `mark` is a fingerprint of its weights.

    `broken` says that nothing could be read any more, as after an assertion on a GPU.
    """

    losses: tuple[float, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    error: str = ""
    nonfinite: tuple[str, ...] = ()
    mark: str = ""
    rejected: int = 0
    steps_itself: bool = False
    reused: bool = False
    broken: bool = False
    reason: str = ""
    could_not: str = ""
    cost_percent: float | None = None
    noise_percent: float | None = None
    step_ms: float | None = None
    cpu_time: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault in one run: whether it was found, by what, how late, and what it did to the run.

    `hidden` says that the harm is not in the training loss. `kept` is what the run came to with the guard, where that
    can be another thing.
    """

    fault: str
    group: str
    what: str
    seed: int
    status: str
    harmful: bool = False
    hidden: bool = False
    harm: str = ""
    kept: str = ""
    by: str = ""
    code: str = ""
    others: tuple[str, ...] = ()
    latency: int | None = None
    reason: str = ""

    @property
    def ran(self) -> bool:
        """Whether the fault could be injected."""
        return self.status in (FOUND, OTHERWISE, MISSED)

    @property
    def tone(self) -> str:
        """`good`, `bad`, or `unclear` where it hardly matters."""
        if self.status == FOUND:
            return "good"
        return "bad" if self.harmful else "unclear"

    @property
    def found_by(self) -> str:
        """Which finding named the fault.

        Example:
            >>> Row(fault="bit-flip", group="numerics", what="", seed=0, status=MISSED).found_by
            'MISSED'
        """
        if self.status == MISSED:
            return "MISSED"
        return self.by if self.status == FOUND else f"MISSED (said: {self.by})"

    @property
    def after(self) -> str:
        """How many steps after its onset."""
        return "" if self.latency is None or self.status != FOUND else str(self.latency)

    @property
    def unguarded(self) -> str:
        """What became of the unguarded run."""
        if self.hidden:
            return f"hidden: {self.harm}"
        return self.harm if self.harmful else f"harmless here ({self.harm})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The whole drill."""

    target: str
    mode: str
    num_steps: int
    onset: int
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    false_alarms: tuple[Alarm, ...]
    clean_steps: int
    clean_end: float
    cost_percent: float | None
    noise_percent: float | None
    step_ms: float | None
    cpu_time: bool
    cost_reason: str
    seconds: float

    @property
    def ran(self) -> list[Row]:
        """The rows of faults that could be injected."""
        return [row for row in self.rows if row.ran]

    @property
    def not_applicable(self) -> list[tuple[str, str]]:
        """Faults that do not apply to this training: the reason, and which ones."""
        return self._set_aside(NA)

    @property
    def not_run(self) -> list[tuple[str, str]]:
        """Faults that ran out of time, or whose process broke: the reason, and which ones."""
        return self._set_aside(NOT_RUN)

    def _set_aside(self, status: str) -> list[tuple[str, str]]:
        reasons: dict[str, list[str]] = {}
        for row in self.rows:
            if row.status == status and row.fault not in reasons.setdefault(row.reason, []):
                reasons[row.reason].append(row.fault)
        return [(reason, ", ".join(names)) for reason, names in reasons.items()]

    @property
    def alarms(self) -> list[str]:
        """The findings of clean runs, one line each."""
        return [f"{a.code} {a.name} at step {a.step}: {a.message}" for a in self.false_alarms]

    @property
    def score(self) -> Score:
        """The drill in numbers."""
        return score(self.rows, len(self.false_alarms))

    def holds(self, min_recall: float = MIN_RECALL) -> bool:
        """Whether there was no false alarm, and enough of the harmful faults were found."""
        got = self.score
        return not self.false_alarms and (got.num_harmful == 0 or got.recall_harmful >= min_recall)

    @property
    def sentence(self) -> str:
        """The whole drill in one line."""
        got = self.score
        parts = [f"Found {got.found_harmful} of {got.num_harmful} harmful faults"]
        if (num := got.median_latency) is not None:
            after = f"median {num:g} step{'' if num == 1 else 's'} after onset"
            parts.append("median in the step they began" if num == 0 else after)
        alarms = got.num_false_alarms
        parts.append(f"{alarms} false alarm{'s' if alarms != 1 else ''} in {self.clean_steps} clean steps")
        if self.cost_percent is not None:
            parts.append(f"cost {self.cost_percent:.1f} % of a step")
        elif not self.cost_reason:
            parts.append("cost not measurable")
        return "; ".join(parts)

    @property
    def counts(self) -> str:
        """What the sentence leaves out: all faults, harmless ones, and those that were not run."""
        got = self.score
        parts = [f"of all {got.num_faults} faults {got.num_found} were found", f"{got.num_harmless} did no harm here"]
        if got.num_not_applicable:
            parts.append(f"{got.num_not_applicable} do not apply here")
        if got.num_not_run:
            parts.append(f"{got.num_not_run} were not run")
        text = "; ".join(parts)
        return f"{text[0].upper()}{text[1:]}."

    @property
    def cost(self) -> str:
        """What the guard costs, or why that is not known."""
        if self.cost_reason:
            return f"not measured ({self.cost_reason})"
        if self.cost_percent is None:
            return f"not measurable: the noise is {self.noise_percent:.0f} % of a step of {self.step_ms:.3g} ms"
        how = " (of CPU time: the machine is busy)" if self.cpu_time else ""
        return f"{self.cost_percent:.1f} % of a step of {self.step_ms:.3g} ms{how}"


HARM = 1.25
GIVEN_BACK = 0.25
"""A quarter of what the clean run had gained: a loss that lies high may never be 1.25 times as high."""
SAME = 1e-6
END = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The drill in numbers. `recall` is over all faults that could be put in, `recall_harmful` over those that hurt."""

    num_found: int
    num_faults: int
    found_harmful: int
    num_harmful: int
    num_harmless: int
    num_not_applicable: int
    num_not_run: int
    recall: float
    recall_harmful: float
    median_latency: float | None
    num_false_alarms: int


def judge(fault: Fault, seed: int, onset: int, clean: Result, run: Result, unguarded: Result | None = None) -> Row:
    """The row of one fault. `unguarded` is the same run without a guard, where the guard may have changed it."""
    row = Row(fault=fault.name, group=fault.group, what=fault.what, seed=seed, status=NA)
    if run.reason:
        return replace(row, reason=run.reason)
    if run.could_not:
        return replace(row, status=NOT_RUN, reason=run.could_not)
    onset = 0 if fault.from_start else onset
    alone = run if unguarded is None else unguarded
    harm = harm_of(clean, alone, onset)
    hidden = fault.silent and harm.changed and not harm.worse
    row = replace(row, harmful=harm.worse or hidden, hidden=hidden, harm=harm.text)
    if unguarded is not None:
        row = replace(row, kept=harm_of(clean, run, onset).text)
    known = {(alarm.name, alarm.step) for alarm in clean.alarms}
    new = [alarm for alarm in run.alarms if alarm.said_at >= onset and (alarm.name, alarm.step) not in known]
    right = [alarm for alarm in new if alarm.name in fault.names]
    if not new:
        return replace(row, status=MISSED)
    first = (right or new)[0]
    return replace(
        row,
        status=FOUND if right else OTHERWISE,
        by=first.name,
        code=first.code,
        others=tuple(dict.fromkeys(alarm.name for alarm in new if alarm.name != first.name)),
        latency=first.said_at - onset,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Harm:
    """What a fault did to a run: clearly worse, or merely other than the clean one."""

    text: str
    worse: bool
    changed: bool


def harm_of(clean: Result, run: Result, onset: int) -> Harm:
    """Hold a run against the clean one of the same seed.

    Example:
        >>> harm_of(Result(losses=(1.0, 0.5)), Result(losses=(1.0, 0.9)), 1).text
        'loss 0.9 at the end, clean 0.5'
    """
    if run.error:
        return Harm(text=f"stopped at step {len(run.losses)}: {run.error}", worse=True, changed=True)
    lost = next((i for i, loss in enumerate(run.losses) if i >= onset and not math.isfinite(loss)), None)
    nonfinite = [part for part in run.nonfinite if part not in clean.nonfinite]
    end, good = end_loss(run.losses), end_loss(clean.losses)
    if lost is not None and not math.isfinite(end):
        return Harm(text=f"loss not finite from step {lost} on", worse=True, changed=True)
    if nonfinite:
        return Harm(text=f"not finite at the end: {', '.join(nonfinite)}", worse=True, changed=True)
    start = clean.losses[0] if clean.losses else good
    bound = good + min((HARM - 1) * abs(good), GIVEN_BACK * abs(start - good))
    worse = end > bound and end - good > SAME * abs(good)
    text = f"loss {end:.3g} at the end, clean {good:.3g}"
    if lost is not None:
        text = f"loss not finite at step {lost}; {text.removeprefix('loss ')}"
    changed = worse or lost is not None or run.mark != clean.mark or not _alike(clean.losses, run.losses)
    return Harm(text=text if changed else "nothing: the run is the same", worse=worse, changed=changed)


def end_loss(losses: Sequence[float]) -> float:
    """The mean of the last ten losses; of the last tenth of a short run."""
    last = losses[-min(END, max(len(losses) // 4, 1)) :]
    return sum(last) / len(last) if last else math.nan


def _alike(one: Sequence[float], two: Sequence[float]) -> bool:
    return len(one) == len(two) and all(math.isclose(a, b, rel_tol=SAME) for a, b in zip(one, two, strict=True))


def score(rows: Iterable[Row], num_false_alarms: int = 0) -> Score:
    """Count. What is not applicable or was not run is in no ratio."""
    rows = tuple(rows)
    ran = [row for row in rows if row.ran]
    found = [row for row in ran if row.status == FOUND]
    hurt = [row for row in ran if row.harmful]
    hurt_found = [row for row in found if row.harmful]
    latencies = [row.latency for row in hurt_found if row.latency is not None]
    return Score(
        num_found=len(found),
        num_faults=len(ran),
        found_harmful=len(hurt_found),
        num_harmful=len(hurt),
        num_harmless=len(ran) - len(hurt),
        num_not_applicable=sum(row.status == NA for row in rows),
        num_not_run=sum(row.status == NOT_RUN for row in rows),
        recall=len(found) / len(ran) if ran else math.nan,
        recall_harmful=len(hurt_found) / len(hurt) if hurt else math.nan,
        median_latency=float(median(latencies)) if latencies else None,
        num_false_alarms=num_false_alarms,
    )
