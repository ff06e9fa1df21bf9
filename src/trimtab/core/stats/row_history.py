"""What is known of each row: its usual size, how long it had no gradient, and what the names of idle rows say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.core.types import F32, FROZEN


class RowRuns:
    """Per named row: steps in a row without a gradient, steps in a row with a zero one, how often it had a real one.

    A row that is frozen on purpose counts as neither.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.absent: NDArray[np.int64] = np.zeros(0, np.int64)
        self.zero: NDArray[np.int64] = np.zeros(0, np.int64)
        self.real: NDArray[np.int64] = np.zeros(0, np.int64)
        self.gaps: NDArray[np.int64] = np.zeros(0, np.int64)
        self.calm = True

    def push(self, names: tuple[str, ...], norms: F32) -> None:
        """Take in the norms of one step."""
        if names is not self.names and names != self.names:
            self._rename(names)
        if self.calm and norms.size and norms.min() > 0:
            self.real += 1  # the usual case: every row has a gradient, as before
            return
        absent, zero = (norms < 0) & (norms != FROZEN), norms == 0
        real = ~absent & ~zero & (norms != FROZEN)
        # A row that comes and goes (routed, alternating) is known by the number of times it came back.
        self.gaps += real & ((self.absent > 0) | (self.zero > 0))
        self.absent = np.where(absent, self.absent + 1, 0)
        self.zero = np.where(zero, self.zero + 1, 0)
        self.real += real
        self.calm = not (absent.any() or zero.any())

    def push_real(self, names: tuple[str, ...], num: int) -> None:
        """Take in steps in which every row had a gradient, as in the one before them."""
        if names is not self.names and names != self.names:
            self._rename(names)
        self.real += num

    def _rename(self, names: tuple[str, ...]) -> None:
        known = {n: i for i, n in enumerate(self.names)}
        places = [known.get(n, -1) for n in names]
        for field in ("absent", "zero", "real", "gaps"):
            old: NDArray[np.int64] = getattr(self, field)
            setattr(self, field, np.array([old[i] if i >= 0 else 0 for i in places], np.int64))
        self.names = names

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain data."""
        return {
            "names": list(self.names),
            **{f: [int(v) for v in getattr(self, f)] for f in ("absent", "zero", "real", "gaps")},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RowRuns:
        """The counts that `state_dict` described."""
        new = cls()
        new.names = tuple(state["names"])
        for field in ("absent", "zero", "real", "gaps"):
            setattr(new, field, np.array(state[field], np.int64))
        new.calm = not (new.absent.any() or new.zero.any())
        return new


def _twins(names: tuple[str, ...], sizes: NDArray[np.float64]) -> list[list[list[int]]]:
    """Modules that differ by one number in their name alone: for each kind the rows of each of them.

    A module has a twin where another one has the same parameters, by name and size, under another number. Of a name
    with several numbers (`blocks.1.heads.0.weight`) each may be the one that counts.
    """
    units: dict[tuple[str, str], list[int]] = {}
    for i, name in enumerate(names):
        parts = name.split(".")
        for at, part in enumerate(parts):
            if part.isdigit():
                units.setdefault((".".join(parts[:at]), part), []).append(i)
    kinds: dict[tuple[str, frozenset[tuple[str, float]]], list[list[int]]] = {}
    for (before, part), rows in units.items():
        start = len(before) + len(part) + bool(before)
        kinds.setdefault((before, frozenset((names[i][start:], sizes[i]) for i in rows)), []).append(rows)
    return [found for found in kinds.values() if len(found) > 1]


def routed(names: tuple[str, ...], sizes: NDArray[np.float64], alive: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which rows belong to a numbered module that has a twin with gradients: an expert that was not chosen."""
    out = np.zeros(len(names), np.bool_)
    for units in _twins(names, sizes):
        if any(alive[rows].all() for rows in units):
            for rows in units:
                out[rows] = True
    return out


def relieved(runs: RowRuns, sizes: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which rows belong to a numbered module that a twin took over from: stages, heads used one after the other.

    All the time since the twin's first gradient fits into the time that this one has had none.
    """
    out = np.zeros(len(runs.names), np.bool_)
    for units in _twins(runs.names, sizes):
        born = [
            int((runs.real + runs.absent + runs.zero)[rows].max()) if runs.real[rows].all() else 0 for rows in units
        ]
        idle = [int(np.maximum(runs.absent, runs.zero)[rows].min()) for rows in units]
        for k, rows in enumerate(units):
            out[rows] |= any(0 < born[j] <= idle[k] for j in range(len(units)) if j != k)
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


DECAY = 0.8
TINY = 1e-30


class RowBaseline:
    """A running mean of log L2 per named row. Absent and non-finite norms leave it as it was."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._log: NDArray[np.float64] = np.empty(0)
        self._has_unknown = False

    def push(self, names: tuple[str, ...], norms: F32) -> None:
        """Take in the norms of one step; rows may come and go between steps."""
        if names is not self._names and names != self._names:
            self._rename(names)
        if norms.size and norms.min() > 0 and norms.max() < np.inf and not self._has_unknown:
            # The usual case, every step: all rows present and finite. A NaN fails both comparisons.
            self._log += (1.0 - DECAY) * (np.log(norms) - self._log)
            return
        usable = np.isfinite(norms) & (norms >= 0)
        logs = np.log(np.maximum(np.where(usable, norms, 1.0), TINY))
        fresh = np.isnan(self._log)
        blended = DECAY * self._log + (1.0 - DECAY) * logs
        self._log = np.where(usable, np.where(fresh, logs, blended), self._log)
        self._has_unknown = bool(np.isnan(self._log).any())

    def growth(self, names: tuple[str, ...], norms: F32) -> NDArray[np.float64]:
        """How many times its usual norm each row has; 1 where nothing is known, inf for a non-finite norm."""
        if names != self._names:
            return np.ones(len(names))
        finite = np.isfinite(norms)
        logs = np.log(np.maximum(np.where(finite & (norms >= 0), norms, 1.0), TINY))
        grown = np.where(np.isnan(self._log) | (norms < 0), 1.0, np.exp(np.clip(logs - self._log, -300, 300)))
        return np.where(finite, grown, np.inf)

    def usual(self, names: tuple[str, ...]) -> NDArray[np.float64]:
        """The usual log norm of some rows, which must begin the known ones; empty where they are not known."""
        if self._names[: len(names)] != names:
            return np.empty(0)
        return self._log[: len(names)]

    def _rename(self, names: tuple[str, ...]) -> None:
        known = dict(zip(self._names, self._log, strict=True))
        self._log = np.array([known.get(n, np.nan) for n in names], dtype=np.float64)
        self._names = names
        self._has_unknown = True

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain data."""
        return {"names": list(self._names), "log": [None if np.isnan(v) else float(v) for v in self._log]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RowBaseline:
        """The baseline that `state_dict` described."""
        new = cls()
        names: Sequence[str] = state["names"]
        new._names = tuple(names)
        new._log = np.array([np.nan if v is None else v for v in state["log"]], dtype=np.float64)
        new._has_unknown = bool(np.isnan(new._log).any())
        return new
