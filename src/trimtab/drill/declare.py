"""How a fault is declared: one function, one trouble."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

from trimtab.drill.outcome import Fault

if TYPE_CHECKING:
    from trimtab.drill.one_run import Run

NONFINITE = ("nonfinite-loss", "nonfinite-gradient", "nonfinite-weight")
HURT = ("loss-spike", "exploding-gradient", "diverging-loss")
TOO_FAST = (
    "learning-rate", "update-ratio", "loss-spike", "diverging-loss", "exploding-gradient", "weight-jump",
    "oscillating-loss", *NONFINITE,
)  # fmt: skip
"""What a step that is far too long can rightly be called."""

Inject = Callable[["Run"], None]


def fault(
    table: list[Fault], group: str, *names: str, from_start: bool = False, silent: bool = False
) -> Callable[[Inject], Inject]:
    """List a fault under its function's name; the docstring says what happens.

    Example:
        >>> table = []
        >>> @fault(table, "data", "constant-batch")
        ... def all_blank(run):
        ...     "Every sample is zeros."
        >>> table[0].name, table[0].what
        ('all-blank', 'Every sample is zeros.')
    """

    def declare(inject: Inject) -> Inject:
        name, what = inject.__name__.replace("_", "-"), inspect.cleandoc(inject.__doc__ or "")
        table.append(
            Fault(
                name=name, group=group, what=what, names=names, inject=inject, from_start=from_start, silent=silent
            )
        )  # fmt: skip
        return inject

    return declare
