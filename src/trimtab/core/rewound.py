"""What the detectors make of a rewind: the stretch that was taken back leaves their memory; nothing alarms at it."""

from __future__ import annotations

from trimtab.core.level import SHORT
from trimtab.core.schedule import RAISED
from trimtab.core.types import Finding, Sample
from trimtab.core.window import Window

BOUNDED = 0.5
"""A gradient clipped to less than this share of itself did no more than a usual one."""


def applied(sample: Sample, finding: Finding) -> bool:
    """Whether the update of this step got into the weights, and at full size where its size is the trouble."""
    scalars = sample.scalars
    if any(scalars.get(name) for name in ("rejected", "scaler_skipped", "routine_overflow")):
        return False
    if finding.name == "learning-rate" and "highest" in finding.evidence:  # it leapt, but is it in force?
        in_force = finding.evidence.get("lr", 0.0) * scalars.get("lr_multiplier", 1.0)
        return in_force > RAISED * finding.evidence["highest"]
    return finding.name != "exploding-gradient" or scalars.get("clip_coef", 1.0) > BOUNDED


def go_back(window: Window, num: int) -> None:
    """Take the last `num` training samples out of what is remembered of every step.

    The slow histories stay: alarming samples never got into them.
    """
    if num <= 0:
        return
    state = window.state_dict()
    past = state["past"] = state["past"][: max(len(state["past"]) - num, 0)]
    for name, level in state["levels"].items():
        known = [s[name] for s in past if name in s][-SHORT:]
        level["recent"] = known or level["recent"][:1]
    state["drift"] = {"total": 0.0, "onset": -1}
    state["left_out"] = 0
    window.load_state_dict(state)
