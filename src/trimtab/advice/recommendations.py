"""Every recommendation there is: the advice of the source documents, each with the evidence that calls for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from trimtab.advice.dynamics import CLIPPING, DYNAMICS
from trimtab.advice.engine import Recommendation, advise, gather
from trimtab.advice.learning import LEARNING
from trimtab.advice.numerics import NUMERICS
from trimtab.advice.practice import DATA, PRACTICE
from trimtab.core.config import Config
from trimtab.core.types import Finding
from trimtab.core.window import Window

# Within a rank the earlier one comes first.
TABLE: tuple[Recommendation, ...] = (*DATA, *NUMERICS, *DYNAMICS, *CLIPPING, *LEARNING, *PRACTICE)


def recommendations_for(finding_name: str) -> tuple[Recommendation, ...]:
    """Every recommendation that may be attached to findings of this name, in the usual order.

    Example:
        >>> [r.topic for r in recommendations_for("overfitting")]
        ['early-stop', 'act']
    """
    return tuple(sorted((r for r in TABLE if finding_name in r.findings), key=lambda r: r.rank))


def advise_on(config: Config, finding: Finding, own: tuple[str, ...], window: Window, spent: int) -> tuple[str, ...]:
    """The advice for a finding about the newest sample of a window; `own` is what its rule recommends."""
    return advise(finding, own, gather(finding, window, config, spent), TABLE)


def adviser_for(config: Config) -> Callable[[Finding, tuple[str, ...], Window, int], tuple[str, ...]]:
    """The function that makes the advice for findings of a run with these settings."""
    return partial(advise_on, config)


def as_markdown() -> str:
    """The whole table for people, as docs/how-to/advice.md shows it."""
    lines = ["| attached to | when | advice |", "| --- | --- | --- |"]
    for one in TABLE:
        cells = (", ".join(one.findings), one.when, one.filled or one.text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
