"""UPD003: the same gradients are stepped on twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from trimtab.doctor.checklist import Line, failed, not_applicable, passed, warned
from trimtab.doctor.probe import Probe
from trimtab.doctor.recording import Call


class DoubleStep:
    """The same gradients are stepped on twice.

    ## What it means
    Each update is made twice: the true learning rate is double the one that is written, and Adam's moments are wrong.

    ## How it is checked
    Between two steps of one optimizer there must be a backward pass that it gets gradients from. Two optimizers that
    hold the same parameters and step on the same pass count as well. Of a loss with given targets, whether one call
    steps on the same inputs several times.

    ## What to try
    1. Call `optimizer.step()` once. A trainer, a scaler (`scaler.step(optimizer)`) or a callback may already do it.
    """

    code: ClassVar[str] = "UPD003"
    name: ClassVar[str] = "double-step"
    title: ClassVar[str] = "one step per gradient"
    causes: ClassVar[tuple[str, ...]] = ("learning-rate", "not-learning", "weights-unchanged")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report steps without a backward pass of their own."""
        steps = probe.events("step")
        if not steps:
            yield not_applicable(self, probe.no_steps)
            return
        again = [
            e
            for e in steps
            if not e.facts["fresh"] and e.facts["again"] and e.facts["gradients"].present and not e.facts["closure"]
        ]
        both = self._by_two(probe)
        if again:
            yield failed(
                self,
                "the optimizer is stepped again without a new backward pass.",
                f"{len(again)} of {len(steps)} steps used the gradients of the step before",
                "optimizer.step()  # once per backward()",
                ("optimizer",),
                num=float(len(again)),
            )
        elif both:
            yield failed(
                self,
                "two optimizers step the same parameters on the same backward pass.",
                f"{both} parameters are moved twice",
                "optimizer_b = torch.optim.Adam(p for p in model.parameters() if p not in those_of_a)",
                ("optimizer",),
            )
        elif times := _on_one_batch(probe):
            yield warned(
                self,
                f"each batch is stepped on {times} times.",
                f"in one call the model was given the same inputs {times} times, with a step after each",
                "one forward, backward and step per batch; a lower learning rate needs more epochs instead",
                ("optimizer",),
                num=float(times),
            )
        else:
            yield passed(self, f"{len(steps)} steps, each on a backward pass of its own")

    @staticmethod
    def _by_two(probe: Probe) -> int:
        num = 0
        for call in probe.calls:
            since: dict[int, set[int]] = {}
            for event in call.events:
                if event.kind == "backward":
                    since.clear()
                elif event.kind == "step":
                    keys = {k for k, v in event.facts["gradients"].present.items() if v > 0}
                    for who, others in since.items():
                        if who != event.who:
                            num = max(num, len(keys & others))
                    since[event.who] = keys
        return num


def _on_one_batch(probe: Probe) -> int:
    """How often every call steps on the very same inputs; 0 where they change, or where that is the method."""
    if probe.facts.kind not in ("nll", "bce", "bce-logits", "mse", "l1") or probe.facts.reduction != "mean":
        return 0
    return min((_steps_on_same(call) for call in probe.through), default=0)


def _steps_on_same(call: Call) -> int:
    steps, forwards = call.of("step"), [e for e in call.of("forward") if e.facts["grad"]]
    whose = {e.who for e in steps}
    inputs = call.inputs
    alike = len(inputs) == len(forwards) and all(torch.equal(inputs[0], x) for x in inputs[1:])
    one = len(whose) == 1 and len({e.who for e in forwards}) == 1 and not any(e.facts["closure"] for e in steps)
    return len(steps) if one and alike and len(steps) == len(forwards) > 1 else 0
