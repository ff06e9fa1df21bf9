"""Whether a verdict is a reason to go back, how far, and when going back has to be given up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from trimtab.core.types import Action, Finding, Severity, Verdict

SETTLE = 5
"""Trouble this soon after a rewind is what made it necessary, still going on: the same is done again, at no price."""
REPEATS = 8
MAX_BACK = 3
UNDOABLE = frozenset(
    {
        "exploding-gradient",
        "loss-spike",
        "diverging-loss",
        "weight-jump",
        "learning-rate",
        "update-ratio",
        "weight-corrupted",
        "optimizer-state-lost",
        "outlier-batch",
        "nonfinite-weight",
        "nonfinite-optimizer-state",
    }
)
STUBBORN = frozenset({"nonfinite-gradient", "nonfinite-loss"})
"""Kept out inside the step: nothing to take back, unless one batch after the other gives it."""
STUBBORN_AT = (10, 25)
USUAL_UPDATE = 0.03
"""By how much of their size the first steps of a sound run change the weights, at most."""
MOST_RESTART, LEAST_RESTART = 0.1, 1e-3
SMALL_UPDATE = 0.01
"""Below this the finding `update-ratio` says that updates are too small."""
BEFORE_THE_STEP = frozenset(
    {"weight-corrupted", "optimizer-state-lost", "nonfinite-weight", "nonfinite-optimizer-state"}
)
"""Damage that is there whether or not this step's update was let through."""


def harmless(finding: Finding) -> bool:
    """Whether an odd batch went by without a trace in the weights: only averages over batches have taken it in."""
    return finding.name == "outlier-batch" and finding.evidence.get("harm", math.inf) <= 1.0


def culprits(findings: Iterable[Finding], strikes: Mapping[str, int]) -> list[Finding]:
    """The findings that say that weights or state were damaged, so that going back can help."""
    return [f for f in findings if f.severity >= Severity.ERROR and _damaged(f, strikes.get(f.name, 1))]


def _damaged(finding: Finding, strikes: int) -> bool:
    evidence = finding.evidence
    if finding.name in STUBBORN:
        return strikes in STUBBORN_AT
    if finding.name not in UNDOABLE or "factor" in evidence:  # a loss with the wrong sign was never right
        return False
    if finding.name not in BEFORE_THE_STEP and not evidence.get("update_applied", 1.0):
        return False
    if finding.name == "learning-rate":
        return "highest" in evidence  # it leapt; a rate of 0 or NaN moved nothing
    return True


def _restart_factor(found: Iterable[Finding]) -> float:
    """What the rate is to be multiplied with if the run has to begin again: a step then moves the weights as usual."""
    largest = max((max(f.evidence.get(n, 0.0) for n in ("update_ratio", "largest_update")) for f in found), default=0.0)
    return min(MOST_RESTART, max(USUAL_UPDATE / largest, LEAST_RESTART)) if largest > 0 else MOST_RESTART


def next_rewind(
    state: Mapping[str, Any], verdict: Verdict, found: list[Finding], *, quiet: int
) -> tuple[Mapping[str, Any], Action, bool] | None:
    """The state after it, the action, and whether it only repeats the last one; None where nothing more can be won.

    The first time in a quiet run it goes to the newest good snapshot before the onset; each time trouble comes back one
    further. `onset` in the evidence is what the trail says. Where the weights are unharmed only buffers go back, and
    it is no attempt that counts.
    """
    if all(map(harmless, found)):
        onset = min(int(f.evidence.get("onset", verdict.step)) for f in found)
        kept = {"step": state.get("step"), "at": state.get("at", 0), "back": state.get("back", 0), "repeats": 0}
        return kept, Action(kind="rewind", args={"before": float(onset), "buffers": 1.0}), True
    found = [f for f in found if not harmless(f)]
    last = state.get("step")
    since = math.inf if last is None else verdict.step - last
    back, repeats = int(state.get("back", 0)), int(state.get("repeats", 0))
    again = since <= SETTLE and repeats < REPEATS
    if again:
        repeats += 1
    elif since <= quiet:
        back, repeats = back + 1, 0
    else:
        back, repeats = 0, 0
    if back > MAX_BACK:
        return None
    before = min(int(f.evidence.get("onset", verdict.step)) for f in found)
    args = {"before": float(before), "back": float(back), "restart": _restart_factor(found)}
    new = {"step": verdict.step, "at": verdict.seen_at + 1, "back": back, "repeats": repeats}
    return new, Action(kind="rewind", args=args), again
