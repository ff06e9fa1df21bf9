"""OPT001: the learning rate is 0, far too low or far too high."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe
from trimtab.torchutil.optimizers import groups_of

SMALL, TINY = 1e-7, 1e-7
"""Below this rate, and this part of a weight, a step is next to nothing in float32."""
HIGH, RISEN = 10.0, 1.5
"""How far above its start the loss of one batch may go: by chance, and with steps as large as the weights."""
FAR = 10.0
"""A step of this many times the size of the weights overwrites them."""


class LearningRate:
    """The learning rate is 0, far too low or far too high.

    ## What it means
    At 0 nothing moves; far too high, each step overwrites what the model has learned.

    ## How it is checked
    By what the steps do: on one batch, with one seed, the loss must fall under the training's own optimizer. Where it
    rises and falls again at a hundredth of the rate, the rate is too high; where nothing moves and the rate is 0 or
    next to it, and no schedule will raise it, it is too low.

    ## What to try
    1. `trimtab tune lr module:function` measures a rate for this very training.
    2. 1e-3 for Adam, 1e-4 to 5e-5 for fine-tuning, 0.1 for SGD are usual.
    """

    code: ClassVar[str] = "OPT001"
    name: ClassVar[str] = "learning-rate"
    title: ClassVar[str] = "the learning rate lets the loss fall"
    causes: ClassVar[tuple[str, ...]] = ("weights-unchanged", "not-learning", "nonfinite-weight", "initial-loss")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report rates that move nothing or too much."""
        peaks = [r for rates in probe.peak_rates for r in rates]
        settings = _settings(probe)
        used = [r for e in probe.events("step") for r in e.facts["rates"]]  # a loop may set them itself
        bad = [r for r in peaks if not math.isfinite(r) or r < 0]
        if bad:
            yield self._wrong(f"the learning rate is {bad[0]}.", settings, bad[0])
        elif not peaks:
            yield not_applicable(self, "the optimizer has no learning rate")
        elif idle := _idle_groups(probe):
            yield self._wrong("a group that gets gradients has a learning rate of 0.", f"{settings}; {idle}", 0.0)
        elif max([*peaks, *used]) == 0 or _stays_zero(probe):
            yield self._wrong(
                "every learning rate is 0, and no schedule is stepped that would raise it.", settings, 0.0
            )
        elif probe.no_experiments:
            high = max(peaks) > 1.0 and any("betas" in g for g in groups_of(*probe.optimizers))
            if high:
                yield self._wrong(
                    f"a learning rate of {max(peaks):.3g} moves every weight by as much.", settings, max(peaks)
                )
            else:
                yield passed(self, settings)
        else:
            yield from self._by_effect(probe, settings, max([*peaks, *(r for r in used if math.isfinite(r))]))

    def _by_effect(self, probe: Probe, settings: str, top: float) -> Iterator[Line]:
        ratios = [e.facts["update_ratio"] for c in (*probe.calls, *probe.fixed) for e in c.of("step")]
        largest = max((v for v in ratios if math.isfinite(v)), default=0.0)
        here = probe.overfit()
        if largest > FAR:
            evidence = f"{settings}; one step moves the weights by {largest:.3g} times their own size"
            cause = f"a learning rate of {top:.3g} is too high: one step overwrites the weights."
            yield self._wrong(cause, evidence, top)
            return
        if here is None or len(probe.optimizers) > 1:
            yield passed(self, settings)
            return
        if here.peak > HIGH or (here.peak > RISEN and here.largest_ratio > 1.0):
            slower = probe.overfit(0.01)
            if slower is not None and slower.fell and slower.peak < RISEN:
                evidence = (
                    f"{settings}; on one batch the loss went from {here.first:.4g} to {here.peak * here.first:.4g}, "
                    f"at a hundredth of the rate down to {slower.last:.4g}; "
                    f"a step moves the weights by {here.largest_ratio:.0%}"
                )
                yield self._wrong(f"a learning rate of {top:.3g} is too high: the loss jumps up.", evidence, top)
                return
        faster = probe.overfit(1e-3 / top) if top < SMALL else None
        if faster is not None and faster.fell and (not here.fell or here.median_ratio < TINY):
            evidence = f"{settings}; a step moves weights by {here.median_ratio:.1e} of their size"
            yield self._wrong(f"a learning rate of {top:.3g} is too low to learn anything.", evidence, top)
            return
        yield passed(self, settings)

    def _wrong(self, cause: str, evidence: str, rate: float) -> Line:
        return failed(self, cause, evidence, "trimtab tune lr module:function  # then lr=...", ("lr",), lr=rate)


def _settings(probe: Probe) -> str:
    """The learning rate of every group, and its peak where a schedule raises it."""
    parts = []
    for optimizer, peaks in zip(probe.optimizers, probe.peak_rates, strict=True):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            rate = float(group.get("lr", math.nan))
            up = f" (up to {peak:.3g})" if peak > rate * 1.001 else ""
            parts.append(f"{type(optimizer).__name__} lr {rate:.3g}{up}")
    return ", ".join(dict.fromkeys(parts))


def _stays_zero(probe: Probe) -> bool:
    """A warm-up from 0 that the step never moves, or a loop that sets it to 0 again before each step."""
    steps = probe.events("step")
    rates = [r for e in steps for r in e.facts["rates"]]
    again = len(steps) >= 3 or not probe.events("schedule")
    return not probe.doctor_steps and bool(rates) and max(rates) == 0 and again


def _idle_groups(probe: Probe) -> str:
    """Groups at 0 beside others that are not, though their parameters have gradients."""
    given = {k for e in probe.events("step") for k, v in e.facts["gradients"].present.items() if v > 0}
    for optimizer, peaks in zip(probe.optimizers, probe.peak_rates, strict=True):
        for i, (group, peak) in enumerate(zip(optimizer.param_groups, peaks, strict=True)):
            moved = any(e.facts["rates"][i : i + 1] > (0.0,) for e in probe.events("step") if e.who == id(optimizer))
            if peak == 0 and max(peaks) > 0 and not moved and any(id(p) in given for p in group["params"]):
                return f"group {i} with {len(group['params'])} parameters is at 0"
    return ""
