"""WIRE002: the loss has no connection to the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class LossDetached:
    """The loss has no connection to the weights.

    ## What it means
    Somewhere between model and loss the graph was cut: `.detach()`, `.item()`, `.data`, numpy, or a new tensor made of
    the value. There is nothing to learn from.

    ## How it is checked
    The graph of the loss is followed to its ends: at least one parameter of the model must be among them.

    ## What to try
    1. Pass the model's output itself to the loss; log `loss.item()` beside it, not in its place.
    2. Do not wrap a value in `torch.tensor(...)`: that makes a new tensor without a graph.
    """

    code: ClassVar[str] = "WIRE002"
    name: ClassVar[str] = "loss-detached"
    title: ClassVar[str] = "the loss leads back to the weights"
    causes: ClassVar[tuple[str, ...]] = (
        "missing-gradient",
        "zero-gradient",
        "weights-unchanged",
        "loss-ignores-input",
        "not-learning",
        "gradcheck",
        "step-exception",
        "optimizer-misses-parameters",
    )

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report losses that are not connected to the weights."""
        if not probe.trainable:
            yield not_applicable(self, "no parameter requires a gradient")
            return
        if probe.failed_as == self.name:
            why = probe.failure.text[:120] if probe.failure else ""
            yield self._cut(f"backward() raised: {why}")
            return
        if not probe.through:
            yield not_applicable(self, probe.no_steps)
            return
        call = probe.through[0]
        if not probe.doctor_steps:
            backwards = call.of("backward")
            cut = backwards and call.facts.num_nodes == 0 and not call.reached
            if cut:
                yield self._cut("backward() was called on a loss without a graph, and no parameter got a gradient")
            else:
                yield passed(self, f"backward() reached {len(call.reached)} parameters")
        elif call.loss_shape is None:
            yield self._cut(f"the step returned a {call.loss_kind} and called no backward()")
        elif not call.requires_grad:
            yield self._cut(f"loss.requires_grad is False ({call.loss_kind} of value {call.loss})")
        elif call.reached or not call.of("backward"):
            yield passed(
                self, f"the graph of the loss has {call.facts.num_nodes} nodes", num_nodes=call.facts.num_nodes
            )
        else:
            yield self._cut("loss.requires_grad is True, but no parameter of the model is in its graph")

    def _cut(self, evidence: str) -> Line:
        return failed(
            self,
            "the loss has no connection to the parameters of the model.",
            evidence,
            "loss = loss_fn(model(x), y)  # without .detach(), .item(), .data or torch.tensor(...)",
            ("loss",),
        )
