"""A run that has gone back goes on under another branch number; samples under way still belong to the old one."""

from __future__ import annotations

from dataclasses import replace

from trimtab.core.types import Sample


class Branches:
    """From which step on which branch."""

    def __init__(self, number: int = 0) -> None:
        self._known = [(0, number)]

    @property
    def now(self) -> int:
        """How many times the run has gone back."""
        return self._known[-1][1]

    def begin(self, step: int) -> None:
        """A new branch begins with this step."""
        self._known = [*self._known[-7:], (step, self.now + 1)]

    def marked(self, sample: Sample) -> Sample:
        """The sample under the number of its branch."""
        if not self.now:
            return sample
        if sample.phase != "train":
            return replace(sample, branch=self.now)
        return replace(sample, branch=next((b for first, b in reversed(self._known) if first <= sample.step), 0))
