"""What a trained model is measured by: accuracy, F1, each class by itself, and the share of variance explained."""

from __future__ import annotations

import math

from torch import Tensor


def classification_metrics(scores: Tensor, targets: Tensor) -> dict[str, float]:
    """Accuracy, the mean F1 over the classes that occur, and the accuracy of each of them.

    Scores that are not finite are wrong whatever they say: a model of NaN always answers the first class.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 3.0]])
        >>> classification_metrics(scores, torch.tensor([0, 1, 1, 1]))["accuracy"]
        0.75
    """
    sound = scores.isfinite().all(dim=-1)
    said = scores.argmax(dim=-1).masked_fill(~sound, -1)
    per_class = per_class_accuracy(said, targets)
    f1 = []
    for label in per_class:
        right = float(((said == label) & (targets == label)).sum())
        f1.append(2.0 * right / max(float((said == label).sum() + (targets == label).sum()), 1.0))
    return {
        "accuracy": float((said == targets).float().mean()),
        "f1": sum(f1) / max(len(f1), 1),
        **{f"accuracy_class_{label}": value for label, value in per_class.items()},
    }


def per_class_accuracy(said: Tensor, targets: Tensor) -> dict[int, float]:
    """How often each class that occurs was recognised."""
    labels = sorted(set(targets.reshape(-1).tolist()))
    return {int(label): float((said[targets == label] == label).float().mean()) for label in labels}


def regression_metrics(said: Tensor, targets: Tensor) -> dict[str, float]:
    """R2, the share of the variance that is explained, and the mean absolute error; NaN answers give NaN.

    Example:
        >>> import torch
        >>> regression_metrics(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0]))["r2"]
        1.0
    """
    wanted, given = targets.double().reshape(-1), said.double().reshape(-1)
    spread = float((wanted - wanted.mean()).square().sum())
    missed = float((wanted - given).square().sum())
    return {
        "r2": 1.0 - missed / spread if spread > 0 else math.nan,
        "mae": float((wanted - given).abs().mean()),
    }
