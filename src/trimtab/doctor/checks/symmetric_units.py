"""WIRE042: all units of a layer are the same, and stay so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe
from trimtab.sample.transfer import number

NUM_STEPS = 6
EQUAL = 1e-6
KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class SymmetricUnits:
    """All units of a layer are the same, and stay so.

    ## What it means
    Units that begin equal get equal gradients: a layer of a thousand of them is one unit. A weight filled with a
    constant, or with zeros on both sides of an activation, never gets out of that.

    ## How it is checked
    The rows of each weight before and after some steps. Zeros that the first step parts, as in a new head or branch,
    are fine.

    ## What to try
    1. `nn.init.kaiming_normal_(layer.weight)`; zeros only for biases, and for the last layer of a branch.
    """

    code: ClassVar[str] = "WIRE042"
    name: ClassVar[str] = "symmetric-units"
    title: ClassVar[str] = "the units of a layer differ"
    causes: ClassVar[tuple[str, ...]] = (
        "zero-gradient",
        "loss-ignores-input",
        "loss-ignores-target",
        "dead-units",
        "collapsed-output",
        "targets-do-not-predict",
        "weights-unchanged",
        "learning-rate",
        "not-learning",
    )

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report layers whose units nothing tells apart."""
        why = probe.no_experiments
        layers = {n: m for n, m in probe.model.named_modules() if isinstance(m, KINDS) and _counts(probe, m.weight)}
        suspects = {n: m for n, m in layers.items() if _alike(m.weight)}
        if why or not suspects:
            yield not_applicable(self, why) if why else passed(self, f"{len(layers)} layers, none of equal units")
            return
        with probe.trial():
            calls = probe.run([probe.batch(i) for i in range(NUM_STEPS)])
            zeros = [n for n, m in layers.items() if not _any(m.weight)]
            # A layer of zeros alone may be switched off on purpose; beside another such one it never leaves them.
            stuck = [n for n, m in suspects.items() if _alike(m.weight) and (n not in zeros or len(zeros) > 1)]
        if stuck and all(c.failure is None for c in calls):
            yield failed(
                self,
                "all units of a layer are the same, and no step tells them apart.",
                f"{', '.join(stuck[:4])}: {layers[stuck[0]].weight.shape[0]} equal rows after {len(calls)} calls",
                f"torch.nn.init.kaiming_normal_(model.{stuck[0]}.weight)",
                tuple(f"{n}.weight" for n in stuck),
            )
        else:
            yield passed(self, f"{len(suspects)} of {len(layers)} layers begin with equal units, and part at once")


def _counts(probe: Probe, weight: Tensor) -> bool:
    return weight.requires_grad and id(weight) in probe.held and weight.shape[0] > 1 and not weight.is_meta


def _alike(weight: Tensor) -> bool:
    flat = weight.detach().reshape(weight.shape[0], -1)
    apart = number((flat - flat[0]).abs().max().double())
    return apart <= EQUAL * number(flat.abs().max().double())


def _any(weight: Tensor) -> bool:
    return bool(torch.any(weight.detach() != 0))
