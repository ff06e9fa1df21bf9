"""The remedy `skip`: the update was already kept out of the weights inside the step; this puts it on record."""

from __future__ import annotations

from typing import ClassVar

from trimtab.core.remedy import Target
from trimtab.core.types import Action, Outcome


class Skip:
    """Says whether the reflex really rejected the step the decision is about."""

    kind: ClassVar[str] = "skip"

    def apply(self, action: Action, target: Target, at: int) -> Outcome:
        """Nothing is left to do: report what the reflex did."""
        done = bool(target.last_rejected)
        detail = "the update was kept out of the weights" if done else "the update had already been applied"
        return Outcome(at=at, action=action, applied=done, detail=detail)
