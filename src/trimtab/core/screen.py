"""Steps that need no judging yet: bounds published ahead of time, within which every rule is certain to be silent.

A rule that says nothing about ordinary steps says so (`calm`), and within which values (`silent_between`). What else
makes a step ordinary is known from the window: nothing above what was seen lately, no change of rates, no drift. The
bounds hold for the next few steps whatever these are, so a step inside of them can wait and be absorbed together with
those after it, while its code and data are in the processor's caches. It costs no finding and delays none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from trimtab.core.stats.level import CAP, LIMIT, SLACK
from trimtab.core.types import F32, Rule
from trimtab.core.window import MIN_CALM, Window

MAX_WAITING = 8
"""Steps that may wait to be absorbed."""
MAX_FACT_SETS = 256


def is_silent_when_calm(rule: Rule, facts: tuple[str, ...]) -> bool:
    """Whether a rule says nothing of a calm step with these facts: `wakes` are those that it looks at all the same."""
    return getattr(rule, "calm", False) and not set(getattr(rule, "wakes", ())).intersection(facts)


def common_bounds(rules: tuple[Rule, ...]) -> dict[str, tuple[float, float]]:
    """By scalar, between which values no rule that is silent on calm steps has anything to say."""
    out: dict[str, tuple[float, float]] = {}
    for rule in rules:
        published: Callable[[], Mapping[str, tuple[float, float]]] = getattr(rule, "silent_between", dict)
        for name, (low, high) in published().items():
            known = out.get(name, (-math.inf, math.inf))
            out[name] = max(low, known[0]), min(high, known[1])
    return out


class Screen:
    """Tells which steps are certain to raise nothing. `asked` gives the rules that a set of facts concerns."""

    def __init__(self, window: Window, rules: tuple[Rule, ...], asked: Callable[[tuple[str, ...]], list[Rule]]) -> None:
        self._window, self._asked = window, asked
        self.bounds = common_bounds(rules)
        self._periods: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._left = 0
        self._stale = True
        self._loss = self._norm = self._size = -math.inf
        self._rate: float | None = None
        self._mark: float | None = None

    def expire(self) -> None:
        """The window has changed: the bounds must be made again before they are used."""
        self._stale = True

    def forget(self) -> None:
        """The rules have changed, too: one broke and is switched off."""
        self._stale = True
        self._periods.clear()

    def passes(self, step: int, scalars: Mapping[str, object], norms: F32) -> bool:
        """Whether no rule would speak of this training step, whatever the steps that wait before it were."""
        if self._stale:
            self._renew()
        if not self._left:
            return False
        facts = tuple(scalars)
        periods = self._periods.get(facts)
        if periods is None:
            periods = self._learn(facts)
        for every in periods:
            if step % every == 0:
                return False
        get = scalars.get
        loss, norm, size, mark = get("loss"), get("grad_norm"), get("in_rms"), get("in_print")
        if loss.__class__ is not float or norm.__class__ is not float or get("lr/0") != self._rate:
            return False
        if not (loss <= self._loss and loss != 0 and 0 < norm <= self._norm):
            return False
        if size is not None and not (size.__class__ is float and size <= self._size):
            return False
        for name, (low, high) in self.bounds.items():
            value = get(name)
            if value is not None and not (value.__class__ is float and low < value < high):
                return False
        if mark is not None and mark == self._mark:
            return False
        if not norms.size or not np.minimum.reduce(norms) > 0:
            return False
        self._left -= 1
        self._mark = mark  # type: ignore[assignment]
        return True

    def _learn(self, facts: tuple[str, ...]) -> tuple[int, ...]:
        """At the multiples of which steps a rule is asked that may speak of ordinary values."""
        if len(self._periods) >= MAX_FACT_SETS:  # a user may name scalars as they like
            self._periods.clear()
        asked = [rule for rule in self._asked(facts) if not is_silent_when_calm(rule, facts)]
        periods = tuple(sorted({max(int(getattr(rule, "every", 1)), 1) for rule in asked}))
        self._periods[facts] = periods
        return periods

    def _renew(self) -> None:
        self._stale = False
        window = self._window
        past, drift, schedule = window.past, window.drift, window.schedule
        self._left = 0
        if (
            len(past) < MIN_CALM
            or not window.runs.calm
            or drift.total > LIMIT
            or schedule.idle_steps
            or schedule.jumped_at >= 0
        ):
            return
        # The sum can grow by so much in a step: until it may be alarmed, nobody needs to look at it.
        self._left = min(MAX_WAITING, int((LIMIT - drift.total) / (CAP - SLACK)))
        self._loss, self._norm, self._size = (
            window.history(name).max_after(MAX_WAITING) for name in ("loss", "grad_norm", "in_rms")
        )
        last = past[-1]
        self._rate, self._mark = last.get("lr/0"), last.get("in_print")
