"""DATA004: the same batch comes again and again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from trimtab.core.types import Finding, Kind, Severity
from trimtab.core.window import Window, found


def _runs(prints: list[float]) -> list[int]:
    """The lengths of the runs of equal values."""
    out: list[int] = []
    for i, value in enumerate(prints):
        if i and value == prints[i - 1]:
            out[-1] += 1
        else:
            out.append(1)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedBatch:
    """The same batch comes again and again.

    ## What it sees
    The inputs of the last steps are bit for bit the same, more often in a row than ever before in this run (`persist`
    at least), after batches that differed. Or there were no more than `few` different batches in the last 64 steps,
    again and again. Training on one full batch from the start, and several steps on each batch by design, stay silent.
    So does a small data set: batches that are slices of one tensor and cover it (`covered`), or a model with fewer
    than `capacity` weights for each row, which cannot learn them by heart.

    ## Why it matters
    The loader is stuck, every step creates a new iterator, or a worker died: the model learns one batch by
    heart while the epoch counter runs.

    ## What to try
    1. Create the iterator once per epoch, outside the loop.
    2. Look at the loader: does it fall back to a cached batch on errors?
    3. If it is meant, ignore this rule for that phase.
    """

    code: ClassVar[str] = "DATA004"
    name: ClassVar[str] = "repeated-batch"
    needs: ClassVar[tuple[str, ...]] = ("in_print", "stuck")
    hold: ClassVar[int] = 10
    calm: ClassVar[bool] = True
    severity: Severity = Severity.ERROR
    persist: int = 4
    min_different: int = 6
    stuck: int = 16
    few: int = 4
    span: int = 60
    covered: float = 0.8
    capacity: float = 10.0

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when a repetition is longer than any before."""
        stuck = window.scalar("stuck")
        if stuck is not None and stuck >= self.stuck:
            yield found(
                self, window, f"this batch came {int(stuck)} times in a row; the loader has others.", ("batch",)
            )
            return
        now = window.scalar("in_print")
        if now is not None and window.now.layout.has_weight_norms:
            yield from self._few(window, now)
        if now is None or not window.past or window.past[-1].get("in_print") != now:
            return
        runs = _runs([p for s in window.past if (p := s.get("in_print")) is not None] + [now])
        if len(runs) < self.min_different or runs[-1] < self.persist or runs[-1] <= 2 * max(runs[1:-1], default=1):
            return
        yield found(
            self,
            window,
            f"this batch came {runs[-1]} times in a row; before that batches differed.",
            ("batch",),
            times=runs[-1],
        )

    def _few(self, window: Window, now: float) -> Iterator[Finding]:
        """In a thorough look: how many batches there have been. Full batches are one, and meant."""
        seen = [p for s in window.past if (p := s.get("in_print")) is not None] + [now]
        different = len(set(seen))
        if len(seen) < self.span or not 1 < different <= self.few or self._is_all(window):
            return
        finding = found(
            self,
            window,
            f"there were only {different} different batches in the last {len(seen)} steps.",
            ("batch",),
            different=different,
            num_steps=len(seen),
        )
        yield replace(finding, severity=Severity.WARN)  # a data set may be that small, and its weights are sound

    def _is_all(self, window: Window) -> bool:
        """Whether so few batches are a small data set, and not what is left of a larger one."""
        rows, covered = window.last("data_rows", 64), window.last("data_covered", 64)
        if not rows:
            return False  # there were others before
        if covered:
            return covered[-1] >= self.covered
        layout = window.now.layout
        return sum(layout.numel[layout.rows(Kind.WEIGHT)]) < self.capacity * rows[-1]
