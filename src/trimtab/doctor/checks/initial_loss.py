"""WIRE021: the first loss is far above that of guessing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import torch

from trimtab.doctor.checklist import Line, not_applicable, passed, warned
from trimtab.doctor.loss_graph import FAR_FROM_CHANCE, chance_of, first_loss
from trimtab.doctor.probe import Probe


class InitialLoss:
    """The first loss is far above that of guessing.

    ## What it means
    A model that knows nothing should guess: log C for C classes, log 2 for yes or no. A much higher loss means outputs
    of a far too large scale, and the first steps only undo that.

    ## How it is checked
    The loss of the first batch is computed from what the loss function was given. A high one that falls below guessing
    within a few steps on one batch is harmless; a low one is that of a model which knows something already.

    ## What to try
    1. Initialise the last layer small, and its bias to 0; normalise the inputs.
    2. Look for a missing division (by a temperature, by the square root of the width).
    """

    code: ClassVar[str] = "WIRE021"
    name: ClassVar[str] = "initial-loss"
    title: ClassVar[str] = "the first loss is near that of guessing"
    causes: ClassVar[tuple[str, ...]] = ()

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report a loss that guessing would beat."""
        facts = probe.facts
        first, chance = first_loss(facts), chance_of(facts)
        if first is None or chance is None:
            yield not_applicable(self, "no chance level is known for this loss")
            return
        evidence = f"{first:.4g}; guessing gives {chance:.4g}"
        if first <= 2.0 * chance + 1.0 or not math.isfinite(first):
            yield passed(self, evidence, loss=first, chance=chance)
            return
        if _tied(probe):
            yield passed(self, f"{evidence}; the output layer is an embedding, whose scale is that of its tokens")
            return
        here = None if probe.too_slow else probe.overfit()
        if here is not None and first < FAR_FROM_CHANCE * chance and here.last < 0.7 * here.first:
            yield passed(self, f"{evidence}; it falls to {here.last:.4g} within {here.num} steps on one batch")
            return
        yield warned(
            self,
            "the first loss is far above that of guessing.",
            evidence + (f"; {here.last:.4g} after {here.num} steps on one batch" if here is not None else ""),
            "nn.init.normal_(head.weight, std=0.02); nn.init.zeros_(head.bias)",
            ("loss",),
            loss=first,
            chance=chance,
        )


def _tied(probe: Probe) -> bool:
    """Whether an embedding is used as another layer, too: then logits begin large, and that is a common habit."""
    tables = {id(m.weight) for m in probe.model.modules() if isinstance(m, torch.nn.Embedding)}
    others = (m for m in probe.model.modules() if not isinstance(m, torch.nn.Embedding))
    return any(id(p) in tables for m in others for p in m.parameters(recurse=False))
