"""Findings grouped into incidents: what began together is told together, the first cause first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from trimtab.core.journal import GAP
from trimtab.core.types import Finding, Severity, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One rule firing at a step and the steps after it: its first finding, and how long it lasted."""

    finding: Finding
    last_step: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Troubles of one optimizer that overlap in time, in the order in which they began."""

    onset: int
    last_step: int
    optimizer: str
    troubles: tuple[Trouble, ...]

    @property
    def cause(self) -> Finding:
        """What began first: of findings at the same step, the one the rules put first."""
        return self.troubles[0].finding

    @property
    def severity(self) -> Severity:
        """The gravest severity in it."""
        return max(t.finding.severity for t in self.troubles)


def find_incidents(verdicts: Iterable[Verdict]) -> tuple[Incident, ...]:
    """Group all findings of a run into incidents, in the order of their onset."""
    by_optimizer: dict[str, list[Trouble]] = {}
    for trouble in find_troubles(verdicts):
        by_optimizer.setdefault(trouble.finding.optimizer, []).append(trouble)
    found: list[Incident] = []
    for optimizer, troubles in by_optimizer.items():
        groups: list[list[Trouble]] = []
        reach = -1
        for trouble in sorted(troubles, key=lambda t: t.finding.step):  # stable: the rules' order stays
            if not groups or trouble.finding.step > reach + GAP:
                groups.append([])
                reach = trouble.last_step
            groups[-1].append(trouble)
            reach = max(reach, trouble.last_step)
        found += [
            Incident(
                onset=g[0].finding.step,
                last_step=max(t.last_step for t in g),
                optimizer=optimizer,
                troubles=tuple(g),
            )
            for g in groups
        ]
    return tuple(sorted(found, key=lambda i: i.onset))


def find_troubles(verdicts: Iterable[Verdict]) -> tuple[Trouble, ...]:
    """Join the findings of one rule that continue each other (their `streak` goes on counting)."""
    troubles: list[Trouble] = []
    newest: dict[tuple[str, str, str], int] = {}
    for verdict in verdicts:
        for finding in verdict.findings:
            key = (verdict.phase, finding.optimizer, finding.code)
            if finding.streak > 1 and key in newest:
                at = newest[key]
                old = troubles[at]
                troubles[at] = replace(old, last_step=finding.step, num_steps=old.num_steps + 1)
            else:
                newest[key] = len(troubles)
                troubles.append(Trouble(finding=finding, last_step=finding.step, num_steps=finding.streak))
    return tuple(troubles)
