"""Faults of numbers: NaN and Inf in gradients, weights, buffers, moments and losses; a flipped bit."""

from __future__ import annotations

import torch

from trimtab.drill.injection import (
    HURT,
    NONFINITE,
    alter_once,
    fault,
    middle,
    on_gradient,
    ours_only,
    some_moments,
    spoilt,
)
from trimtab.drill.score import Fault, NotApplicableError
from trimtab.drill.trial import Run

NUMERICS: list[Fault] = []
FIRST_GRADIENT = ("nonfinite-gradient", "nonfinite-weight", "nonfinite-loss")
TOP_BIT = {torch.float32: (torch.int32, 30), torch.float64: (torch.int64, 62), torch.bfloat16: (torch.int16, 14)}


@fault(NUMERICS, "numerics", *FIRST_GRADIENT)
def nan_in_gradient(run: Run) -> None:
    """One element of one gradient is NaN."""
    on_gradient(run, [middle(run)], spoilt(torch.nan), num_steps=1)


@fault(NUMERICS, "numerics", *FIRST_GRADIENT)
def inf_in_gradient(run: Run) -> None:
    """One element of one gradient is infinite."""
    on_gradient(run, [middle(run)], spoilt(torch.inf), num_steps=1)


@fault(NUMERICS, "numerics", "nonfinite-weight", "weight-corrupted", *NONFINITE)
def nan_in_weight(run: Run) -> None:
    """One weight becomes NaN between two steps."""
    with torch.no_grad():
        middle(run).view(-1)[0] = torch.nan


@fault(NUMERICS, "numerics", "weight-corrupted", "weight-jump", *HURT, *NONFINITE, silent=True)
def bit_flip(run: Run) -> None:
    """The highest bit of one weight's exponent flips."""
    weight = middle(run).data
    if weight.dtype not in TOP_BIT or not weight.is_contiguous():
        raise NotApplicableError(f"the weights are {weight.dtype}")
    kind, bit = TOP_BIT[weight.dtype]
    weight.view(kind).view(-1)[weight.numel() // 2] ^= 1 << bit


@fault(NUMERICS, "numerics", "nonfinite-buffer", "nonfinite-validation", *NONFINITE, silent=True)
def nan_in_buffer(run: Run) -> None:
    """A running mean or variance is NaN: training may go on as if nothing had happened, evaluation is lost."""
    found = [b for b in run.model.buffers() if b.is_floating_point() and b.dim() and bool(torch.isfinite(b).all())]
    if not found:
        raise NotApplicableError("the model has no buffers of real numbers")
    found[-1].view(-1)[0] = torch.nan


@fault(NUMERICS, "numerics", "nonfinite-loss", silent=True)
def nan_in_loss(run: Run) -> None:
    """A constant term of the loss of one batch is NaN; the gradients are right."""
    ours_only(run)
    alter_once(run, "forward", lambda loss: loss + torch.nan)


@fault(NUMERICS, "numerics", *NONFINITE)
def loss_divided_by_zero(run: Run) -> None:
    """The loss of one batch is divided by a count that is zero."""
    ours_only(run)
    alter_once(run, "forward", lambda loss: loss / 0)


@fault(NUMERICS, "state", "nonfinite-optimizer-state", *NONFINITE)
def nan_in_moment(run: Run) -> None:
    """One number in the optimizer's memory is NaN."""
    next(some_moments(run)).view(-1)[0] = torch.nan
