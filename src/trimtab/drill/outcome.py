"""What a drill is made of: a fault, one run with it, the row it fills, the whole report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FOUND, OTHERWISE, MISSED, NA, NOT_RUN = "found", "found otherwise", "missed", "not applicable", "not run"


class NotApplicableError(Exception):
    """A fault has no place in this training; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A trouble that can be put into any training.

    `names` are the findings that name it rightly. `inject(run)` is called at the beginning of the step at which the
    fault begins: the onset, or the first one where it is `from_start`. `silent` marks what does its harm where the
    training loss does not show it: there every change of the run counts as harm.
    """

    name: str
    group: str
    what: str
    names: tuple[str, ...]
    inject: Callable[[Any], None]
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
    theirs: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A finding: what was said, about which step, and in which step of the loop it was said."""

    code: str
    name: str
    step: int
    said_at: int
    severity: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one run. `sick` lists what was not finite at its end; `mark` is a fingerprint of its weights.

    `broken` says that nothing could be read any more, as after an assertion on a GPU.
    """

    losses: tuple[float, ...] = ()
    told: tuple[Told, ...] = ()
    error: str = ""
    sick: tuple[str, ...] = ()
    mark: str = ""
    rejected: int = 0
    theirs: bool = False
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The whole drill."""

    target: str
    mode: str
    num_steps: int
    onset: int
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    false_alarms: tuple[Told, ...]
    clean_steps: int
    clean_end: float
    cost_percent: float | None
    noise_percent: float | None
    step_ms: float | None
    cpu_time: bool
    cost_reason: str
    seconds: float
