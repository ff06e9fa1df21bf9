"""The charts of one run as pictures, for SVG and PNG."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.core.printable import brief
from trimtab.record.reader import Run
from trimtab.report.drawing import Line, Picture

_CHARTS = (
    ("loss", (("loss", "train", "train"), ("val_loss", "val", "validation"))),
    ("gradient norm", (("grad_norm", "train", ""),)),
    ("update ratio", (("update_ratio", "train", ""),)),
    ("learning rate", (("lr/0", "train", ""),)),
    ("loss scale", (("scale", "train", ""),)),
)
_MANY = 50


def run_pictures(run: Run) -> list[Picture]:
    """One picture per number that was recorded; several optimizers have their own."""
    return [picture for optimizer in run.optimizers for picture in _of(run, optimizer)]


def _of(run: Run, optimizer: str) -> Iterator[Picture]:
    for title, parts in _CHARTS:
        lines = []
        for name, phase, label in parts:
            steps, values = run.series(name, optimizer=optimizer, phase=phase)
            if len(steps):
                as_points = phase == "val" and len(steps) < _MANY
                lines.append(Line(name=label, x=steps.astype(float), values=values, as_points=as_points))
        if lines:
            single = len(lines) == 1 and title == "loss" and not lines[0].as_points
            drawn = tuple(Line(name="", x=line.x, values=line.values) for line in lines) if single else tuple(lines)
            yield Picture(title=f"{brief(optimizer, 20)}: {title}" if optimizer else title, lines=drawn)
