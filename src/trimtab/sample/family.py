"""What processes that train together tell of themselves, compared: whose weights, loss, pace or data is out of line."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from trimtab.sample.reduce import Told, named_ranks
from trimtab.sample.transfer import Notes

F64 = NDArray[np.float64]
SPAN = 32
"""Steps over which losses and pace are compared."""
EVERY = 10
"""Steps between two comparisons of them."""
Found = tuple[dict[str, float], Notes]


class Family:
    """Remembers the last steps of all processes. Every process comes to the same conclusions: it hears the same."""

    def __init__(self) -> None:
        self._losses: deque[F64] = deque(maxlen=SPAN)
        self._late: deque[F64] = deque(maxlen=SPAN)
        self._spent: deque[F64] = deque(maxlen=SPAN)
        self._prints: F64 | None = None

    def heard(self, step: int, told: Told) -> Found:
        """Take in one step; facts and notes for its sample."""
        facts: dict[str, float] = {}
        notes: Notes = {}
        if told.has_loss.all() and np.isfinite(told.losses).all():
            self._losses.append(told.losses)
        if (told.spent_s > 0).all():
            self._late.append(told.late_s)
            self._spent.append(told.spent_s)
        self._weights(told, facts, notes)
        self._data(told, facts, notes)
        if step % EVERY == 0:
            if len(self._losses) == SPAN and told.num > 1:
                self._family(facts, notes)
            if len(self._late) == SPAN and told.num > 1:
                self._pace(facts, notes)
        return facts, notes

    @staticmethod
    def _weights(told: Told, facts: dict[str, float], notes: Notes) -> None:
        """Which processes hold other weights than most, or than the first where there is no majority."""
        sums = told.checksums
        if (sums < 0).any():
            return  # not a step in which they are compared
        values, first, counts = np.unique(sums, return_index=True, return_counts=True)
        usual = values[np.lexsort((first, -counts))[0]]
        facts["diverged"] = float((sums != usual).sum())
        if facts["diverged"]:
            notes["diverged"] = named_ranks(sums != usual)

    def _data(self, told: Told, facts: dict[str, float], notes: Notes) -> None:
        """Which processes have a batch that another has, too; one that never changes says nothing."""
        before, self._prints = self._prints, told.prints
        if before is None or len(before) != told.num:
            return
        known = (told.prints >= 0) & (before >= 0) & (told.prints != before)
        again = known & (np.sum((told.prints[:, None] == told.prints) & known, axis=1) > 1)
        if again.any():
            facts["same_data"] = float(again.sum())
            notes["same_data"] = named_ranks(again)

    def _family(self, facts: dict[str, float], notes: Notes) -> None:
        """By how much the loss of one process is off that of the others, of all of it, and in deviations."""
        losses = np.stack(self._losses)
        gaps = losses - _others(losses)
        middle = np.median(gaps, axis=0)
        noise = 1.4826 * np.median(np.abs(gaps - middle), axis=0)
        # Of two it is the higher one: neither is more usual than the other.
        rank = int(np.argmax(middle)) if losses.shape[1] == 2 else int(np.argmax(np.abs(middle)))
        usual = float(np.median(_others(losses)[:, rank]))
        scale = max(abs(usual), 1e-12)
        facts["rank_loss"] = float(np.median(losses[:, rank]))
        facts["rank_loss_usual"] = usual
        facts["rank_loss_score"] = float(abs(middle[rank]) / max(noise[rank], 1e-6 * scale))
        notes["rank_loss"] = (f"rank {rank}",)

    def _pace(self, facts: dict[str, float], notes: Notes) -> None:
        """How much later than the others one process begins its forward pass, in seconds and of a whole step."""
        late = np.median(np.stack(self._late), axis=0)[None]
        behind = (late - _others(late))[0]
        rank = int(np.argmax(behind))
        facts["rank_late"] = float(behind[rank])
        facts["rank_late_share"] = float(behind[rank] / np.median(np.stack(self._spent)))
        notes["rank_late"] = (f"rank {rank}",)


def _others(rows: F64) -> F64:
    """For every process and step the median of the others."""
    return np.stack([np.median(np.delete(rows, r, axis=1), axis=1) for r in range(rows.shape[1])], axis=1)
