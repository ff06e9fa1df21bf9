"""UPD002: steps are made, and the weights do not change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe
from trimtab.torchutil.optimizers import params_of


class WeightsUnchanged:
    """Steps are made, and the weights do not change.

    ## What it means
    The optimizer is never stepped, steps on nothing, something puts the old weights back, or updates are lost to
    rounding.

    ## How it is checked
    Weights are compared exactly before and after each call; what the optimizer holds must move where there is a
    gradient and a learning rate. A rate that a schedule is about to raise counts as raised.

    ## What to try
    1. Call `optimizer.step()` after `loss.backward()`.
    2. Look for code that loads or copies weights back after the step.
    3. Keep float32 master weights: in bfloat16 an update below 1/256 of a weight is rounded away.
    """

    code: ClassVar[str] = "UPD002"
    name: ClassVar[str] = "weights-unchanged"
    title: ClassVar[str] = "steps move the weights"
    causes: ClassVar[tuple[str, ...]] = ("not-learning", "ema-not-moving")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report weights that do not change."""
        if not probe.through:
            yield not_applicable(self, probe.no_steps or "no step was made")
            return
        if not probe.num_steps:
            if probe.doctor_steps:
                yield not_applicable(self, "there was no loss to step on")
                return
            yield failed(
                self,
                "backward() is called, but no optimizer is ever stepped.",
                f"{len(probe.events('backward'))} backward passes and 0 optimizer steps in {len(probe.calls)} calls",
                "optimizer.step()  # after loss.backward()",
                ("optimizer",),
            )
            return
        idle = _never_stepped(probe)
        if idle:
            yield failed(
                self,
                "an optimizer is never stepped, though its parameters get gradients.",
                f"{idle}; others made {probe.num_steps} steps",
                "optimizer.step()  # of each optimizer",
                ("optimizer",),
            )
            return
        given = {key for e in probe.events("step") for key, norm in e.facts["gradients"].present.items() if norm > 0}
        calls = probe.through
        if not any(r > 0 for e in probe.events("step") for r in e.facts["rates"]) and not probe.too_slow:
            calls = probe.varied  # a warm-up that begins at 0
        moved = {key for c in calls for key, (by, _) in c.changes.items() if by > 0}
        live = [key for key in given if key in probe.names]
        rate = max((r for c in calls for rates in c.rates.values() for r in rates), default=0.0)
        stepped = [e for e in probe.events("step") if e.facts["moved"]]
        if live and not any(key in moved for key in live) and rate > 0:
            back = bool(stepped)
            yield failed(
                self,
                "the step moves the weights, and something puts the old ones back."
                if back
                else "optimizer steps are made, and no weight changes.",
                f"{len(live)} parameters with gradients, learning rate {rate:.3g}, 0 changed in {len(calls)} calls",
                "# look for load_state_dict, copy_ or .data = after optimizer.step()"
                if back
                else "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)",
                tuple(probe.names[k] for k in live[:8]),
            )
        elif not live:
            yield not_applicable(self, "no parameter had a gradient at its step")
        elif not moved and stepped:  # a recording has the size of each step, but not the change from call to call
            ratios = sorted(e.facts["update_ratio"] for e in stepped)
            typical = ratios[len(ratios) // 2]
            evidence = (
                f"{len(stepped)} of {probe.num_steps} steps moved the weights, typically by {typical:.1e} of their size"
            )
            yield passed(self, evidence, update_ratio=typical)
        elif not moved:
            yield not_applicable(self, "the change of the weights was not measured")
        else:
            ratios = sorted(by / size for c in calls for key, (by, size) in c.changes.items() if by > 0 and size > 0)
            typical = ratios[len(ratios) // 2] if ratios else 0.0
            yield passed(
                self,
                f"{sum(key in moved for key in live)} of {len(live)} moved, typically by {typical:.1e} of their size",
                update_ratio=typical,
            )


def _never_stepped(probe: Probe) -> str:
    """An optimizer of the target that no call steps, though some backward pass gave it gradients."""
    if probe.doctor_steps or probe.failure is not None:
        return ""
    stepped = {e.who for e in (*probe.events("step"), *probe.events("scaler-step"))}
    reached = {key for c in probe.calls for key in c.reached}
    for one in probe.target.optimizers:
        mine = params_of(one)
        if id(one) in stepped or not any(id(p) in reached for p in mine) or len(probe.target.optimizers) < 2:
            continue
        later = () if probe.too_slow else probe.varied
        if not any(e.who == id(one) for c in later for e in (*c.of("step"), *c.of("scaler-step"))):
            return f"{type(one).__name__} with {len(mine)} parameters: 0 steps in {len(probe.calls) + len(later)} calls"
    return ""
