"""Where NaN or Inf came from, as the guard stored it beside the record: read without torch, and without trust."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from trimtab.core.files import open_regular
from trimtab.core.printable import printable
from trimtab.trace.origin import Origin

FOLDER, FILE = "incidents", "incident.json"
MAX_TRACES = 50
_MAX_BYTES = 4 << 20
_TEXTS = ("cause", "op", "phase", "module", "file", "code", "function", "subject", "why", "remedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one incident folder says: the step, the origin, and the folder to give to `trimtab trace`."""

    step: int
    origin: Origin
    folder: Path

    @property
    def line(self) -> str:
        """The source line as people write it: `train.py:37`; empty where it is not known."""
        return f"{Path(self.origin.file).name}:{self.origin.line}" if self.origin.file else ""


def read_traces(run_folder: Path | str) -> tuple[Trace, ...]:
    """Every stored trace of a run that can be read, by step; one that is damaged is left out."""
    parent = Path(run_folder) / FOLDER
    try:
        names = sorted(name for name in os.listdir(parent) if not name.startswith("."))
    except OSError:
        return ()
    found = [trace for name in names[:MAX_TRACES] if (trace := _read(parent / name)) is not None]
    return tuple(sorted(found, key=lambda t: t.step))


def _read(folder: Path) -> Trace | None:
    try:
        with open_regular(folder / FILE) as file:
            raw = file.read(_MAX_BYTES + 1)
        data = json.loads(raw) if len(raw) <= _MAX_BYTES else None
        step, origin = data["step"], Origin.from_json(_checked(data["origin"]))  # type: ignore[index]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return Trace(step=step, origin=origin, folder=folder) if type(step) is int and step >= 0 else None


def _checked(origin: dict[str, object]) -> dict[str, object]:
    """The fields that are shown, each of its type; TypeError where one is not."""
    kept: dict[str, object] = {"cause": "unknown", "phase": "forward"}
    for name in _TEXTS:
        if not isinstance(text := origin.get(name, kept.get(name, "")), str):
            raise TypeError(f"{name} is a {type(text).__name__}")
        kept[name] = printable(text, one_line=True)
    for name in ("line", "micro_batch", "rank", "since"):
        if type(number := origin.get(name)) is int:
            kept[name] = number
    samples = origin.get("samples", [])
    if not isinstance(samples, list) or not all(type(one) is int for one in samples):
        raise TypeError("samples are not whole numbers")
    return {**kept, "samples": samples}
