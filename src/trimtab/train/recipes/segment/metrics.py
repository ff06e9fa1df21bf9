"""The documented loss of a segmentation (pixels, overlap, edges, use of the experts, and the coarser levels), and its
documented measures, each for every sample and then averaged over the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from trimtab.train.recipes.segment.model import Predicted

BCE, IOU, EDGE, AUX, DEEP = 5.0, 3.0, 2.0, 0.1, 0.4
TINY = 1e-6


def segmentation_loss(predicted: Predicted, masks: Tensor) -> Tensor:
    """5 BCE + 3 soft IoU + 2 Sobel-edge MSE + 0.1 imbalance of the experts (+ 0.4 the same of coarser levels).

    Computed in float32 whatever the scores are in; every term is a mean over samples.

    Example:
        >>> sure = Predicted(torch.full((1, 1, 8, 8), 30.0), torch.zeros(()))
        >>> round(segmentation_loss(sure, torch.ones(1, 1, 8, 8)).item(), 4)
        0.0
    """
    masks = masks.float()
    loss = _of(predicted.logits, masks) + AUX * predicted.imbalance.float()
    if predicted.deep:
        coarser = [_of(functional.interpolate(d.float(), size=masks.shape[2:]), masks) for d in predicted.deep]
        loss = loss + DEEP * torch.stack(coarser).mean()
    return loss


def soft_iou_loss(chances: Tensor, masks: Tensor) -> Tensor:
    """One minus the overlap over the union of chances and masks, the mean over samples."""
    both = (chances * masks).sum((1, 2, 3))
    either = (chances + masks).sum((1, 2, 3)) - both
    return (1.0 - (both + 1.0) / (either + 1.0)).mean()


def edge_loss(chances: Tensor, masks: Tensor) -> Tensor:
    """The squared difference of edges as Sobel sees them; a clear edge has a strength of one.

    Example:
        >>> step = torch.zeros(1, 1, 4, 4)
        >>> step[..., 2:] = 1.0
        >>> edge_loss(step, step).item(), round(edge_loss(torch.zeros_like(step), step).item(), 2)
        (0.0, 0.5)
    """
    return functional.mse_loss(_edges(chances), _edges(masks))


def _of(logits: Tensor, masks: Tensor) -> Tensor:
    logits = logits.float()
    chances = logits.sigmoid()
    pixels = functional.binary_cross_entropy_with_logits(logits, masks)
    return BCE * pixels + IOU * soft_iou_loss(chances, masks) + EDGE * edge_loss(chances, masks)


def _edges(planes: Tensor) -> Tensor:
    across = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]], device=planes.device) / 4.0
    both = torch.stack([across, across.T])[:, None].to(planes.dtype)
    found = functional.conv2d(functional.pad(planes, (1, 1, 1, 1), mode="replicate"), both)
    return (found.square().sum(1, keepdim=True) + TINY).sqrt()


BETA_SQUARED = 0.3
ALPHA = 0.5
THRESHOLD = 0.5
EPS = 1e-12

Plane = NDArray[np.float64]


def segmentation_metrics(logits: Tensor, masks: Tensor) -> dict[str, float]:
    """All ten measures of scores `[num, 1, height, width]` against masks of 0 and 1.

    A pixel belongs to the object where its chance is above one half. A NaN score counts as background. Where
    a share has nothing to be a share of (no object in the mask, nothing predicted), it is 1 if prediction and mask
    agree that there is nothing, else 0: no measure is ever undefined.

    Example:
        >>> masks = torch.zeros(2, 1, 4, 4)
        >>> masks[:, :, 1:3, 1:3] = 1.0
        >>> found = segmentation_metrics(20.0 * masks - 10.0, masks)
        >>> {name: round(value, 3) for name, value in found.items()}  # doctest: +NORMALIZE_WHITESPACE
        {'MAE': 0.0, 'IoU': 1.0, 'F-measure': 1.0, 'S-measure': 1.0, 'E-measure': 1.0, 'Pixel_Accuracy': 1.0,
         'Precision': 1.0, 'Recall': 1.0, 'Dice_Score': 1.0, 'Specificity': 1.0}
    """
    return mean_measures(measures_of_samples(logits, masks))


def measures_of_samples(logits: Tensor, masks: Tensor) -> list[Mapping[str, float]]:
    """All ten measures of each sample."""
    chances = logits.detach().double().sigmoid().nan_to_num(0.0).flatten(0, 1).cpu().numpy()
    truths = masks.detach().double().flatten(0, 1).cpu().numpy() > THRESHOLD
    return [_measures(chance, truth) for chance, truth in zip(chances, truths, strict=True)]


def mean_measures(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each measure over samples."""
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]} if rows else {}


def overlaps_of_samples(logits: Tensor, masks: Tensor) -> list[Mapping[str, float]]:
    """The two measures that every epoch is judged by, of each sample: `IoU` and `Dice`."""
    found, wanted = (logits.detach() > 0).flatten(1), (masks.detach() > THRESHOLD).flatten(1)
    both, sizes = (found & wanted).sum(1).double(), (found.sum(1) + wanted.sum(1)).double()
    nothing = sizes == 0
    iou = torch.where(nothing, 1.0, both / (sizes - both).clamp(min=1.0))
    dice = torch.where(nothing, 1.0, 2.0 * both / sizes.clamp(min=1.0))
    return [{"IoU": a, "Dice": b} for a, b in zip(iou.tolist(), dice.tolist(), strict=True)]


def _measures(chance: Plane, truth: NDArray[np.bool_]) -> Mapping[str, float]:
    found = chance > THRESHOLD
    hit, false, missed = int((found & truth).sum()), int((found & ~truth).sum()), int((~found & truth).sum())
    rest = truth.size - hit - false - missed
    precision = _share(hit, hit + false, nothing=missed == 0)
    recall = _share(hit, hit + missed, nothing=false == 0)
    weighted = BETA_SQUARED * precision + recall
    return {
        "MAE": float(np.abs(chance - truth).mean()),
        "IoU": _share(hit, hit + false + missed, nothing=True),
        "F-measure": (1.0 + BETA_SQUARED) * precision * recall / weighted if weighted else 0.0,
        "S-measure": s_measure(chance, truth),
        "E-measure": e_measure(found, truth),
        "Pixel_Accuracy": (hit + rest) / truth.size,
        "Precision": precision,
        "Recall": recall,
        "Dice_Score": _share(2 * hit, 2 * hit + false + missed, nothing=True),
        "Specificity": _share(rest, rest + false, nothing=missed == 0),
    }


def _share(part: int, whole: int, *, nothing: bool) -> float:
    return part / whole if whole else float(nothing)


def s_measure(chance: Plane, truth: NDArray[np.bool_]) -> float:
    """How alike the structures are: of object and ground as wholes, and of the four quarters around the centre.

    Example:
        >>> empty = np.zeros((4, 4), bool)
        >>> s_measure(np.full((4, 4), 0.25), empty), s_measure(np.full((4, 4), 0.25), ~empty)
        (0.75, 0.25)
    """
    frac = float(truth.mean())
    if frac in (0.0, 1.0):
        return float(1.0 - chance.mean()) if frac == 0.0 else float(chance.mean())
    objects = frac * _evenness(chance[truth]) + (1.0 - frac) * _evenness(1.0 - chance[~truth])
    return max(ALPHA * objects + (1.0 - ALPHA) * _quarters(chance, truth), 0.0)


def e_measure(found: NDArray[np.bool_], truth: NDArray[np.bool_]) -> float:
    """How well every pixel is aligned with the truth, each seen against the mean of its picture.

    Example:
        >>> truth = np.eye(4, dtype=bool)
        >>> round(e_measure(truth, truth), 6), round(e_measure(~truth, truth), 6), e_measure(truth, truth & False)
        (1.0, 0.0, 0.75)
    """
    if not truth.any():
        return float(1.0 - found.mean())
    if truth.all():
        return float(found.mean())
    a, b = found - found.mean(), truth - truth.mean()
    aligned = 2.0 * a * b / (a * a + b * b + EPS)
    return float(((aligned + 1.0) ** 2 / 4.0).mean())


def _evenness(chances: Plane) -> float:
    """1 where all chances are 1; less where they are low or scattered."""
    mean, spread = chances.mean(), chances.std(ddof=1) if chances.size > 1 else 0.0
    return float(2.0 * mean / (mean * mean + 1.0 + spread + EPS))


def _quarters(chance: Plane, truth: NDArray[np.bool_]) -> float:
    rows, columns = np.nonzero(truth)
    y, x = round(float(rows.mean())) + 1, round(float(columns.mean())) + 1
    total = 0.0
    for vertical in (slice(None, y), slice(y, None)):
        for horizontal in (slice(None, x), slice(x, None)):
            part = truth[vertical, horizontal]
            if part.size:
                total += part.size / truth.size * _likeness(chance[vertical, horizontal], part.astype(np.float64))
    return total


def _likeness(a: Plane, b: Plane) -> float:
    """Structural similarity of two planes as wholes."""
    num = max(a.size - 1, 1)
    mean_a, mean_b = a.mean(), b.mean()
    var_a, var_b = ((a - mean_a) ** 2).sum() / num, ((b - mean_b) ** 2).sum() / num
    cov = ((a - mean_a) * (b - mean_b)).sum() / num
    top, bottom = 4.0 * mean_a * mean_b * cov, (mean_a**2 + mean_b**2) * (var_a + var_b)
    if top:
        return float(top / (bottom + EPS))
    return 1.0 if bottom == 0 else 0.0
