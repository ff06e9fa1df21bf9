"""WIRE006: tensors of shapes that do not fit meet in one operation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.checks.outcome import Line, failed, not_applicable, passed
from trimtab.checks.probe import Probe


@dataclass(frozen=True, slots=True, kw_only=True)
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
        failure = probe.failure
        if failure is not None and probe.failed_as == self.name:
            where = f" in {failure.module}" if failure.module else ""
            yield failed(
                self,
                f"shapes do not fit{where}: {failure.text[:200]}",
                f"in the {failure.phase} pass of call {len(probe.calls) - 1}, at {failure.where or 'unknown'}",
                "print(x.shape)  # before the layer that is named",
                (failure.module,) if failure.module else (),
            )
        elif not probe.through:
            yield not_applicable(self, probe.no_steps)
        else:
            yield passed(self, f"{len(probe.through)} calls came to their end")
