"""AMP004: A GradScaler is used, but nothing runs in float16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedlessScaler:
    """A GradScaler is used, but nothing runs in float16.

    ## What it sees
    A scaler is at work while the model ran under bfloat16, in `persist` steps; or without any autocast, where it costs
    only time and might be there for a later stage, for `patience` steps. None of the weights is float16.

    ## Why it matters
    Only float16 needs its loss scaled. Otherwise the scaler costs a pass over all gradients and a wait for the device
    in each step, and it hides real overflows by skipping them.

    ## What to try
    1. Remove the scaler, or create it with `enabled=False`.
    2. If float16 was intended, wrap the forward pass in `torch.autocast(device, torch.float16)`.
    """

    code: ClassVar[str] = "AMP004"
    name: ClassVar[str] = "needless-scaler"
    needs: ClassVar[tuple[str, ...]] = ("scale",)
    hold: ClassVar[int] = 200
    severity: Severity = Severity.WARN
    persist: int = 3
    patience: int = 300

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when a scaler has nothing to do."""
        mode = window.scalar("autocast")
        if window.scalar("scale") is None or window.scalar("float16") or mode not in (0.0, 2.0):
            return
        step = window.now.step
        if not (step < 50 if mode == 2.0 else step >= self.patience and step % 100 == 0):
            return
        row = [window.now.scalars, *list(window.past)[-self.persist + 1 :]]
        if len(row) < self.persist or any(s.get("autocast") != mode or "scale" not in s for s in row):
            return
        how = "under bfloat16" if mode == 2.0 else "without autocast"
        yield found(
            self,
            window,
            f"a GradScaler is in use (scale {window.scalar('scale'):.6g}) and the model runs {how}.",
            ("scaler",),
            scale=window.scalar("scale"),
        )
