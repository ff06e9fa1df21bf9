"""Faults of mixed precision, where there is a scaler."""

from __future__ import annotations

import functools
from typing import Any

import torch

from trimtab.doctor.observed_step import scaler_is_on
from trimtab.drill.injection import fault, middle, on_gradient, spoilt
from trimtab.drill.score import Fault, NotApplicableError
from trimtab.drill.trial import Run
from trimtab.torchutil.param_groups import params_of
from trimtab.torchutil.patch import wrap_on_object

AMP: list[Fault] = []


def _scaler(run: Run) -> Any:
    if run.scaler is None or not scaler_is_on(run.scaler):
        raise NotApplicableError("the target has no scaler")
    return run.scaler


@fault(AMP, "amp", "scale-collapse", "nonfinite-gradient", silent=True)
def scale_collapses(run: Run) -> None:
    """One gradient overflows in every step from now on: the scaler halves its scale for ever."""
    _scaler(run)
    on_gradient(run, [middle(run)], spoilt(torch.inf))


@fault(AMP, "amp", "clip-before-unscale", "chronic-clipping", from_start=True, silent=True)
def clip_before_unscale(run: Run) -> None:
    """The scaled gradients are clipped to 1.0: after unscaling next to nothing is left."""
    scaler = _scaler(run)
    for name in ("unscale_", "step"):
        wrap_on_object(scaler, name, functools.partial(_clipped_first, scaler))


def _clipped_first(scaler: Any, inner: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    states = scaler._per_optimizer_states
    if id(optimizer) not in states or states[id(optimizer)]["stage"].name == "READY":
        torch.nn.utils.clip_grad_norm_(params_of(optimizer), 1.0)
    return inner(optimizer, *args, **kwargs)
