"""WIRE006: tensors of shapes that do not fit meet in one operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line
from trimtab.doctor.observed_step import failure_lines
from trimtab.doctor.probe import Probe


class ShapeMismatch:
    """Tensors of shapes that do not fit meet in one operation.

    ## What it means
    A layer was built for another size than it is given, or predictions and targets do not pair up.

    ## How it is checked
    PyTorch's own error, translated, with the module and the line.

    ## What to try
    1. Print the shape before the layer that is named; the error says both sizes.
    2. Check which dimension is the batch, and whether the last batch is smaller than the others.
    """

    code: ClassVar[str] = "WIRE006"
    name: ClassVar[str] = "shape-mismatch"
    title: ClassVar[str] = "shapes fit together"
    causes: ClassVar[tuple[str, ...]] = ("*",)

    def run(self, probe: Probe) -> Iterator[Line]:
        """Translate PyTorch's error."""
        return failure_lines(self, probe, "shapes do not fit", "print(x.shape)  # before the layer that is named")
