"""The last steps of a run, one row of logarithms each: what the onset of trouble is looked for in."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.core.schedule import rates_of
from trimtab.core.types import F32, Column, Kind, Sample

SIZE = 224
MAX_ROWS = 64
SCALARS = ("loss", "grad_norm", "update_ratio", "lr", "norm_high", "update_high")
"""The last two are the largest finite value of the whole run up to each step."""
NUM_BEFORE_HIGHS = 4
"""How many of them states had that were saved before the last two were kept."""
F16 = NDArray[np.float16]
F64 = NDArray[np.float64]


class Trail:
    """At most `SIZE` steps by at most `MAX_ROWS` gradient norms and a few scalars, in 16 bits.

    Sixteen bits because it is part of every saved state of the detectors; a logarithm needs no more. NaN stands for
    what was not measured, infinity for what was not finite.

    Example:
        >>> import numpy as np
        >>> from trimtab.core.types import Layout, Sample
        >>> trail, layout = Trail(), Layout(names=(), kinds=(), numel=())
        >>> for step in range(3):
        ...     trail.push(Sample(step=step, layout=layout, table=np.zeros((0, 7), np.float32), scalars={"loss": 1.0}))
        >>> trail.cut(2)
        >>> trail.steps.tolist()
        [0, 1]
    """

    def __init__(self) -> None:
        self._steps = np.zeros(SIZE, np.int64)
        self._values: F16 = np.full((SIZE, len(SCALARS) + MAX_ROWS), np.nan, np.float16)
        self._num = 0
        self._names: tuple[str, ...] | None = None
        self._num_names = 0
        self._norm_high = self._update_high = math.nan  # logarithms, as all here

    def __len__(self) -> int:
        return self._num

    @property
    def steps(self) -> NDArray[np.int64]:
        """Which steps they are, oldest first; after a rewind some are missing."""
        return self._steps[: self._num]

    def scalar(self, name: str) -> F64:
        """One of `SCALARS` over the steps: logarithms, but of the loss its inverse hyperbolic sine."""
        return self._values[: self._num, SCALARS.index(name)].astype(np.float64)

    def rows(self) -> F64:
        """Logarithms of the gradient norms, [steps, rows]; neighbours are taken together in models of many tensors."""
        return self._values[: self._num, len(SCALARS) : len(SCALARS) + _groups(self._num_names)].astype(np.float64)

    def push(self, sample: Sample) -> None:
        """Take in a training step."""
        if sample.phase != "train":
            return
        if self._num == SIZE:
            some = 32  # moving some at a time is cheaper than moving all in every step
            self._steps[:-some], self._values[:-some] = self._steps[some:].copy(), self._values[some:].copy()
            self._num -= some
        at = self._num
        self._num += 1
        scalars = sample.scalars
        self._steps[at] = sample.step
        line = self._values[at]
        line[:] = np.nan
        line[0] = _soft(scalars.get("loss"))
        line[1], line[2] = _log(scalars.get("grad_norm")), _log(scalars.get("update_ratio"))
        line[3] = _log(max(rates_of(scalars), default=None) if "lr/0" in scalars else None)
        self._norm_high = line[4] = _higher(self._norm_high, float(line[1]))
        self._update_high = line[5] = _higher(self._update_high, float(line[2]))
        if sample.has(Kind.GRAD, Column.L2):
            self._name(sample.names(Kind.GRAD))
            norms = _grouped(sample.col(Kind.GRAD, Column.L2))
            line[len(SCALARS) : len(SCALARS) + norms.size] = norms

    def largest_update(self, since: int) -> float:
        """The largest change of the weights by one step, relative to their size; 0 where none is known."""
        updates = self.scalar("update_ratio")[np.searchsorted(self.steps, since) :]
        finite = updates[np.isfinite(updates)]
        return float(np.exp(finite.max())) if finite.size else 0.0

    def cut(self, before: int) -> None:
        """Forget the steps from `before` on: they were taken back."""
        self._num = int(np.searchsorted(self.steps, before))
        self._recall_highs()

    def _recall_highs(self) -> None:
        if self._num:
            self._norm_high, self._update_high = (float(v) for v in self._values[self._num - 1, 4:6])

    def _name(self, names: tuple[str, ...]) -> None:
        if names is self._names:
            return
        if self._num_names and (len(names) != self._num_names or self._names not in (None, names)):
            self._values[: self._num - 1, len(SCALARS) :] = np.nan  # other tensors: nothing is known of them
        self._names, self._num_names = names, len(names)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain data."""
        used = len(SCALARS) + _groups(self._num_names)
        # Column by column, high and low bytes apart: that is how neighbours are alike.
        kept = np.ascontiguousarray(self._values[: self._num, :used].T, "<f2").view(np.uint8).reshape(-1, 2).T
        first = int(self.steps[0]) if self._num else 0
        jumps = np.flatnonzero(np.diff(self.steps) != 1) + 1
        return {
            "num": self._num,
            "from": [[0, first], *([int(i), int(self.steps[i])] for i in jumps)],
            "num_names": self._num_names,
            "num_scalars": len(SCALARS),
            "values": base64.b85encode(zlib.compress(kept.tobytes(), 9)).decode("ascii"),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Trail:
        """The trail that `state_dict` described."""
        new = cls()
        new._num, new._num_names = int(state["num"]), int(state["num_names"])
        if not 0 <= new._num <= SIZE or new._num_names < 0 or not all(0 <= at <= new._num for at, _ in state["from"]):
            raise ValueError(f"a trail of {new._num} steps and {new._num_names} tensors; it has at most {SIZE} steps")
        for place, step in state["from"]:
            new._steps[place : new._num] = np.arange(step, step + new._num - place)
        num_scalars = int(state.get("num_scalars", NUM_BEFORE_HIGHS))
        if not 0 <= num_scalars <= len(SCALARS):
            raise ValueError(f"a trail of {num_scalars} numbers per step; it has at most {len(SCALARS)}")
        used = num_scalars + _groups(new._num_names)
        # No more than fits is unpacked: a few bytes of a damaged or foreign state could be made to fill any memory.
        plain = zlib.decompressobj().decompress(base64.b85decode(state["values"]), 2 * used * new._num + 1)
        raw = np.frombuffer(plain, np.uint8)
        kept = np.ascontiguousarray(raw.reshape(2, -1).T).view("<f2").reshape(used, new._num)
        new._values[: new._num, :num_scalars] = kept.T[:, :num_scalars]
        new._values[: new._num, len(SCALARS) : len(SCALARS) + used - num_scalars] = kept.T[:, num_scalars:]
        new._recall_highs()
        return new


def _groups(num_names: int) -> int:
    return min(num_names, MAX_ROWS)


def _grouped(norms: F32) -> F32:
    """Logarithms of the norms, of neighbours together where there are too many; NaN where none was measured."""
    wide = norms.astype(np.float64)
    missing = wide < 0  # absent and frozen ones are marked so
    squares = np.where(missing, 0.0, np.where(np.isfinite(wide), wide, np.inf) ** 2)
    if norms.size > MAX_ROWS:
        starts = np.linspace(0, norms.size, MAX_ROWS, endpoint=False).astype(np.int64)
        squares, missing = np.add.reduceat(squares, starts), np.logical_and.reduceat(missing, starts)
    with np.errstate(divide="ignore"):
        logs = np.where(missing | (squares == 0), np.nan, 0.5 * np.log(squares))
    return logs.astype(np.float32)


def _higher(high: float, value: float) -> float:
    if not math.isfinite(value):
        return high
    return value if math.isnan(high) else max(high, value)


def _log(value: float | None) -> float:
    if value is None or value <= 0:
        return math.nan
    return math.log(value) if math.isfinite(value) else math.inf


def _soft(value: float | None) -> float:
    if value is None:
        return math.nan
    return math.asinh(value) if math.isfinite(value) else math.inf
