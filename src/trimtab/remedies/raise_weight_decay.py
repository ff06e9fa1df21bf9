"""The remedy `raise_weight_decay`: a run that overfits is held back by a little more decay, within bounds."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from trimtab.core.remedy import Rated
from trimtab.core.types import Action, Outcome

START = 1e-4
"""What a run without any weight decay begins with."""
HIGHEST = 0.1
GROWTH = 10.0
ORIGINAL = "initial_weight_decay"
"""Kept in the group, as schedulers keep `initial_lr`: it is saved and loaded with the optimizer."""


class RaiseWeightDecay:
    """Multiplies every group's decay by `factor` (1.5), to at most `max` (0.1) and ten times what it was at first.

    Groups without decay (biases and norms, as a rule) stay without, unless no group has any. It is not undone:
    schedulers do not touch it, and the trouble it answers comes back when it goes.
    """

    kind: ClassVar[str] = "raise_weight_decay"

    def apply(self, action: Action, target: Rated, at: int) -> Outcome:
        """Raise the decay of the lane's optimizer."""
        factor, highest = float(action.args.get("factor", 1.5)), float(action.args.get("max", HIGHEST))
        groups = [g for g in target.optimizer.param_groups if _has_number(g)]
        if not groups:
            detail = f"{type(target.optimizer).__name__} has no weight decay to raise"
            return Outcome(at=at, action=action, applied=False, detail=detail)
        none_yet = all(g["weight_decay"] == 0 for g in groups)
        changes = [_raise(g, factor, highest) for g in groups if none_yet or g["weight_decay"] > 0]
        changed = [f"{before:.3g} -> {after:.3g}" for before, after in changes if after > before]
        detail = f"weight decay {', '.join(changed)}" if changed else "weight decay is as high as it may be"
        return Outcome(at=at, action=action, applied=bool(changed), detail=detail)


def _has_number(group: dict[str, Any]) -> bool:
    decay = group.get("weight_decay")
    return decay is not None and not isinstance(decay, Tensor)


def _raise(group: dict[str, Any], factor: float, highest: float) -> tuple[float, float]:
    before = float(group["weight_decay"])
    first = group.setdefault(ORIGINAL, before or START)
    wanted = min(before * factor if before else START, GROWTH * first, highest)
    group["weight_decay"] = max(before, wanted)  # one that began above the bound is left where it is
    return before, group["weight_decay"]
