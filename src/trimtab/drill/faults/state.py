"""Faults of state: weights, moments and averages that something else than the optimizer changed."""

from __future__ import annotations

import torch

from trimtab.drill.injection import HURT, NONFINITE, SQUARES, fault, last, middle, some_moments, squares
from trimtab.drill.score import Fault, NotApplicableError
from trimtab.drill.trial import Run
from trimtab.torchutil.patch import wrap_on_object

STATE: list[Fault] = []
CORRUPTED = ("weight-corrupted", "weight-jump", *HURT)


@fault(STATE, "state", *CORRUPTED, *NONFINITE, silent=True)
def layer_hundredfold(run: Run) -> None:
    """The last layer is multiplied by a hundred between two steps."""
    with torch.no_grad():
        last(run).mul_(100)


@fault(STATE, "state", *CORRUPTED, silent=True)
def layer_overwritten(run: Run) -> None:
    """A layer is overwritten with noise of its own size."""
    weight = middle(run)
    with torch.no_grad():
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(run.task.seed))
        weight.copy_(noise * weight.float().std(correction=0).cpu())


@fault(STATE, "state", "optimizer-state-lost", "update-ratio", "weight-jump", *HURT, silent=True)
def optimizer_state_lost(run: Run) -> None:
    """The optimizer's memory is cleared midway."""
    some_moments(run)
    for one in run.optimizers:
        one.state.clear()


@fault(STATE, "state", "weight-jump", "update-ratio", "optimizer-state-lost", *HURT, *NONFINITE)
def moments_scaled(run: Run) -> None:
    """What the optimizer divides by is a millionth of what it was (its momentum: a thousandfold)."""
    some_moments(run)
    for one in run.optimizers:
        divides = any(key in SQUARES for entry in one.state.values() for key in entry)
        for moment in squares(one):
            moment.mul_(1e-6 if divides else 1e3)


@fault(STATE, "state", "nonfinite-ema", silent=True)
def ema_poisoned(run: Run) -> None:
    """One NaN gets into the average and never leaves it; the model is well."""
    found = [p for p in _average(run) if p.is_floating_point() and p.numel()]
    if not found:
        raise NotApplicableError("the average has no parameters that can be looked at")
    with torch.no_grad():
        found[0].view(-1)[0] = torch.nan


@fault(STATE, "state", "ema-not-moving", silent=True)
def ema_not_updated(run: Run) -> None:
    """The average is not updated any more."""
    _average(run)
    for name in ("update_parameters", "update"):
        if callable(getattr(run.target.ema, name, None)):
            wrap_on_object(run.target.ema, name, lambda inner, *args: None)


def _average(run: Run) -> list[torch.Tensor]:
    if run.target.ema is None:
        raise NotApplicableError("the target has no ema")
    return list(run.target.ema.parameters()) if hasattr(run.target.ema, "parameters") else []
