"""The findings of a run as a person wants them: listed one per incident, and logged in one line per incident."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from trimtab.core.types import Finding, Outcome, Severity, Verdict

GAP = 5
"""Findings that begin so few steps after the last bad one belong to the same incident, and so do those that several
guards have at steps so near to each other."""


class Journal:
    """Collects findings; one that continues an incident only lengthens its streak."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._places: dict[tuple[str, str], int] = {}

    def add(self, verdict: Verdict) -> list[Finding]:
        """Take in a verdict; returns the findings that are news."""
        news = []
        for finding in verdict.findings:
            key = (finding.optimizer, finding.code)
            if finding.streak > 1 and key in self._places:
                place = self._places[key]
                self.findings[place] = replace(self.findings[place], streak=finding.streak)
                continue
            self._places[key] = len(self.findings)
            self.findings.append(finding)
            if finding.streak == 1:  # otherwise it began before this guard's state was loaded, and was logged then
                news.append(finding)
        return news


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentLine:
    """What is said of an incident: its first cause in full, and what else came with it by name."""

    finding: Finding
    severity: Severity
    text: str

    def __str__(self) -> str:
        return self.text


class Said:
    """What guards that run side by side have said, so that they do not all say the same.

    `first` may ask other processes, too.
    """

    def __init__(self, first: Callable[[str], bool] = lambda code: True) -> None:
        self._steps: dict[str, dict[int, int]] = {}  # by code: who said it last at which step
        self._numbers = itertools.count()
        self._first = first

    def join(self) -> int:
        """One more that speaks; it gives this number whenever it asks."""
        return next(self._numbers)

    def leave(self, who: int) -> None:
        """It has ended: what it said was said of another training than those that come."""
        for steps in self._steps.values():
            steps.pop(who, None)

    def may(self, code: str, who: int, step: int) -> bool:
        """Whether this one may say it now, of this step; if so, it has."""
        steps = self._steps.setdefault(code, {})
        alike = any(other != who and abs(step - at) <= GAP for other, at in steps.items())
        if alike or not self._first(code):
            return False
        steps[who] = step
        return True


class IncidentLines:
    """Turns verdicts and outcomes into lines: one per incident; of what recurs the first, the 10th, the 100th time.

    Example:
        >>> lines = IncidentLines()
        >>> def spike(step):
        ...     found = Finding(code="LOSS002", name="loss-spike", step=step, severity=Severity.WARN, message="up.")
        ...     return Verdict(step=step, seen_at=step, findings=(found,))
        >>> for step in range(0, 990, 10):
        ...     if (line := lines.of(spike(step))) is not None:
        ...         print(line)
        step 0: LOSS002 loss-spike: up.
        step 90: LOSS002 loss-spike (10th time): up.
    """

    def __init__(self, said: Said | None = None) -> None:
        self._said = said if said is not None else Said()
        self._who = self._said.join()
        self._counts: Counter[tuple[str, str]] = Counter()
        # By optimizer: where the incident has come to, and how grave it was said to be.
        self._last: dict[str, tuple[int, Severity]] = {}
        # By optimizer: what the incident that goes on began with, and its newest bad step.
        self._begun: dict[str, tuple[Finding, int]] = {}

    def close(self) -> None:
        """Nothing more will be said: what others say from here on is news."""
        self._said.leave(self._who)

    def of(self, verdict: Verdict) -> IncidentLine | None:
        """The line for a verdict; None where it tells nothing new."""
        first = self._began_with(verdict)
        news = [finding for finding in verdict.findings if finding.streak <= 1]
        if not news:
            return None
        for code in {finding.code for finding in news}:
            self._counts[verdict.optimizer, code] += 1
        worst = max(finding.severity for finding in news)
        last = self._last.get(verdict.optimizer)
        due = [f for f in news if _is_due(self._counts[verdict.optimizer, f.code])]
        if last is not None and 0 <= verdict.step - last[0] <= GAP and worst <= last[1]:
            self._last[verdict.optimizer] = verdict.step, last[1]  # it goes on
            due = [f for f in due if self._counts[verdict.optimizer, f.code] > 1]
        mine = [f for f in due if self._said.may(f.code, self._who, verdict.step)]  # a line names every one
        if not mine:
            return None
        lead = mine[0]
        self._last[verdict.optimizer] = verdict.step, worst
        times = self._counts[verdict.optimizer, lead.code]
        again = f" ({times:,}th time)" if times > 1 else ""
        others = ", ".join(f"{f.code} {f.name}" for f in news if f is not lead)
        where = f" ({lead.optimizer})" if lead.optimizer else ""
        after = ""
        if first is not None and first.code not in (f.code for f in news) and first.step < lead.step:
            after = f", after {first.code} {first.name} at step {first.step}"
        text = f"step {lead.step}{where}: {lead.code} {lead.name}{again}{after}: {lead.message}"
        return IncidentLine(finding=lead, severity=worst, text=f"{text} Also {others}." if others else text)

    def _began_with(self, verdict: Verdict) -> Finding | None:
        """The first finding of the incident that a verdict belongs to: causes come before their effects."""
        if not verdict.findings:
            return None
        first, last = self._begun.get(verdict.optimizer, (verdict.findings[0], verdict.step))
        if not 0 <= verdict.step - last <= GAP:
            first = verdict.findings[0]
        self._begun[verdict.optimizer] = first, verdict.step
        return first

    def outcome(self, outcome: Outcome) -> str | None:
        """The line for what became of an action; None where the same was said often enough."""
        key = outcome.optimizer, f"{outcome.action.kind} {outcome.applied} {'later:' in outcome.detail}"
        self._counts[key] += 1
        times = self._counts[key]
        if not _is_due(times) or not self._said.may(key[1], self._who, outcome.at):
            return None
        return f"{outcome}{f' ({times:,}th time)' if times > 1 else ''}"


def _is_due(times: int) -> bool:
    """Whether a count is 1, 10, 100, and so on."""
    return str(times).rstrip("0") == "1"
