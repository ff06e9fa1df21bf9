"""WIRE005: tensors of types that do not fit meet in one operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line
from trimtab.doctor.observed_step import failure_lines
from trimtab.doctor.probe import Probe


class DtypeMismatch:
    """Tensors of types that do not fit meet in one operation.

    ## What it means
    Doubles from numpy meet float32 weights, labels are floats where whole numbers are needed, or half precision meets
    single outside of autocast.

    ## How it is checked
    PyTorch's own error, translated, with the module and the line.

    ## What to try
    1. `x = x.float()`, `y = y.long()`: in the data set, once.
    """

    code: ClassVar[str] = "WIRE005"
    name: ClassVar[str] = "dtype-mismatch"
    title: ClassVar[str] = "types fit together"
    causes: ClassVar[tuple[str, ...]] = ("*",)

    def run(self, probe: Probe) -> Iterator[Line]:
        """Translate PyTorch's error."""
        return failure_lines(self, probe, "types do not fit", "x, y = x.float(), y.long()")
