"""TensorBoard, and everything else with `add_scalar(tag, value, step)`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.types import Severity
from trimtab.integrations.loggers.histogram import Histogram, as_scalars, nonfinite_counts

INSTALL = "pip install 'trimtab[tensorboard]'"


def open_writer(folder: str | Path) -> Any:
    """A new `SummaryWriter`; InputError with the install line where the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(f"logging to TensorBoard needs the package: {INSTALL}") from None
    return SummaryWriter(str(folder))


class TensorBoardTarget:
    """A writer: numbers as scalars, findings as text, the report beside the event file.

    `owned`: the writer was opened for this guard, and is closed with it.
    """

    def __init__(self, writer: Any, *, owned: bool = False) -> None:
        self._writer, self._owned = writer, owned

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """One point for each."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def tell(self, title: str, text: str, severity: Severity | None, step: int) -> None:
        """A text, where the writer takes texts."""
        add_text = getattr(self._writer, "add_text", None)
        if callable(add_text):
            add_text(f"trimtab/{'findings' if severity is not None else 'actions'}/{title}", text, step)

    def histograms(self, found: Mapping[str, Histogram], step: int) -> None:
        """Histograms as they are, where the writer takes them; TensorBoard's own bins widen in the same way."""
        add = getattr(self._writer, "add_histogram_raw", None)
        if not callable(add):
            self.scalars(as_scalars(found), step)
            return
        self.scalars(nonfinite_counts(found), step)
        for name, one in found.items():
            if one.num:
                total, squares = one.moments()
                add(
                    name,
                    min=float(one.edges[0]),
                    max=float(one.edges[-1]),
                    num=one.num,
                    sum=total,
                    sum_squares=squares,
                    bucket_limits=one.edges[1:].tolist(),
                    bucket_counts=one.counts.tolist(),
                    global_step=step,
                )

    def page(self, path: Path) -> None:
        """Beside the event file: TensorBoard has no pages."""
        folder = getattr(self._writer, "log_dir", None)
        if isinstance(folder, str | Path) and Path(folder).is_dir():
            shutil.copyfile(path, Path(folder) / "trimtab_report.html")

    def flush(self) -> None:
        """Let the writer flush, if it can."""
        flush = getattr(self._writer, "flush", None)
        if callable(flush):
            flush()

    def close(self) -> None:
        """Flush; a writer of ours is closed, too."""
        self.flush()
        if self._owned:
            self._writer.close()
