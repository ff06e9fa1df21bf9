"""GRAD003: gradients die away on their way to the first layers, or altogether."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from trimtab.core.screen import LEAST_NORM, Bounds
from trimtab.core.types import Column, Finding, Kind, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class VanishingGradient:
    """Gradients die away on their way to the first layers, or altogether before anything was learned.

    ## What it sees
    By depth: the gradient of each weight matrix relative to the size of its weights. Where the first third of them has
    less than `ratio` of what the last third has, for `persist` looks, gradients vanish on the way. Parameters whose
    gradient is exactly zero or absent are left out: they are structural, and other rules speak of them. Or in time: the
    gradient norm has fallen below `ratio` of its first level while the loss is nearly where it began. Both are
    relative, so the scale of the loss does not matter.

    ## Why it matters
    The first layers stay as they were initialised and the rest makes do with random features. Deep stacks of sigmoid or
    tanh without normalisation, and saturated recurrent nets, do this without any error.

    ## What to try
    1. Use an initialisation made for the activation (Kaiming, Xavier, orthogonal).
    2. In a recurrent net use LSTM or GRU, a shorter truncation, a forget-gate bias of 1.
    """

    code: ClassVar[str] = "GRAD003"
    name: ClassVar[str] = "vanishing-gradient"
    needs: ClassVar[tuple[str, ...]] = ("grad_norm",)
    hold: ClassVar[int] = 20
    every: ClassVar[int] = 5
    severity: Severity = Severity.WARN
    ratio: float = 1e-4
    persist: int = 3
    min_elements: int = 64

    def silent_while(self, window: Window) -> Bounds | None:
        """No step with a larger norm than this, and no row so far behind another."""
        norm = window.level("grad_norm")
        least = self.ratio * norm.start
        return (
            {"grad_norm": (least, math.inf), LEAST_NORM: (50.0 * self.ratio * (1.0 + 1e-6), math.inf)}
            if norm.least > least
            else None
        )

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when the first layers get next to nothing, or everything does."""
        step = window.now.step
        if step < self.every * self.persist:
            return
        yield from self._in_time(window)
        yield from self._by_depth(window)

    def _in_time(self, window: Window) -> Iterator[Finding]:
        norm, loss = window.level("grad_norm"), window.level("loss")
        if not 0 < norm.now < self.ratio * norm.start or not loss.now > 0.7 * loss.start > 0:
            return
        yield found(
            self,
            window,
            f"the gradient norm has fallen from about {norm.start:.4g} in the first steps to {norm.now:.4g}, and the "
            f"loss is still about {loss.now:.4g} ({loss.start:.4g} in the first steps).",
            ("grad_norm",),
            grad_norm=norm.now,
            first=norm.start,
        )

    def _by_depth(self, window: Window) -> Iterator[Finding]:
        sample = window.now
        norms = sample.col(Kind.GRAD, Column.L2)
        real = norms[norms > 0]
        if (
            not real.size or real.max() * (50.0 * self.ratio) < real.min()
        ):  # cheap test first: nothing is that far apart
            return
        names = sample.names(Kind.GRAD)
        sizes = window.weights.usual(names)
        grads = window.gradients.usual(names)
        numel = np.array(sample.layout.numel[sample.layout.rows(Kind.GRAD)])
        if not sizes.size or not grads.size:
            return
        with np.errstate(all="ignore"):
            logs = np.log(norms.astype(np.float64)) - sizes
            usual = grads - sizes
            scale = sizes - 0.5 * np.log(numel)
        # A bias or a head that begins at zero is small beside its gradient: it says nothing about depth.
        fit = (numel >= self.min_elements) & (norms > 0) & np.isfinite(logs) & np.isfinite(usual)
        fit &= scale > np.median(scale[numel >= self.min_elements]) - 4.0 if fit.any() else False
        fit &= _leading(names, numel)
        rows = np.flatnonzero(fit)
        if rows.size < 4:
            return
        if "lr/1" in sample.scalars:  # several groups: their order is not that of the layers
            rows = np.array(sorted(rows, key=lambda i: _natural(names[i])))
        third = max(rows.size // 3, 1)
        gap = min(np.median(x[rows[-third:]]) - np.median(x[rows[:third]]) for x in (logs, usual))
        if gap < -math.log(self.ratio):
            return
        weakest = rows[np.argsort(usual[rows], kind="stable")[:4]]
        yield found(
            self,
            window,
            f"relative to their weights the first layers get {math.exp(-gap):.1e} of the gradient that the last ones "
            f"get; least {names[weakest[0]]}.",
            tuple(names[i] for i in weakest),
            ratio=math.exp(-gap),
        )


def _leading(names: Sequence[str], numel: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which tensors are among the large ones of their module: the bias before a normalisation gets only noise."""
    modules = [name.rpartition(".")[0] or name for name in names]
    largest: dict[str, int] = {}
    for module, num in zip(modules, numel, strict=True):
        largest[module] = max(largest.get(module, 0), int(num))
    return np.array([2 * num > largest[module] for module, num in zip(modules, numel, strict=True)], dtype=np.bool_)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sorts numbered layers by their number."""
    parts = name.split(".")
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
