"""The documented loss of a segmentation: pixels, overlap, edges, use of the experts, and the coarser levels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.train.recipes.segment_model import Predicted

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
