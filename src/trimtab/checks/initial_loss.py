"""WIRE021: the first loss is far above that of guessing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from trimtab.checks.course import course
from trimtab.checks.graph import LossFacts
from trimtab.checks.outcome import Line, not_applicable, passed, warned
from trimtab.checks.probe import Probe
from trimtab.sample.transfer import number

FAR = 20.0
"""A first loss of so many times that of guessing is worth a word even if it falls."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
        told = f"{first:.4g}; guessing gives {chance:.4g}"
        if first <= 2.0 * chance + 1.0 or not math.isfinite(first):
            yield passed(self, told, loss=first, chance=chance)
            return
        if _tied(probe):
            yield passed(self, f"{told}; the output layer is an embedding, whose scale is that of its tokens")
            return
        here = None if probe.too_slow else course(probe)
        if here is not None and first < FAR * chance and here.last < 0.7 * here.first:
            yield passed(self, f"{told}; it falls to {here.last:.4g} within {here.num} steps on one batch")
            return
        yield warned(
            self,
            "the first loss is far above that of guessing.",
            told + (f"; {here.last:.4g} after {here.num} steps on one batch" if here is not None else ""),
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


def chance_of(facts: LossFacts) -> float | None:
    """The loss of guessing; None where it is not known."""
    if facts.kind == "nll" and facts.num_classes is not None and facts.num_classes > 1:
        return math.log(facts.num_classes)
    return math.log(2.0) if facts.kind in ("bce", "bce-logits") and not facts.weighted else None


def first_loss(facts: LossFacts) -> float | None:
    """The mean loss of the first batch, before any weight or factor."""
    scores, target = facts.scores, facts.target
    if scores is None or target is None or not target.numel():
        return None
    if facts.kind == "nll" and scores.dim() >= 1 and facts.normalised:
        flat = scores.movedim(1, -1).reshape(-1, scores.shape[1]) if scores.dim() > 1 else scores[None]
        labels = target.reshape(-1)
        fit = (labels >= 0) & (labels < flat.shape[1]) & (labels != facts.ignore_index)
        return -number(flat[fit].gather(1, labels[fit][:, None]).double().mean()) if bool(fit.any()) else None
    if facts.kind == "bce-logits" and scores.shape == target.shape:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores.double(), target.double())
        return number(loss)
    return None
