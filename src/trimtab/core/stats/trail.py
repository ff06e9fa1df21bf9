"""The scalars of the last steps, and the step at which a change in them began."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.core.schedule import JUMP, rates_of
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


HORIZON = 96
"""How far back the onset is looked for; what lies before is what "usual" is learned from."""
MIN_QUIET = 8
SLACK, CAP = 2.5, 6.0
LOG_FLOOR = 0.15
"""The least spread of logarithms that is believed."""
RATES = math.log(JUMP) / SLACK
"""A rate counts from a jump above the usual one on. Below that it may be meant, and where it is not the loss tells."""
LEVEL = 9


def onset_of(trail: Trail, at: int) -> int:
    """The first step of the trouble that was found at step `at`; `at` itself where nothing was unusual before it.

    Every step gets a score: by how many robust deviations its most unusual quantity lies above what is usual (the loss
    above its best level, gradients and updates above their quiet past, the rate above the one used so far). The onset
    is where the sum of the scores from there to the alarm, each less a slack, is largest: the maximum-likelihood change
    point of a CUSUM. Deterministic in the trail.
    """
    trail_steps = trail.steps
    num = int(np.searchsorted(trail_steps, at, side="right"))
    if num < 2 * MIN_QUIET:
        return at
    quiet = max(num - HORIZON, num // 2)
    with np.errstate(all="ignore"):
        scores = _scores(trail, num, quiet)
    gains = np.minimum(scores, CAP) - SLACK
    gains[-1] = max(gains[-1], CAP - SLACK)  # the alarm itself
    sums = np.cumsum(gains[::-1])[::-1]
    first = int(np.flatnonzero(sums >= sums.max() - 1e-9)[-1])
    return int(trail_steps[quiet + first])


def _scores(trail: Trail, num: int, quiet: int) -> F64:
    """One number for each step from `quiet` on."""
    parts = [
        _climb(trail.scalar("loss")[:num])[quiet:],
        _above(trail.scalar("grad_norm")[:num, None], quiet)[quiet:],
        _above(_by_rate(trail, num)[:, None], quiet)[quiet:],
        _raised(trail.scalar("lr")[:num], quiet)[quiet:],
    ]
    rows = trail.rows()[:num]
    if rows.shape[1]:
        parts.append(_calibrated(_above(rows, quiet), quiet)[quiet:])
    clean = np.stack([np.nan_to_num(p, nan=-CAP, posinf=CAP, neginf=-CAP) for p in parts])
    scores: F64 = clean.max(axis=0)
    return scores


def _by_rate(trail: Trail, num: int) -> F64:
    """The size of updates per rate: that they grow with the rate is no news besides the rate."""
    ratios, rates = trail.scalar("update_ratio")[:num], trail.scalar("lr")[:num]
    return ratios - np.where(np.isfinite(rates), rates, 0.0)


def _above(values: F64, quiet: int) -> F64:
    """How far the most unusual column of each step lies above its quiet past, in robust deviations."""
    past = np.where(np.isfinite(values[:quiet]), values[:quiet], np.nan)
    known = np.isfinite(past).sum(axis=0) >= MIN_QUIET
    if not known.any():
        return np.full(len(values), np.nan)
    past = past[:, known]
    centre = np.nanmedian(past, axis=0)
    spread = np.maximum(1.4826 * np.nanmedian(np.abs(past - centre), axis=0), LOG_FLOOR)
    z = (values[:, known] - centre) / spread
    most: F64 = np.where(np.isnan(z), -np.inf, z).max(axis=1)
    return most


def _calibrated(scores: F64, quiet: int) -> F64:
    """The largest of many columns is large by chance: it is judged by what it usually is."""
    past = scores[:quiet][np.isfinite(scores[:quiet])]
    if past.size < MIN_QUIET:
        return np.full(len(scores), np.nan)
    centre = float(np.median(past))
    return (scores - centre) / max(1.4826 * float(np.median(np.abs(past - centre))), 1.0)


def _raised(rates: F64, quiet: int) -> F64:
    """The rate against the high end of those used before: the middle of a warm-up is no reference."""
    past = rates[:quiet][np.isfinite(rates[:quiet])]
    return (rates - np.quantile(past, 0.9)) / RATES if past.size >= MIN_QUIET else np.full(len(rates), np.nan)


def _climb(losses: F64) -> F64:
    """How far each loss lies above the best level before it, in units of the noise around that level."""
    out = np.full(len(losses), np.nan)
    known = np.flatnonzero(np.isfinite(losses))
    if known.size < 2 * LEVEL:
        return np.where(np.isposinf(losses), np.inf, out)
    values = losses[known]
    windows = np.lib.stride_tricks.sliding_window_view(values, LEVEL)
    levels = np.median(windows, axis=1)  # levels[i] is that of values[i : i + LEVEL]
    best = np.minimum.accumulate(levels)
    off = np.abs(values[LEVEL:] - levels[:-1])
    # The noise of a calm stretch: the lower quartile of what it was, so that a climb does not hide in its own noise.
    spreads = 1.25 * np.array(
        [off[: i + 1].mean() if i < LEVEL else off[i - LEVEL : i + 1].mean() for i in range(off.size)]
    )
    noise = np.array([np.quantile(spreads[max(0, i - 64) : i + 1], 0.25) for i in range(off.size)])
    floor = 1e-2 * np.abs(best[:-1]) + 1e-6
    out[known[LEVEL:]] = (values[LEVEL:] - best[:-1]) / np.maximum(2.0 * noise, floor)
    return np.where(np.isposinf(losses), np.inf, out)
