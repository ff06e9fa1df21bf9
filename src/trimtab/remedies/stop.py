"""The remedy `stop`: end a run that cannot be helped, with the reason, before it wastes more time."""

from __future__ import annotations

from typing import ClassVar

from trimtab.core.errors import TrainingStopped
from trimtab.core.remedy import Target
from trimtab.core.types import Action, Finding, Outcome, Verdict

# The sentences the documented trainers stop with; whoever matches on them must find them.
_SENTENCES = {
    "nonfinite-loss": "Training stopped due to NaN/Inf loss.",
    "nonfinite-gradient": "Training stopped due to NaN/Inf gradients.",
}


def stopped(verdict: Verdict) -> TrainingStopped:
    """The exception that says why training stops."""
    worst = verdict.worst
    if worst is None:
        return TrainingStopped("Training stopped.", verdict)
    first = next((f for f in verdict.findings if f.name in _SENTENCES), worst)
    opening = _SENTENCES.get(first.name, f"Training stopped: {first.name}.")
    return TrainingStopped(f"{opening}\n{_story(worst)}", verdict)


def _story(finding: Finding) -> str:
    try_this = f" Try: {finding.advice[0]}" if finding.advice else ""
    again = f" It has lasted {finding.streak} steps." if finding.streak > 1 else ""
    return f"{finding}{again}{try_this} More: trimtab explain {finding.code}"


class Stop:
    """Marks the lane to be stopped; the guard raises once everything is on record."""

    kind: ClassVar[str] = "stop"

    def apply(self, action: Action, target: Target, at: int) -> Outcome:
        """Ask for the stop."""
        target.request_stop()
        return Outcome(at=at, action=action, applied=True, detail="training stops")
