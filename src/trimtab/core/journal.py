"""The findings of a run as a person wants them: listed one per incident, and told in one line per incident."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from trimtab.core.types import Finding, Outcome, Severity, Verdict

GAP = 5
"""Findings that begin so few steps after the last bad one belong to the same incident."""
ALIKE_S = 10.0
"""Within this time the same finding of several guards is one incident."""


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
            if finding.streak == 1:  # otherwise it began before this guard's state was loaded, and was told then
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
    """What several guards have said, so that they do not all say the same. `first` may ask other processes, too."""

    def __init__(self, first: Callable[[str], bool] = lambda code: True) -> None:
        self._when: dict[str, tuple[float, int]] = {}
        self._first = first

    def may(self, code: str, who: int) -> bool:
        """Whether this guard may say it now; if so, it has."""
        when, whose = self._when.get(code, (-ALIKE_S, who))
        now = time.monotonic()
        if (whose != who and now - when < ALIKE_S) or not self._first(code):
            return False
        self._when[code] = now, who
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
        self._counts: Counter[tuple[str, str]] = Counter()
        # By optimizer: where the incident has come to, and how grave it was said to be.
        self._last: dict[str, tuple[int, Severity]] = {}

    def of(self, verdict: Verdict) -> IncidentLine | None:
        """The line for a verdict; None where it tells nothing new."""
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
        mine = [f for f in due if self._said.may(f.code, id(self))]  # all of them: a line names every one
        if not mine:
            return None
        lead = mine[0]
        self._last[verdict.optimizer] = verdict.step, worst
        times = self._counts[verdict.optimizer, lead.code]
        again = f" ({times:,}th time)" if times > 1 else ""
        others = ", ".join(f"{f.code} {f.name}" for f in news if f is not lead)
        where = f" ({lead.optimizer})" if lead.optimizer else ""
        text = f"step {lead.step}{where}: {lead.code} {lead.name}{again}: {lead.message}"
        return IncidentLine(finding=lead, severity=worst, text=f"{text} Also {others}." if others else text)

    def outcome(self, outcome: Outcome) -> str | None:
        """The line for what became of an action; None where the same was said often enough."""
        key = outcome.optimizer, f"{outcome.action.kind} {outcome.applied} {'later:' in outcome.detail}"
        self._counts[key] += 1
        times = self._counts[key]
        if not _is_due(times) or not self._said.may(key[1], id(self)):
            return None
        return f"{outcome}{f' ({times:,}th time)' if times > 1 else ''}"


def _is_due(times: int) -> bool:
    """Whether a count is 1, 10, 100, and so on."""
    return str(times).rstrip("0") == "1"
