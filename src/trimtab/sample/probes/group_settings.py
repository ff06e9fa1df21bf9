"""What the settings of an optimizer amount to: how fast weights decay, how long a momentum lasts, how large eps is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DECOUPLED = ("AdamW", "Lion", "Muon", "NAdamW", "Sophia")
"""Classes that take the decay off the weights themselves; newer ones say so in their groups."""


def told_by_settings(optimizer: Any) -> dict[str, float]:
    """The largest of each over the parameter groups; of settings that are not plain numbers nothing is said.

    `decay_rate` is the share of a weight that decay takes away in a step, `decay_pull` the factor of the weights in
    their gradient where an adaptive optimizer rescales both, `momentum_kept` what is left of a gradient one step later,
    `moments_crossed` by how much the square of the first of Adam's betas exceeds the second.
    """
    found: dict[str, float] = {}
    for group in optimizer.param_groups:
        for name, value in _of_group(type(optimizer).__name__, group).items():
            found[name] = max(value, found.get(name, value))
    return found


def _of_group(kind: str, group: Mapping[str, Any]) -> dict[str, float]:
    lr, decay, eps = (_plain(group.get(name)) for name in ("lr", "weight_decay", "eps"))
    betas = group.get("betas")
    pair = [_plain(beta) for beta in betas] if isinstance(betas, tuple | list) and len(betas) == 2 else []
    kept = pair[0] if pair else _plain(group.get("momentum"))
    out: dict[str, float] = {}
    if kept:
        out["momentum_kept"] = kept
    if pair and eps and pair[0] is not None and pair[1] is not None and pair[0] ** 2 > pair[1]:
        out["moments_crossed"] = pair[0] ** 2 - pair[1]
    if pair and eps:
        out["eps"] = eps
    if decay and decay > 0 and lr:
        adaptive = len(pair) > 0 or "alpha" in group or "lr_decay" in group
        if group.get("decoupled_weight_decay") or kind in DECOUPLED:
            out["decay_rate"] = lr * decay
        elif adaptive:
            out["decay_pull"] = decay
        else:
            out["decay_rate"] = lr * decay / max(1.0 - (kept or 0.0), 1e-3)
    return out


def _plain(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
