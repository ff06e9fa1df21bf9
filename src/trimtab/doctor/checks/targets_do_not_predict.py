"""DATA007: inputs and targets do not belong together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.input_target import FRESH, Relation, misplaced, redrawn, relation, shift_of_tokens, shifted_rows
from trimtab.doctor.probe import Probe


class TargetsDoNotPredict:
    """Inputs and targets do not belong together.

    ## What it means
    The targets are in another order than the inputs, or shifted against them: next-token targets that are the tokens
    themselves, or those before. The loss falls to what guessing gives, or to 0 by copying, and nothing is learned.

    ## How it is checked
    What the loss was given is compared with the batch: the same targets in another order are out of step. With another
    seed the same batch must have the same targets, unless the model sees what is drawn, too. For tokens,
    the shift between inputs and targets is measured; a causal model must be given the next token. For samples in their
    stored order, whether targets follow from the inputs beside them and not from their own. Where neither a regression
    nor nearest neighbours find any relation, the model is trained on some batches, and the loss of others compared with
    the loss of the same inputs with their targets in another order.

    ## What to try
    1. Print a few pairs as the model sees them.
    2. For next-token training: `inputs, targets = tokens[:, :-1], tokens[:, 1:]`.
    """

    code: ClassVar[str] = "DATA007"
    name: ClassVar[str] = "targets-do-not-predict"
    title: ClassVar[str] = "targets belong to their inputs"
    causes: ClassVar[tuple[str, ...]] = ("not-learning",)

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report pairs that are none."""
        if not probe.calls or not probe.scan.batches:
            yield not_applicable(self, probe.no_steps)
            return
        moved = misplaced(probe)
        if moved:
            yield self._wrong(moved, "the same values in another order", "x, y = x[order], y[order]")
            return
        drawn = redrawn(probe)
        if drawn is not None and drawn > FRESH:
            yield self._wrong(
                "the targets are drawn again in every step: there is nothing to learn.",
                f"with another seed {min(drawn, 1.0):.0%} of them are another, for the same batch and the same inputs",
                "x, y = batch  # the targets of the batch",
            )
            return
        shift = shift_of_tokens(probe)
        if shift is not None and shift.wrong:
            yield self._wrong(
                shift.cause,
                f"targets equal the input tokens {shift.by:+d} places on in {shift.share:.0%} of the positions",
                "inputs, targets = tokens[:, :-1], tokens[:, 1:]",
            )
            return
        rows = None if shift is not None else shifted_rows(probe)
        if rows is not None and rows.wrong:
            yield self._wrong(
                f"each target belongs to the sample {rows.by:+d} places on.",
                f"targets follow from inputs with a score of {rows.here:.2f}, shifted of {rows.there:.2f}",
                f"y = torch.roll(y, {rows.by})  # or fix the way pairs are made",
            )
        elif shift is not None:
            yield (
                passed(self, f"targets are the next tokens in {shift.share:.0%} of the positions")
                if shift.by == 1
                else passed(
                    self, f"targets equal the input tokens {shift.by:+d} places on, and the model sees both sides"
                )
            )
        elif rows is not None:
            yield passed(self, f"targets follow from their own inputs with a score of {rows.here:.2f}")
        else:
            yield self._related(relation(probe))

    def _related(self, found: Relation | None) -> Line:
        if found is None:
            return not_applicable(self, "nothing about inputs and targets could be compared")
        if not found.none:
            return passed(self, f"targets follow from their inputs: {max(found.model, found.neighbours):.1f} sigma")
        return self._wrong(
            "nothing leads from the inputs to the targets: they are in another order, or of other samples.",
            f"targets in any other order do as well: after {found.num_steps} steps on other batches "
            f"({found.model:+.1f} sigma), for nearest neighbours ({found.neighbours:+.1f} sigma) and for a regression",
            "print(list(zip(x[:5], y[:5])))  # one order for both: x, y = x[order], y[order]",
        )

    def _wrong(self, cause: str, evidence: str, fix: str) -> Line:
        return failed(self, cause, evidence, fix, ("targets",))
