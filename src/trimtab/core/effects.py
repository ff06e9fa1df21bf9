"""What became of every action: the steps after it beside the steps before it, reported once enough have passed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from statistics import median
from typing import Any

from trimtab.core.types import Action, Outcome, Sample

MAX_WATCHED = 32
UNMEASURED = frozenset({"skip", "stop", "skip_data", "trials"})
"""A skipped update or sample changes nothing of what comes right after, and after a stop nothing comes. What comes of
trials is what comes of the rewind they were made after."""
CLEAR = 0.02
"""Share of the loss by which a median must move to count as moved."""
NOISE = 0.5
"""The same in deviations of the loss before: twice what the median of 20 values wobbles by."""
FACTOR = 1.5
"""By how much a gradient norm, or the highest value, must change to count as changed."""

# One step: loss and gradient norm where they are finite, and whether any of the two was not.
Point = tuple[float | None, float | None, bool]


@dataclass(frozen=True, slots=True)
class TakenBack:
    """The gradient norms that a rewind is measured by: the median before the trouble, and the highest in it.

    NaN where it is not known; infinite where it was not finite.
    """

    usual: float
    highest: float


@dataclass(slots=True)
class _Watched:
    outcome: Outcome
    before: list[Point]
    after: list[Point] = field(default_factory=list)
    taken_back: TakenBack | None = None  # where weights were put back along with it
    again: bool = False  # another rewind became necessary meanwhile


class Effects:
    """Compares the `steps` steps after an applied action with as many before it. Deterministic in what it is shown."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._ring: deque[Point] = deque(maxlen=steps)
        self._watched: list[_Watched] = []

    def watch(self, outcome: Outcome, taken_back: TakenBack | None = None) -> None:
        """Follow an action, if it was carried out and can have a measurable effect."""
        if not outcome.applied or outcome.action.kind in UNMEASURED:
            return
        rewound = taken_back is not None
        for other in self._watched:
            if other.outcome.at == outcome.at:  # done together: what came of it is judged together
                other.taken_back = taken_back = taken_back or other.taken_back
            elif rewound:
                other.again = True
        if len(self._watched) < MAX_WATCHED:
            self._watched.append(_Watched(outcome, list(self._ring), taken_back=taken_back))

    def see(self, sample: Sample) -> Iterator[Outcome]:
        """Take in a step; yields what is now known of actions that were taken long enough ago."""
        if sample.phase != "train":
            return
        point = _point(sample)
        self._ring.append(point)
        due = []
        for watched in self._watched:
            if sample.step >= watched.outcome.at:  # what was under way when the action came is neither before nor after
                watched.after.append(point)
                if len(watched.after) >= self._steps:
                    due.append(watched)
        for watched in due:
            self._watched.remove(watched)
            yield _told(watched)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain data."""
        return {
            "ring": [list(p) for p in self._ring],
            "watched": [
                {
                    "at": w.outcome.at,
                    "kind": w.outcome.action.kind,
                    "args": dict(w.outcome.action.args),
                    "optimizer": w.outcome.optimizer,
                    "taken_back": None if w.taken_back is None else [repr(v) for v in astuple(w.taken_back)],
                    "again": w.again,
                    "before": [list(p) for p in w.before],
                    "after": [list(p) for p in w.after],
                }
                for w in self._watched
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._ring = deque((_to_point(p) for p in state["ring"]), maxlen=self._steps)
        self._watched = [
            _Watched(
                Outcome(
                    at=int(w["at"]),
                    action=Action(kind=w["kind"], args=dict(w["args"])),
                    applied=True,
                    optimizer=w["optimizer"],
                ),
                [_to_point(p) for p in w["before"]],
                [_to_point(p) for p in w["after"]],
                TakenBack(*map(float, w["taken_back"])) if w.get("taken_back") else None,
                bool(w.get("again", False)),
            )
            for w in state["watched"]
        ]


def _point(sample: Sample) -> Point:
    loss, norm = sample.scalars.get("loss"), sample.scalars.get("grad_norm")
    bad = sample.scalars.get("routine_overflow", 0.0) == 0.0 and any(
        v is not None and not math.isfinite(v) for v in (loss, norm)
    )
    return _finite(loss), _finite(norm), bad


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _to_point(data: Sequence[Any]) -> Point:
    loss, norm, bad = data
    return loss, norm, bool(bad)


def _told(watched: _Watched) -> Outcome:
    """The same action again, with what followed it."""
    if watched.taken_back is not None:
        return _told_of_rewind(watched, watched.taken_back)
    before, after = watched.before, watched.after
    losses = _Change([p[0] for p in before], [p[0] for p in after])
    norms = _Change([p[1] for p in before], [p[1] for p in after])
    bad = sum(p[2] for p in before), sum(p[2] for p in after)
    parts = [text for text in (losses.text("loss"), norms.text("gradient norm")) if text]
    if any(bad):
        parts.append(f"non-finite steps {bad[0]} -> {bad[1]}")
    told = ", ".join(parts) or "nothing was measured"
    return _detailed(watched, told, _judged(losses, norms, bad))


def _detailed(watched: _Watched, told: str, judged: str) -> Outcome:
    outcome, num = watched.outcome, len(watched.after)
    detail = f"{num} step{'' if num == 1 else 's'} later: {told}: {judged}"
    return Outcome(at=outcome.at, action=outcome.action, applied=True, detail=detail, optimizer=outcome.optimizer)


def _told_of_rewind(watched: _Watched, taken_back: TakenBack) -> Outcome:
    """What followed a rewind, and what was done along with it.

    The loss it took back is lower by definition, so it proves nothing. What counts is whether gradients that were out
    of their range, or steps that were lost to NaN, are back to what they were before the trouble, and stay so.
    """
    after = watched.after
    norms = _Change([_finite(taken_back.usual)], [p[1] for p in after])
    half = len(after) // 2
    losses = _Change([p[0] for p in after[:half]], [p[0] for p in after[half:]])
    parts = []
    if norms.known:
        parts.append(f"gradient norm {norms.level():.3g} (median; before the trouble {norms.reference():.3g})")
    if losses.known:
        parts.append(f"loss {losses.reference():.3g}, then {losses.level():.3g}")
    lost = sum(p[2] for p in after)
    if lost:
        parts.append(f"{lost} non-finite steps")
    told = ", ".join(parts) or "nothing was measured"
    if watched.again or lost:
        judged = "the trouble came back"
    elif norms.scaled() > 0 or losses.moved() > 0:
        judged = "no better"
    elif taken_back.highest > FACTOR * taken_back.usual:
        judged = "helped"
    else:
        judged = "no trouble since"
    return _detailed(watched, told, judged)


class _Change:
    """The finite values of one quantity before and after."""

    def __init__(self, before: list[float | None], after: list[float | None]) -> None:
        self._before = [v for v in before if v is not None]
        self._after = [v for v in after if v is not None]
        self.known = bool(self._before) and bool(self._after)

    def reference(self) -> float:
        """The median before."""
        return median(self._before)

    def level(self) -> float:
        """The median after."""
        return median(self._after)

    def text(self, name: str) -> str:
        """For example `loss 3.21 -> 2.97 (median), 30 -> 3.1 (highest)`; the highest only where they tell a story."""
        if not self.known:
            return ""
        text = f"{name} {median(self._before):.3g} -> {median(self._after):.3g} (median)"
        highest = f", {max(self._before):.3g} -> {max(self._after):.3g} (highest)"
        return text + (highest if self.peak() else "")

    def moved(self) -> int:
        """1 where the median rose clearly, -1 where it fell clearly, else 0."""
        if not self.known:
            return 0
        before, after = median(self._before), median(self._after)
        spread = 1.4826 * median([abs(v - before) for v in self._before])
        clear = max(CLEAR * abs(before), NOISE * spread)
        return (after > before + clear) - (after < before - clear)

    def scaled(self) -> int:
        """The same by a factor, for what only its order of magnitude says something about."""
        return _by_factor(median(self._before), median(self._after)) if self.known else 0

    def peak(self) -> int:
        """The same for the highest value."""
        return _by_factor(max(self._before), max(self._after)) if self.known else 0


def _by_factor(before: float, after: float) -> int:
    if before < 0 or after < 0:  # a factor of a loss that may be negative says nothing
        return 0
    return (after > FACTOR * before) - (after * FACTOR < before)


def _judged(losses: _Change, norms: _Change, bad: tuple[int, int]) -> str:
    """The first that speaks: steps lost to NaN, the level of the loss, that of the gradient norm, spikes of both."""
    signs = ((bad[1] > bad[0]) - (bad[1] < bad[0]), losses.moved(), norms.scaled(), losses.peak(), norms.peak())
    if signs[0] < 0 and losses.moved() > 0:
        return "worse"  # no NaN any more, but at the price of the loss
    first = next((s for s in signs if s), 0)
    return {-1: "helped", 0: "no better", 1: "worse"}[first]
