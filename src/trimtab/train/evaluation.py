"""Measures a model on a loader, on the model's device: loss, accuracy, F1, accuracy per class, explained variance."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.errors import InputError
from trimtab.sample.observed import batch_size
from trimtab.sample.transfer import to_device

log = logging.getLogger("trimtab")
LossFn = Callable[[Any, Any], Tensor]
StepFn = Callable[[nn.Module, Any], Tensor]
Evaluate = Callable[[nn.Module, Any], Mapping[str, float]]
Metrics = Callable[[Tensor, Tensor], Mapping[str, float]]


def check_given(model: object, loss_fn: object, step_fn: object, metrics: object, evaluate: object) -> None:
    """Raise InputError for arguments that a training cannot work with."""
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is a {type(model).__name__}; expected a torch.nn.Module")
    if loss_fn is None and step_fn is None:
        raise InputError("there is neither loss_fn(output, target) nor step_fn(model, batch); give one of them")
    if metrics is not None and step_fn is not None and evaluate is None:
        raise InputError("metrics(outputs, targets) needs loss_fn; with step_fn give evaluate(model, loader)")


def loss_of(model: nn.Module, batch: object, loss_fn: LossFn | None, step_fn: StepFn | None) -> tuple[Tensor, object]:
    """The loss of one batch, and the model's output if it is known."""
    if step_fn is not None:
        return step_fn(model, batch), None
    if loss_fn is None or not isinstance(batch, list | tuple) or len(batch) < 2:
        raise InputError(
            f"the batch is a {type(batch).__name__}; expected a pair (input, target) for loss_fn. "
            "Give step_fn(model, batch) -> loss for other batches"
        )
    output = model(batch[0])
    return loss_fn(output, batch[1]), output


@torch.no_grad()
def evaluate_model(
    model: nn.Module,
    loader: Iterable[object],
    *,
    loss_fn: LossFn | None = None,
    step_fn: StepFn | None = None,
    metrics: Metrics | None = None,
    device: torch.device | None = None,
) -> dict[str, float]:
    """The mean loss over samples as `loss`, and the metrics over all outputs; the model's mode is restored.

    Batches are moved to `device`, or to the device of the model's first parameter.

    Example:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.ones(3, 1), torch.zeros(3, 1)), batch_size=2)
        >>> evaluate_model(nn.Identity(), loader, loss_fn=nn.functional.mse_loss)
        {'loss': 1.0}
    """
    modes = {module: module.training for module in model.modules()}
    if device is None and (first := next(model.parameters(), None)) is not None:
        device = first.device
    model.eval()
    total, num = 0.0, 0
    outputs: list[Tensor] = []
    targets: list[Tensor] = []
    try:
        for batch in loader:
            there = batch if device is None else to_device(batch, device)
            loss, output = loss_of(model, there, loss_fn, step_fn)
            size = batch_size(there) or 1
            total, num = total + float(loss) * size, num + size
            if metrics is not None and isinstance(output, Tensor) and isinstance(there, list | tuple):
                outputs.append(output.float().cpu())
                targets.append(there[1].cpu())
    finally:
        for module, mode in modes.items():
            module.training = mode
    found = {"loss": total / num if num else math.nan}
    if metrics is not None and outputs:
        found |= metrics(torch.cat(outputs), torch.cat(targets))
    return found


def measured_by(evaluate: Evaluate, model: nn.Module, loader: Iterable[object]) -> dict[str, float]:
    """The result of a function `evaluate` as plain numbers, with a warning if it has no `loss`."""
    found = {name: float(value) for name, value in dict(evaluate(model, loader)).items()}
    if "loss" not in found:
        _warn_of_no_loss(", ".join(found) or "nothing")
    return found


@cache
def _warn_of_no_loss(names: str) -> None:
    log.warning("evaluate returned %s and no 'loss': validation is recorded, but cannot be judged", names)


def classification_metrics(scores: Tensor, targets: Tensor) -> dict[str, float]:
    """Accuracy, the mean F1 over the classes that occur, and the accuracy of each of them.

    Non-finite scores count as wrong: the argmax of NaN is always the first class.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 3.0]])
        >>> classification_metrics(scores, torch.tensor([0, 1, 1, 1]))["accuracy"]
        0.75
    """
    sound = scores.isfinite().all(dim=-1)
    predicted = scores.argmax(dim=-1).masked_fill(~sound, -1)
    per_class = per_class_accuracy(predicted, targets)
    f1 = []
    for label in per_class:
        right = float(((predicted == label) & (targets == label)).sum())
        f1.append(2.0 * right / max(float((predicted == label).sum() + (targets == label).sum()), 1.0))
    return {
        "accuracy": float((predicted == targets).float().mean()),
        "f1": sum(f1) / max(len(f1), 1),
        **{f"accuracy_class_{label}": value for label, value in per_class.items()},
    }


def per_class_accuracy(predicted: Tensor, targets: Tensor) -> dict[int, float]:
    """How often each class that occurs was recognised."""
    labels = sorted(set(targets.reshape(-1).tolist()))
    return {int(label): float((predicted[targets == label] == label).float().mean()) for label in labels}


def regression_metrics(predicted: Tensor, targets: Tensor) -> dict[str, float]:
    """R2, the share of explained variance, and the mean absolute error; NaN if a prediction is NaN.

    Example:
        >>> import torch
        >>> regression_metrics(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0]))["r2"]
        1.0
    """
    wanted, given = targets.double().reshape(-1), predicted.double().reshape(-1)
    spread = float((wanted - wanted.mean()).square().sum())
    missed = float((wanted - given).square().sum())
    return {
        "r2": 1.0 - missed / spread if spread > 0 else math.nan,
        "mae": float((wanted - given).abs().mean()),
    }
