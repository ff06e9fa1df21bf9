"""WIRE010: dropout does nothing in training, or goes on in evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch.nn.modules.dropout import _DropoutNd

from trimtab.core.window import listed
from trimtab.doctor.batch_tensors import fresh
from trimtab.doctor.checklist import Line, failed, not_applicable, passed, warned
from trimtab.doctor.dropout_calls import DrawnDropout
from trimtab.doctor.gradient_reach import learns
from trimtab.doctor.probe import Probe
from trimtab.doctor.target import raw_loss


class DropoutInactive:
    """Dropout does nothing in training, or goes on in evaluation.

    ## What it means
    A Dropout layer in evaluation mode inside a model that trains regularises nothing. `F.dropout(x)` without
    `training=self.training` drops at test time as well, and so does attention with a fixed `dropout_p`: predictions are
    noisy and worse than they need be.

    ## How it is checked
    The mode of every Dropout at the moment it is called; and a forward pass in evaluation mode, in which no dropout may
    be drawn.

    ## What to try
    1. `F.dropout(x, p, training=self.training)`; `dropout_p=self.p if self.training else 0.0`.
    2. `model.train()` after every validation.
    """

    code: ClassVar[str] = "WIRE010"
    name: ClassVar[str] = "dropout-inactive"
    title: ClassVar[str] = "Dropout drops in training, and only there"
    causes: ClassVar[tuple[str, ...]] = (
        "not-learning",
        "loss-ignores-input",
        "loss-ignores-target",
        "zero-gradient",
        "collapsed-output",
    )

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report Dropout in the wrong mode."""
        layers = {n: m for n, m in probe.model.named_modules() if isinstance(m, _DropoutNd) and m.p > 0}
        modes = {n: probe.modes_of(m) for n, m in layers.items()}
        off = tuple(
            n
            for n, seen in modes.items()
            if seen and any(grad for _, grad in seen) and not any(t for t, _ in seen) and learns(probe.model, n)
        )
        every = tuple(n for n, m in layers.items() if m.p >= 1.0 and modes[n])
        if off:
            yield failed(
                self,
                f"{len(off)} of {len(layers)} Dropout layers are in evaluation mode in a training step.",
                listed(off),
                "model.train()",
                off[:8],
            )
            return
        if every:
            yield failed(
                self, "a Dropout layer drops everything.", f"{listed(every)}: p = 1", "nn.Dropout(0.1)", every[:8]
            )
            return
        drawn = dropout_in_eval(probe)
        if drawn:
            yield warned(
                self,
                "dropout is drawn in evaluation mode as well.",
                f"{drawn[0]}; {len(drawn)} calls in one forward pass after model.eval()",
                "F.dropout(x, p, training=self.training)",
                tuple(drawn[:4]),
            )
        elif not layers:
            yield not_applicable(self, "there is no Dropout layer")
        else:
            yield passed(self, f"{len(layers)} layers drop in training, none in evaluation")


def dropout_in_eval(probe: Probe) -> list[str]:
    """Dropout that is drawn though the model is in evaluation mode; nothing where that could not be tried."""
    if not probe.through:
        return []
    mode = DrawnDropout()
    try:
        with probe.trial(rates=False):
            probe.model.eval()
            with torch.no_grad(), mode:
                if probe.target.step_fn is None:
                    raw_loss(probe.target, fresh(probe.batch(0)))
                elif (given := _given(probe)) is not None:  # the step itself may switch to training
                    probe.model(*given)
            return mode.seen
    except Exception:
        return []


def _given(probe: Probe) -> tuple[object, ...] | None:
    """What the model was called with in the first step, where it was called once, with tensors alone."""
    call = probe.through[0]
    forwards = call.of("forward")
    whole = len(forwards) == 1 and forwards[0].who == id(probe.model)
    return tuple(t.detach().clone() for t in call.inputs) if whole and call.inputs else None
