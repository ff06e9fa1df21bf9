"""What the names of idle parameters say: experts that were not chosen, or everything in front of a cut."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def routed(names: tuple[str, ...], sizes: NDArray[np.float64], alive: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which rows belong to a numbered module that has a twin with gradients: an expert that was not chosen.

    Twins have the same parameters, by name and size, under another number.
    """
    units: dict[tuple[str, str], list[int]] = {}
    for i, name in enumerate(names):
        parts = name.split(".")
        at = next((k for k, part in enumerate(parts) if part.isdigit()), None)
        if at is not None:
            units.setdefault((".".join(parts[:at]), parts[at]), []).append(i)

    def looks(rows: list[int], start: int) -> frozenset[tuple[str, float]]:
        return frozenset((names[i][start:], sizes[i]) for i in rows)

    shapes = {key: (key[0], looks(rows, len(".".join(key)))) for key, rows in units.items()}
    busy = {shapes[key] for key, rows in units.items() if alive[rows].all()}
    out = np.zeros(len(names), np.bool_)
    for key, rows in units.items():
        out[rows] = shapes[key] in busy
    return out


def is_trunk(names: tuple[str, ...], stuck: NDArray[np.bool_], present: NDArray[np.bool_]) -> bool:
    """Whether everything in front of some layer is cut off: of the whole model, or of each of its towers."""
    if not present.any():
        return False
    if np.flatnonzero(stuck).max() < np.flatnonzero(present).min():
        return True
    towers: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        towers.setdefault(name.partition(".")[0], []).append(i)
    deep = [rows for rows in towers.values() if len(rows) >= 4]
    return len(deep) > 1 and all(
        stuck[rows[0]] and present[rows[-1]] and np.flatnonzero(stuck[rows]).max() < np.flatnonzero(present[rows]).min()
        for rows in deep
    )
