"""A fault that several recipes share: a rate that a bug multiplies for some steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trimtab.train.recipe import Parts
from trimtab.train.trainer import Trainer

FACTOR = 1000.0


def rate_spike(parts: Parts, now: Callable[[Trainer], bool]) -> Parts:
    """The rate times 1000 while `now(trainer)`: written into the optimizer before a step, and taken out after it."""

    def scale(trainer: Trainer, factor: float) -> None:
        rig = trainer.rig
        for group in rig.optimizer.param_groups if rig is not None and now(trainer) else ():
            group["lr"] *= factor

    return replace(
        parts,
        before_step=lambda trainer: scale(trainer, FACTOR),
        after_step=lambda trainer: scale(trainer, 1.0 / FACTOR),
    )
