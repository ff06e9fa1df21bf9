"""The documented checklist of eight lines: what all checks together say about each part of a training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab.doctor.checklist import Line, Status

BACKPROP = "Backprop pipeline"
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (BACKPROP, ()),  # and whatever belongs to no other part
    ("AMP", ("autocast-inactive", "scaler-order", "needless-scaler", "gradient-underflow")),
    (
        "Gradient health",
        ("nonfinite-gradient", "nonfinite-loss", "zero-gradient", "missing-gradient", "stale-gradient", "dead-units"),
    ),
    (
        "Data loader",
        (
            "loader-exception",
            "loader-settings",
            "empty-batch",
            "nonfinite-input",
            "constant-batch",
            "repeated-batch",
            "label-range",
            "class-balance",
            "input-scale",
            "device-placement",
        ),
    ),
    ("BatchNorm and Dropout in train mode", ("eval-mode", "batchnorm-frozen", "dropout-inactive")),
    (
        "Optimizer groups, rate and weight decay",
        (
            "optimizer-settings",
            "learning-rate",
            "optimizer-misses-parameters",
            "stale-optimizer",
            "duplicate-parameters",
            "optimizer-state-lost",
            "scheduler-order",
            "double-step",
            "weights-unchanged",
        ),
    ),
    ("Gradient clipping", ("clip-order", "clip-before-unscale", "chronic-clipping")),
    ("CUDA memory peak", ("memory-peak",)),
)
"""Each part with its checks; the first of them that passed gives the evidence."""
ORDER = (Status.FAIL, Status.WARN, Status.PASS, Status.NA)


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryLine:
    """One part of the training: the worst status of its checks, and why."""

    title: str
    status: Status
    evidence: str


def summary(lines: Sequence[Line]) -> list[SummaryLine]:
    """The eight lines; every check counts in exactly one of them.

    Example:
        >>> line = Line(code="WIRE032", name="memory-peak", title="", status=Status.NA, evidence="the model is on cpu")
        >>> [(one.title, one.status.value, one.evidence) for one in summary([line])][-1]
        ('CUDA memory peak', 'not applicable', 'the model is on cpu')
    """
    part_of = {name: title for title, names in PARTS for name in names}
    by_part: dict[str, list[Line]] = {title: [] for title, _ in PARTS}
    for line in lines:
        by_part[part_of.get(line.name, BACKPROP)].append(line)
    return [_line(title, names, by_part[title]) for title, names in PARTS]


def _line(title: str, names: Sequence[str], lines: Iterable[Line]) -> SummaryLine:
    of = {status: [line for line in lines if line.status is status] for status in ORDER}
    worst = next((status for status in ORDER if of[status]), Status.NA)
    found = sorted(of[worst], key=lambda line: names.index(line.name) if line.name in names else 0)
    if worst in (Status.FAIL, Status.WARN):
        return SummaryLine(title=title, status=worst, evidence=", ".join(dict.fromkeys(line.name for line in found)))
    if not found:
        return SummaryLine(title=title, status=worst, evidence="not checked")
    if worst is Status.NA:
        return SummaryLine(title=title, status=worst, evidence=found[0].evidence)
    passed = f"{len(found)} {'check' if len(found) == 1 else 'checks'} passed"
    shown = found[0].evidence if names else ""
    return SummaryLine(title=title, status=worst, evidence=f"{passed}; {shown}" if shown else passed)
