"""The remedy `back_off_scaler`: halve a GradScaler's loss scale at once instead of one overflow at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from trimtab.core.remedy import Target
from trimtab.core.types import Action, Outcome
from trimtab.torchutil.patch import wrap_method_of

LOWEST = 1.0


class BackOffScaler:
    """Multiplies the loss scale by `factor` (0.5), to no less than 1, when the loop next calls `scaler.update()`."""

    kind: ClassVar[str] = "back_off_scaler"

    def apply(self, action: Action, target: Target, at: int) -> Outcome:
        """Lower the scale of the lane's scaler."""
        scaler = target.scaler
        if scaler is None or not scaler.is_enabled():
            return Outcome(at=at, action=action, applied=False, detail="there is no loss scaler at work")
        before = float(scaler.get_scale())
        after = max(before * float(action.args.get("factor", 0.5)), LOWEST)
        if after >= before:
            return Outcome(
                at=at, action=action, applied=False, detail=f"the loss scale is {before:g}, as low as it may be"
            )
        _at_next_update(scaler, after)
        return Outcome(at=at, action=action, applied=True, detail=f"loss scale {before:g} -> {after:g}")


def _at_next_update(scaler: Any, new_scale: float) -> None:
    """Set the scale at the end of the iteration, which is when `update` allows it.

    A remedy runs inside `scaler.step`. There `update` would forget the overflow checks that the loop's own `update` is
    about to ask for, and a second optimizer's gradients would be divided by another number than they were scaled by.
    """
    pending = [new_scale]

    def update(inner: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        undo()
        inner(*args, **kwargs)
        if pending and float(scaler.get_scale()) > pending[0]:  # the loop's update may have backed off as far by itself
            inner(new_scale=pending[0])
        pending.clear()  # once only, even where somebody wrapped this and keeps calling it

    undo = wrap_method_of(scaler, "update", update)
