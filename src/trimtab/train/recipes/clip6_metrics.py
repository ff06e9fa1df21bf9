"""One JSON object a line, as an experiment logger would get it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from trimtab.core.errors import InputError


class MetricsFile:
    """Has the `.log(values, step=)` that a guard sends its numbers to: `loss`, `lr`, `grad/*`, `val/*` by step.

    What JSON has not (NaN, Inf) is null.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "metrics.jsonl"
        ...     MetricsFile(path).log({"grad/global_norm": 0.5, "loss": math.nan}, step=3)
        ...     path.read_text()
        '{"step": 3, "grad/global_norm": 0.5, "loss": null}\\n'
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("", encoding="utf-8")
        except OSError as error:
            raise InputError(f"the metrics file {path} cannot be written: {error}; give another path") from None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append one line."""
        plain = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **plain}) + "\n")
