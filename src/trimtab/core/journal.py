"""The findings of a run as a person wants them listed: one per incident, with how long it lasted."""

from __future__ import annotations

from dataclasses import replace

from trimtab.core.types import Finding, Verdict


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
