"""LOSS006: the validation loss rises while the training loss still falls."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class Overfitting:
    """The validation loss rises while the training loss still falls.

    ## What it sees
    The last `persist` validations are all clearly worse than the best one (by `rise` of the best and by more than the
    scatter of the validations), the newest is the worst or near it, and the training loss is lower than it was at the
    best validation.

    ## Why it matters
    From the best validation on the model learns its training set by heart. Every further step makes it worse for
    everybody else.

    ## What to try
    1. Add dropout or augmentation.
    2. Use more data, or a smaller model.
    3. Check that the validation data come from the same distribution.
    """

    code: ClassVar[str] = "LOSS006"
    name: ClassVar[str] = "overfitting"
    needs: ClassVar[tuple[str, ...]] = ("val_loss",)
    hold: ClassVar[int] = 400
    severity: Severity = Severity.WARN
    rise: float = 0.1
    persist: int = 4

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when validation has turned and training has not."""
        now = window.scalar("val_loss")
        history = window.history("val_loss")
        values = [*history.values(), now] if now is not None and math.isfinite(now) else []
        if len(values) < self.persist + 2:
            return
        best = min(values[: -self.persist])
        late = values[-self.persist :]
        # While it fell it moved by steps; after the best one scatter alone would not keep it above all of them.
        scatter = sorted(abs(b - a) for a, b in pairwise(values))[len(values) // 2 - 1]
        margin = max(self.rise * abs(best), 2.5 * scatter)
        if min(late) < best + margin or late[-1] < best + 1.5 * margin:
            return
        train = window.level("loss")
        if not train.now <= train.best + max(2.0 * train.noise, 0.2 * abs(train.start - train.best)):
            return  # training got worse as well: that is no overfitting
        before = window.earlier("val_loss")
        yield found(
            self,
            window,
            f"the validation loss is {late[-1]:.4g}; its best was {before.lowest:.4g}, at step {before.lowest_step}. "
            f"The training loss is still near its best level (about {train.now:.4g}; the best was {train.best:.4g}).",
            ("val_loss",),
            val_loss=late[-1],
            best=before.lowest,
            best_step=before.lowest_step,
            train_loss=train.now,
        )
