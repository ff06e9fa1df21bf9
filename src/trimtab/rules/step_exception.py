"""STEP001: the training step ended with an exception."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class StepException:
    """The training step ended with an exception.

    ## What it sees
    An exception left the `with Guard(...)` block (or was handed to `guard.__exit__`) after the model was called and
    before the step was made, or PyTorch raised it. What a script raises between two steps is its own affair. Where
    the text of the error says what is wrong (a label out of range, a loss without a graph), the finding has that
    name instead.

    ## Why it matters
    The run is over, and the record should say why.

    ## What to try
    1. Read the last lines of the traceback: the first frame of your own code is the place.
    """

    code: ClassVar[str] = "STEP001"
    name: ClassVar[str] = "step-exception"
    needs: ClassVar[tuple[str, ...]] = ("exception",)
    severity: Severity = Severity.ERROR

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on the note of an exception."""
        if window.scalar("exception") and not (window.scalar("label_error") or window.scalar("no_grad_error")):
            texts = window.now.notes.get("exception", ())
            yield found(self, window, ": ".join(texts) or "an exception ended the run.", texts[:1])
