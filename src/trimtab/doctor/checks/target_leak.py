"""WIRE026: the model sees the tokens that it has to predict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.input_target import sees_ahead, shift_of_tokens
from trimtab.doctor.probe import Probe


class TargetLeak:
    """The model sees the tokens that it has to predict.

    ## What it means
    A causal mask is missing, or the net reads in both directions: the next token is copied from the input. The loss
    falls quickly to nothing and generation fails.

    ## How it is checked
    Where targets are the next tokens, one input token is changed: outputs before it must not change.

    ## What to try
    1. `is_causal=True`, or a mask with -inf above the diagonal.
    2. No bidirectional RNN, no BatchNorm over positions in a next-token model.
    """

    code: ClassVar[str] = "WIRE026"
    name: ClassVar[str] = "target-leak"
    title: ClassVar[str] = "the model does not see what it is to predict"
    causes: ClassVar[tuple[str, ...]] = ("not-learning", "initial-loss")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report a view of the future."""
        shift = shift_of_tokens(probe) if probe.calls and probe.scan.batches else None
        if shift is None or shift.by != 1 or probe.no_experiments:
            yield not_applicable(self, "targets are not the next tokens of the input")
            return
        ahead = None if shift.lookup is None else sees_ahead(probe, *shift.lookup)
        if ahead is None:
            yield not_applicable(self, "the output has no position for each token")
        elif ahead > 0:
            yield failed(
                self,
                "the model sees the tokens that it has to predict.",
                f"changing one input token changes {ahead:.0%} of the outputs before it",
                "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
                ("mask",),
                share=ahead,
            )
        else:
            yield passed(self, "changing one input token changes no output before it")
