"""DIST002: the loss of one process is far from that of the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutOfFamily:
    """The loss of one process is far from that of the others.

    ## What it sees
    Over the last 32 steps the median loss of one rank differs from that of the others by `share` of it, and by
    `deviations` times what it varies by from step to step. Of two ranks the higher loss is named. Only the loss is
    compared: gradients are the same everywhere once the processes have averaged them.

    ## Why it matters
    All processes train one model on parts of the same data, so their losses should look alike. A rank that stands out
    reads other data (a broken shard, wrong labels, another normalisation, padding only) or computes another loss, and
    what it contributes pulls the mean gradient of all of them.

    ## What to try
    1. Look at a batch of that rank: labels, normalisation, share of padding.
    2. Check what the rank decides in the data path: the shard it reads, its seed, its augmentation.
    3. If shards differ by design (languages, lengths), shuffle across them or ignore this rule.
    """

    code: ClassVar[str] = "DIST002"
    name: ClassVar[str] = "rank-out-of-family"
    needs: ClassVar[tuple[str, ...]] = ("rank_loss_score",)
    hold: ClassVar[int] = 100
    severity: Severity = Severity.WARN
    share: float = 0.5
    deviations: float = 2.0

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire where one stands out, for long and by much."""
        score, loss, usual = (window.scalar(f"rank_loss{part}") for part in ("_score", "", "_usual"))
        if score is None or loss is None or usual is None or score < self.deviations:
            return
        if abs(loss - usual) < self.share * max(abs(usual), abs(loss)):
            return
        ranks = window.now.notes.get("rank_loss", ())
        message = f"the loss of {ranks[0] if ranks else 'one rank'} is {loss:.4g}, that of the others {usual:.4g}"
        yield found(self, window, f"{message} (medians of 32 steps).", ranks, loss=loss, usual=usual, deviations=score)
