"""Skip an update that was rejected, and put aside the samples it came from."""

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
        blamed = "" if target.batches is None else target.batches.offended(target.last_step)
        detail = f"{detail}; {blamed}" if blamed else detail
        return Outcome(at=at, action=action, applied=done, detail=detail)


class SkipData:
    """Adds what is known of the batch (sample ids, else hashes of its content) to the guard's quarantine."""

    kind: ClassVar[str] = "skip_data"

    @staticmethod
    def can(target: Target) -> bool:
        """Whether anything is known of the samples of the judged step."""
        desk = target.batches
        return desk is not None and bool(desk.knows(target.last_step))

    def apply(self, action: Action, target: Target, at: int) -> Outcome:
        """Put the batch of the judged step aside."""
        desk = target.batches
        if desk is None:
            return Outcome(at=at, action=action, applied=False, detail="no quarantine is kept")
        num, how = desk.put_aside(target.last_step)
        if not num:
            return Outcome(at=at, action=action, applied=False, detail=how)
        who, them = (f"{num} samples are", "them") if num > 1 else ("1 sample is", "it")
        how = how if num > 1 else {"their ids": "its id", "their content": "its content"}.get(how, how)
        detail = f"{who} in quarantine by {how}; a loader that asks it leaves {them} out from now on"
        return Outcome(at=at, action=action, applied=True, detail=detail)
