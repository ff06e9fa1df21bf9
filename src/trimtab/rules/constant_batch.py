"""DATA003: every sample of the batch is the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantBatch:
    """Every sample of the batch is the same.

    ## What it sees
    All samples of the main input are equal, in `persist` batches in a row, or at once where batches used to differ. Or
    all targets of `one_class` batches in a row are one class, where they used to differ. Where targets are not told
    but read off the gradient, 20 steps apart: in `looks` looks each batch has one class only, and batches used to be
    mixed or the class changes from one batch to another, as in sorted data. Or the targets of a cross-entropy were one
    class in every look, and its loss has fallen below `solved` of that of blind guesses.

    ## Why it matters
    There is nothing to learn from it: a placeholder, a broken loader that returns zeros, a cache that was
    overwritten. In data sorted by class the model learns one class at a time, and forgets the others.

    ## What to try
    1. Look at what the loader returns for different indices.
    2. Shuffle: `DataLoader(..., shuffle=True)`, or a sampler that mixes the classes.
    """

    code: ClassVar[str] = "DATA003"
    name: ClassVar[str] = "constant-batch"
    needs: ClassVar[tuple[str, ...]] = ("in_flat", "target_flat", "one_class", "labels_flat")
    hold: ClassVar[int] = 25
    severity: Severity = Severity.ERROR
    persist: int = 2
    one_class: int = 24
    looks: int = 4
    looks_solved: int = 3
    solved: float = 0.05

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on batches without differences."""
        if window.streak("target_flat", self.one_class) and not all(s.get("target_flat") for s in window.past):
            yield found(
                self, window, f"all targets of the last {self.one_class} batches were the same class.", ("targets",)
            )
        yield from self._sorted(window)
        yield from self._one_answer(window)
        if not window.scalar("in_flat"):
            return
        varied = any("in_print" in s and not s.get("in_flat") for s in window.past)
        if not varied and not window.streak("in_flat", self.persist):
            return
        yield found(self, window, "all samples of this batch are equal.", ("batch",))

    def _sorted(self, window: Window) -> Iterator[Finding]:
        looks = window.scalar("one_class") or 0.0
        if looks < self.looks:
            return
        yield found(
            self,
            window,
            f"each of the last {looks:.0f} batches that were looked at has targets of one class only: are the data "
            "sorted by class?",
            ("targets",),
            looks=looks,
        )

    def _one_answer(self, window: Window) -> Iterator[Finding]:
        """All targets the same in every look, and the loss says that nothing else had to be learned."""
        flat, ratios = window.last("labels_flat", 64), window.last("answer_ratio", 64)
        if not window.scalar("labels_flat") or not self.looks_solved <= len(ratios) <= len(flat):
            return
        if ratios[-1] > self.solved:
            return
        yield found(
            self,
            window,
            f"all targets were the same class in {len(flat)} looks, and the loss has fallen to {ratios[-1]:.2g} of "
            "that of blind guesses: there is nothing else to learn.",
            ("targets",),
            ratio=ratios[-1],
        )
