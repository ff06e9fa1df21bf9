"""WIRE018: the loss is given something else than it expects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.loss_graph import BOUNDED, LossFacts
from trimtab.doctor.probe import Probe
from trimtab.doctor.recording import Call
from trimtab.sample.transfer import number

SUM_SLACK = 1e-2
"""How far probabilities may be from adding up to 1: half precision is that coarse."""


class LossInput:
    """The loss is given something else than it expects.

    ## What it means
    Cross-entropy and binary cross-entropy with logits apply softmax and sigmoid themselves: given probabilities they
    still learn, badly. `NLLLoss` wants logarithms of probabilities. A regression whose last layer is bounded can never
    reach targets outside of it.

    ## How it is checked
    The graph right before the loss, and the values it was given.

    ## What to try
    1. Give `CrossEntropyLoss` and `BCEWithLogitsLoss` raw outputs: no softmax, no sigmoid at the end of the model.
    2. `NLLLoss` after `log_softmax`.
    """

    code: ClassVar[str] = "WIRE018"
    name: ClassVar[str] = "loss-input"
    title: ClassVar[str] = "the loss gets what it expects"
    causes: ClassVar[tuple[str, ...]] = ("initial-loss", "not-learning", "zero-gradient", "targets-do-not-predict")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report what the loss does not expect."""
        facts = probe.facts
        if not facts.kind:
            yield not_applicable(self, "the loss is none of those whose input is known")
        elif facts.kind == "nll" and facts.before_twice in ("Softmax", "Sigmoid"):
            yield self._wrong(
                f"the model ends in a {facts.before_twice.lower()}, and cross-entropy applies softmax again.",
                f"{facts.before_twice} right before log_softmax in the graph of the loss",
                "return self.head(x)  # raw outputs, without softmax",
            )
        elif facts.before == "LogSoftmax" and all(map(_is_probabilities, probe.calls)):
            yield self._wrong(
                "the model returns probabilities, and cross-entropy applies softmax again.",
                "no output is below 0, and those of each sample add up to 1",
                "return self.head(x)  # raw outputs, without softmax",
            )
        elif facts.kind == "nll" and not facts.normalised:
            yield self._wrong(
                "NLLLoss gets values that are no logarithms of probabilities.",
                f"their exponentials do not add up to 1; before it comes {facts.before or 'a layer'}",
                "loss = F.cross_entropy(output, y)  # or F.log_softmax before NLLLoss",
            )
        elif facts.kind == "bce-logits" and facts.before in ("Sigmoid", "Softmax"):
            yield self._wrong(
                f"the model ends in a {facts.before.lower()}, and the loss applies sigmoid again.",
                f"{facts.before} right before binary_cross_entropy_with_logits",
                "return self.head(x)  # raw outputs, without sigmoid",
            )
        elif (out := _unreachable(facts)) is not None:
            yield self._wrong(*out)
        else:
            yield passed(self, f"{facts.kind} loss of {facts.before_twice or facts.before or 'raw'} outputs")

    def _wrong(self, cause: str, evidence: str, fix: str) -> Line:
        return failed(self, cause, evidence, fix, ("loss",))


def _is_probabilities(call: Call) -> bool:
    """Whether what the model returned, and the loss was given, adds up to 1 for every sample."""
    out, scores = call.output, call.facts.scores
    if out is None or scores is None or out.shape != scores.shape or out.dim() < 2 or out.shape[1] < 2:
        return False
    values = out.detach().double()
    return number(values.min()) >= 0 and number((values.sum(1) - 1.0).abs().max()) < SUM_SLACK


def _unreachable(facts: LossFacts) -> tuple[str, str, str] | None:
    """A bounded last layer, and targets beyond its bounds."""
    if facts.kind not in ("mse", "l1") or facts.before not in BOUNDED or facts.target is None:
        return None
    low, high = BOUNDED[facts.before]
    target = facts.target.float()
    slack = 0.05
    outside = target < low - slack
    if high is not None:
        outside |= target > high + slack
    share = number(outside.float().mean())
    if share < 0.05:
        return None
    return (
        f"the model ends in a {facts.before.lower()}, and {share:.0%} of the targets lie beyond its reach.",
        f"targets from {number(target.min()):.4g} to {number(target.max()):.4g}",
        "return self.head(x)  # without an activation, or scale the targets",
    )
