"""A sample as a flat `name: number` dictionary for loggers, and as one CSV row for spreadsheets and pandas."""

from __future__ import annotations

import csv
import io
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.core.errors import InputError
from trimtab.core.types import Column, Kind, Record, Sample

log = logging.getLogger("trimtab.record")

MAX_ROWS = 100_000
"""Rows kept while they cannot be written; beyond this the oldest go."""
_KEYS = ("step", "branch", "optimizer", "phase")


class CsvSink:
    """Appends one row per sample to `path`.

    The standard columns are there from the start. When a new one turns up (a learning-rate group, a validation
    metric) the file is rewritten under a temporary name with the longer header and then replaced, so no row is ever
    lost. An existing file of ours is continued.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._columns = [*_KEYS, *STANDARD]
        self._rows: list[dict[str, object]] = []
        self._num_lost = 0
        self._pid = os.getpid()
        if self.path.exists() and self.path.stat().st_size:
            with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
                header = next(csv.reader(file), [])
            if header[: len(_KEYS)] != list(_KEYS):
                raise InputError(
                    f"{self.path} is a file of something else (its first row is {header[:4]}): nothing was written; "
                    f"expected columns that begin with {', '.join(_KEYS)}, so choose another path"
                )
            self._columns = header
            self._end_line()
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append([self._columns])

    def write(self, record: Record) -> None:
        """Collect a row; records other than samples have no place in a table of numbers."""
        if isinstance(record, Sample):
            key = {"step": record.step, "branch": record.branch, "optimizer": record.optimizer, "phase": record.phase}
            self._rows.append({**key, **metrics(record)})
            if len(self._rows) > MAX_ROWS:
                del self._rows[0]
                self._num_lost += 1

    def flush(self) -> None:
        """Write the collected rows."""
        if not self._rows or os.getpid() != self._pid:
            return
        new = dict.fromkeys(name for row in self._rows for name in row if name not in self._columns)
        if new:
            self._grow([*self._columns, *new])
        rows: list[list[object]] = [[row.get(name, "") for name in self._columns] for row in self._rows]
        if not self.path.exists():  # somebody deleted it: rows without a header would be of no use
            self.path.parent.mkdir(parents=True, exist_ok=True)
            rows.insert(0, [*self._columns])
        self._append(rows)
        self._rows.clear()
        if self._num_lost:
            log.warning("%s: %d rows are lost: the disk refused to take them", self.path, self._num_lost)
            self._num_lost = 0

    def close(self) -> None:
        """Flush; nothing is held open."""
        self.flush()

    def _append(self, rows: list[list[object]] | list[list[str]]) -> None:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        with self.path.open("ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            rest = memoryview(text.getvalue().encode())
            try:
                while rest:
                    rest = rest[file.write(rest) or 0 :]
            except OSError:
                file.truncate(before)  # the rows are still ours and come again: not twice
                raise

    def _grow(self, columns: list[str]) -> None:
        temporary = self.path.with_name(self.path.name + ".growing")
        with (
            self.path.open(newline="", encoding="utf-8") as old,
            temporary.open("w", newline="", encoding="utf-8") as new,
        ):
            reader, writer = csv.reader(old), csv.writer(new, lineterminator="\n")
            next(reader, None)
            writer.writerow(columns)
            writer.writerows(row + [""] * (len(columns) - len(row)) for row in reader)
        os.replace(temporary, self.path)
        self._columns = columns

    def _end_line(self) -> None:
        """A crash may have torn the last row: the next one must not be glued to it."""
        with self.path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) not in (b"\n", b"\r"):
                file.write(b"\n")


SCALARS = {
    "loss": "loss",
    "grad_norm": "grad/global_norm",
    "clip_coef": "grad/clip_coef",
    "update_ratio": "update/ratio",
    "weight_norm": "weight/global_norm",
    "scale": "amp/scale",
    "rejected": "health/rejected",
}
"""Which scalar of a training sample goes by which name."""

STANDARD = (
    "loss",
    "val/loss",
    "lr",
    "grad/global_norm",
    "grad/global_norm_clipped",
    "grad/clip_coef",
    "grad/max_norm",
    "grad/min_norm",
    "grad/mean_norm",
    "grad/has_nan",
    "grad/has_inf",
    "update/ratio",
    "weight/global_norm",
    "amp/scale",
    "health/rejected",
)
"""Every name that does not depend on the user's model."""


def metrics(sample: Sample) -> dict[str, float]:
    """What was measured, under flat names; nothing that was not.

    Example:
        >>> from trimtab.core.types import Layout
        >>> empty = Layout(names=(), kinds=(), numel=())
        >>> scalars = {"loss": 2.0, "grad_norm": 4.0, "clip_coef": 0.25}
        >>> metrics(Sample(step=0, layout=empty, table=np.empty((0, 7), np.float32), scalars=scalars))
        {'loss': 2.0, 'grad/global_norm': 4.0, 'grad/clip_coef': 0.25, 'grad/global_norm_clipped': 1.0}
    """
    scalars = sample.scalars
    if sample.phase == "val":
        out = {name: float(value) for name, value in scalars.items() if name.startswith("val/")}
        if "val_loss" in scalars:
            out["val/loss"] = float(scalars["val_loss"])
        return out
    out = {public: float(scalars[name]) for name, public in SCALARS.items() if name in scalars}
    norm, coef = scalars.get("grad_norm", math.nan), scalars.get("clip_coef", math.nan)
    if math.isfinite(norm) and math.isfinite(coef):
        out["grad/global_norm_clipped"] = float(norm * coef)
    if "lr" in scalars or "lr/0" in scalars:
        out["lr"] = float(scalars["lr"] if "lr" in scalars else scalars["lr/0"])
    out |= {name: float(value) for name, value in scalars.items() if name.startswith("lr/")}
    return out | _gradients(sample)


def _gradients(sample: Sample) -> dict[str, float]:
    norms = sample.col(Kind.GRAD, Column.L2).astype(np.float64)
    present = ~(norms < 0)  # a NaN is a measurement; ABSENT and FROZEN are not
    if not present.any():
        return {}
    norms = norms[present]

    def has(column: Column, looks: np.ndarray) -> float:
        """From the count where there is one; else from the norms, which are non-finite where a value is."""
        count = sample.col(Kind.GRAD, column)
        return float((count[present] > 0).any() if len(count) else looks.any())

    return {
        "grad/max_norm": float(norms.max()),
        "grad/min_norm": float(norms.min()),
        "grad/mean_norm": float(norms.mean()),
        "grad/has_nan": has(Column.NAN, np.isnan(norms)),
        "grad/has_inf": has(Column.INF, np.isinf(norms)),
    }


def layer_metrics(sample: Sample) -> dict[str, float]:
    """The gradient norm of each parameter that had one, and the mean where it was measured."""
    out: dict[str, float] = {}
    norms, means = sample.col(Kind.GRAD, Column.L2), sample.col(Kind.GRAD, Column.MEAN)
    for i, (name, norm) in enumerate(zip(sample.names(Kind.GRAD), norms.tolist(), strict=False)):
        if norm < 0:
            continue
        path = _path(name)
        out[f"{path}/norm"] = norm
        if len(means):
            out[f"{path}/mean"] = float(means[i])
    return out


def statistics_metrics(stats: Mapping[str, Any]) -> dict[str, float]:
    """The dictionary of `GradientHealthMonitor.check_gradients` under the same flat names.

    Example:
        >>> norms = {f"{name}_grad_norm": 2.0 for name in ("global", "max", "min", "mean")}
        >>> layers = {"0.weight": {"norm": 2.0, "mean": 0.1, "std": 0.5}}
        >>> flat = statistics_metrics({**norms, "has_nan": False, "has_inf": False, "layer_stats": layers})
        >>> list(flat)[5:]
        ['grad/has_inf', 'grad_layer/0/weight/norm', 'grad_layer/0/weight/mean', 'grad_layer/0/weight/std']
    """
    out = {f"grad/{name}_norm": float(stats[f"{name}_grad_norm"]) for name in ("global", "max", "min", "mean")}
    out |= {f"grad/{name}": float(stats[name]) for name in ("has_nan", "has_inf")}
    for name, layer in stats.get("layer_stats", {}).items():
        out |= {f"{_path(name)}/{what}": float(layer[what]) for what in ("norm", "mean", "std")}
    return out


def _path(name: str) -> str:
    return f"grad_layer/{name.replace('.', '/')}"
