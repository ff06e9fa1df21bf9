"""The documented corrections after an epoch: what its losses say, and what was done about it."""

from __future__ import annotations

import math

from trimtab.core.types import Outcome
from trimtab.monitor.stability import StabilityMonitor, check_training_stability


def correct(stability: StabilityMonitor, train_loss: float, val_loss: float | None) -> tuple[list[str], list[Outcome]]:
    """Judge an epoch, and answer each issue with its documented factor, the gravest first; cool-down and bounds hold.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1)
        >>> with StabilityMonitor(model, torch.optim.SGD(model.parameters(), lr=0.1)) as stability:
        ...     _ = correct(stability, 1.0, 1.0)
        ...     issues, done = correct(stability, 50.0, 1.0)
        >>> issues, done[0].detail
        (['loss_explosion'], 'LR multiplier 1 -> 0.1, effective LR 0.01')
    """
    issues = check_training_stability(train_loss, val_loss, stability.history, persistence=stability.persistence)
    gravest_first = sorted(issues, key=lambda issue: stability.keeper.factors[issue])
    return issues, [stability.handle_training_instability(issue) for issue in gravest_first]


def correct_epoch(
    stability: StabilityMonitor, train_loss: float, val_loss: float | None, num_bad: int
) -> tuple[list[str], list[Outcome]]:
    """The issues of an epoch and what was really done; one NaN among its losses is news, whatever their mean is."""
    issues, outcomes = correct(stability, math.nan if num_bad else train_loss, val_loss)
    return issues, [outcome for outcome in outcomes if outcome.applied]
