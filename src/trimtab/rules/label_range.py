"""DATA006: targets lie outside the range the loss is made for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRange:
    """Targets lie outside the range the loss is made for.

    ## What it sees
    Targets of a binary cross-entropy lie outside 0 to 1 (told through `batch`). Class numbers beyond the number of
    classes end a step with an exception, which is reported under this name as well. On a GPU that is an assertion in a
    kernel, which does not say what failed; most often it is this.

    ## Why it matters
    Masks with values 0 and 255, labels that begin at 1, a class that was added without a larger head: the loss has no
    minimum there (it runs to minus infinity), or a device assertion ends the run without saying where.

    ## What to try
    1. Print the smallest and the largest label of the batch, and compare them with the number of classes.
    """

    code: ClassVar[str] = "DATA006"
    name: ClassVar[str] = "label-range"
    needs: ClassVar[tuple[str, ...]] = ("targets_outside", "label_error")
    hold: ClassVar[int] = 10
    severity: Severity = Severity.ERROR

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on impossible targets."""
        if window.scalar("label_error"):
            text = ": ".join(window.now.notes.get("exception", ()))
            story = "a label or token is out of range"
            if "device-side assert" in text or "launch failure" in text:  # which of them depends on the device
                story = "a kernel failed on the device, most likely because a label or token is out of range"
            yield found(self, window, f"{story}: {text}", ("targets",))
            return
        share = window.scalar("targets_outside")
        if share:
            yield found(
                self,
                window,
                f"{share:.1%} of the targets lie outside 0 to 1, and the loss is a binary cross-entropy.",
                ("targets",),
                share=share,
            )
