"""Steps that need no judging yet: bounds published ahead of time, within which every rule is certain to be silent.

A rule that says nothing about ordinary steps says so (`calm`), and within which values (`silent_between`). What else
makes a step ordinary is known from the window: nothing above what was seen lately, no change of rates, no drift. The
bounds hold for the next few steps whatever these are, so a step inside of them can wait and be absorbed together with
those after it, while its code and data are in the processor's caches. It costs no finding and delays none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from trimtab.core.schedule import rates_of
from trimtab.core.stats.level import CAP, LIMIT, SLACK
from trimtab.core.types import F32, Rule
from trimtab.core.window import MIN_CALM, Window

MAX_WAITING = 16
"""Steps that may wait to be absorbed."""
MAX_FACT_SETS = 256


Bounds = Mapping[str, tuple[float, float]]
"""By scalar, the values (exclusive) between which something holds."""
LEAST_NORM = "the smallest norm of a row, over the largest"
"""A name in bounds for what is no scalar of its own."""


def is_silent_when_calm(rule: Rule, facts: tuple[str, ...]) -> bool:
    """Whether a rule says nothing of a calm step with these facts: `wakes` are those that it looks at all the same."""
    return getattr(rule, "calm", False) and not set(getattr(rule, "wakes", ())).intersection(facts)


def common_bounds(rules: Iterable[Rule]) -> dict[str, tuple[float, float]]:
    """By scalar, between which values no rule that is silent on calm steps has anything to say."""
    out: dict[str, tuple[float, float]] = {}
    for rule in rules:
        published: Callable[[], Bounds] = getattr(rule, "silent_between", dict)
        _tighten(out, published())
    return out


def _tighten(bounds: dict[str, tuple[float, float]], more: Bounds) -> None:
    for name, (low, high) in more.items():
        known = bounds.get(name, (-math.inf, math.inf))
        bounds[name] = max(low, known[0]), min(high, known[1])


_FLOATS = {float}


class _Plan(NamedTuple):
    """What has to be looked at in a step with one set of facts."""

    loud: tuple[int, ...]  # at the multiples of which steps a rule is asked that publishes nothing
    bounds: tuple[tuple[str, float, float], ...]
    asked: tuple[tuple[int, Rule], ...]  # rules that publish bounds from the window, and how often they look
    has_groups: bool
    has_size: bool


class Screen:
    """Tells which steps are certain to raise nothing. `asked` gives the rules that a set of facts concerns.

    What rules publish: `calm`, that they are silent on steps on which nothing is unusual (`Window.calm`), within
    `silent_between()`; `wakes`, facts with which they look all the same, each with bounds within which even then they
    are silent (None: there are none); and `silent_while(window)`, of rules that look at ordinary steps too: bounds that
    hold until the window changes, None where there are none.
    """

    def __init__(self, window: Window, rules: tuple[Rule, ...], asked: Callable[[tuple[str, ...]], list[Rule]]) -> None:
        self._window, self._asked = window, asked
        self.bounds = common_bounds(rules)
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self._while: dict[str, Bounds | None] = {}  # by the code of the rule, since the window last changed
        self.left = 0  # how many more steps may wait, before those that do must be absorbed
        self._stale = self._has_loss = True
        self._loss = self._norm = self._size = -math.inf
        self._best, self._noise, self._drift = -math.inf, 1.0, 0.0
        self._rates: tuple[float, ...] = ()
        self._has_groups = False
        self._rate: float | None = None
        self._mark: float | None = None

    def expire(self) -> None:
        """The window has changed: the bounds must be made again before they are used."""
        self._stale = True

    def forget(self) -> None:
        """The rules have changed, too: one broke and is switched off."""
        self._stale = True
        self._plans.clear()

    def passes(self, step: int, scalars: Mapping[str, Any], norms: F32, least: float) -> bool:
        """Whether no rule would speak of this training step, whatever the steps that wait before it were.

        `norms` are those of all rows, `least` is the smallest.
        """
        if self._stale:
            self._renew()
        if not self.left:
            return False
        facts = tuple(scalars)
        plan = self._plans.get(facts)
        if plan is None:
            plan = self._learn(facts)
        for every in plan.loud:
            if step % every == 0:
                return False
        if set(map(type, scalars.values())) != _FLOATS:
            return False
        get = scalars.get
        loss, norm, size, mark = get("loss"), get("grad_norm"), get("in_rms"), get("in_print")
        if loss is None:
            if self._has_loss:
                return False
        elif not (-math.inf < loss <= self._loss and loss != 0):
            return False
        if norm is None or not 0 < norm <= self._norm or get("lr/0") != self._rate:
            return False
        if size is not None and not size <= self._size:
            return False
        for name, low, high in plan.bounds:
            if not low < scalars[name] < high:
                return False
        if mark is not None and mark == self._mark:
            return False
        if (plan.has_groups or self._has_groups) and rates_of(scalars) != self._rates:
            return False
        if plan.has_size and scalars["batch_size"] != self._window.schedule.batch_size:
            return False
        if not least > 0:
            return False
        for every, rule in plan.asked:
            if step % every == 0 and not self._is_silent(rule, scalars, norms, least):
                return False
        if loss is not None:
            # What the sum of climbs can be at most once this step is absorbed, as it begins to be alarmed.
            drift = max(0.0, self._drift + min((loss - self._best) / self._noise, CAP) - SLACK)
            if drift > LIMIT:
                self.left = 0
                return False
            self._drift, self._best = drift, min(self._best, loss)
        self.left -= 1
        self._mark = mark
        return True

    def _is_silent(self, rule: Any, scalars: Mapping[str, Any], norms: F32, least: float) -> bool:
        if rule.code not in self._while:
            try:
                self._while[rule.code] = rule.silent_while(self._window)
            except Exception:  # then it is asked, which is where a broken rule is reported
                self._while[rule.code] = None
        bounds = self._while[rule.code]
        if bounds is None:
            return False
        for name, (low, high) in bounds.items():
            value = float(least / norms.max()) if name is LEAST_NORM else scalars.get(name)
            if value is not None and not low < value < high:
                return False
        return True

    def _learn(self, facts: tuple[str, ...]) -> _Plan:
        if len(self._plans) >= MAX_FACT_SETS:  # a user may name scalars as they like
            self._plans.clear()
        bounds = dict(self.bounds)
        loud: set[int] = set()
        asked: list[tuple[int, Rule]] = []
        for rule in self._asked(facts):
            every = max(int(getattr(rule, "every", 1)), 1)
            if hasattr(rule, "silent_while"):
                asked.append((every, rule))
                continue
            wakes: Mapping[str, Bounds | None] = getattr(rule, "wakes", {})
            within = [wakes[fact] for fact in wakes if fact in facts]
            if not getattr(rule, "calm", False) or None in within:
                loud.add(every)
            for more in within:
                _tighten(bounds, more or {})
        mine = tuple((name, *bounds[name]) for name in bounds if name in facts)
        plan = _Plan(tuple(sorted(loud)), mine, tuple(asked), "lr/1" in facts, "batch_size" in facts)
        self._plans[facts] = plan
        return plan

    def _renew(self) -> None:
        self._stale = False
        self._while.clear()
        window = self._window
        past, drift, schedule = window.past, window.drift, window.schedule
        self.left = 0
        if (
            len(past) < MIN_CALM
            or not window.runs.calm
            or drift.total > LIMIT
            or schedule.idle_steps
            or schedule.jumped_at >= 0
        ):
            return
        self.left = MAX_WAITING
        level = window.level("loss")
        self._drift, self._best = drift.total, min(level.best, level.least)
        self._noise = max(level.least_noise(MAX_WAITING), 1e-12)
        self._loss, self._norm, self._size = (
            window.history(name).max_after(MAX_WAITING) for name in ("loss", "grad_norm", "in_rms")
        )
        last = past[-1]
        self._has_loss, self._has_groups = len(level) > 0, len(schedule.rates) > 1
        self._rates, self._rate, self._mark = schedule.rates, last.get("lr/0"), last.get("in_print")
