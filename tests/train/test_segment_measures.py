"""The loss and the ten measures of a segmentation, against plain float64 references written anew here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trimtab.train.recipes.segment.metrics import (
    edge_loss,
    mean_measures,
    overlaps_of_samples,
    segmentation_loss,
    segmentation_metrics,
    soft_iou_loss,
)
from trimtab.train.recipes.segment.model import Predicted

NAMES = ["MAE", "IoU", "F-measure", "S-measure", "E-measure", "Pixel_Accuracy"]
NAMES += ["Precision", "Recall", "Dice_Score", "Specificity"]


def overlap(logits: torch.Tensor, masks: torch.Tensor) -> dict[str, float]:
    return mean_measures(overlaps_of_samples(logits, masks))


def some(num: int = 6, side: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    masks = torch.zeros(num, 1, side, side)
    for i in range(num):
        masks[i, :, 2 + i : 7 + i, 3 : 9 - i % 3] = 1.0
    return 4.0 * (masks - 0.5) + 2.5 * torch.randn(masks.shape, generator=generator), masks


def reference(logit: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """Pixel by pixel, in plain Python numbers, for one sample that has both object and ground."""
    height, width = mask.shape
    chance = [[1.0 / (1.0 + math.exp(-logit[y][x])) for x in range(width)] for y in range(height)]
    pairs = [(chance[y][x], mask[y][x]) for y in range(height) for x in range(width)]
    n = len(pairs)
    tp = sum(p > 0.5 and g == 1 for p, g in pairs)
    fp = sum(p > 0.5 and g == 0 for p, g in pairs)
    fn = sum(p <= 0.5 and g == 1 for p, g in pairs)
    tn = n - tp - fp - fn
    precision, recall = tp / (tp + fp), tp / (tp + fn)

    def object_score(values: list[float]) -> float:
        mean = sum(values) / len(values)
        spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
        return 2 * mean / (mean**2 + 1 + spread)

    share = sum(g for _, g in pairs) / n
    s_object = share * object_score([p for p, g in pairs if g]) + (1 - share) * object_score(
        [1 - p for p, g in pairs if not g]
    )
    ys = [y for y in range(height) for x in range(width) if mask[y][x]]
    xs = [x for y in range(height) for x in range(width) if mask[y][x]]
    cy, cx = round(sum(ys) / len(ys)) + 1, round(sum(xs) / len(xs)) + 1
    s_region = 0.0
    for rows in (range(cy), range(cy, height)):
        for columns in (range(cx), range(cx, width)):
            part = [(chance[y][x], mask[y][x]) for y in rows for x in columns]
            if part:
                s_region += len(part) / n * likeness(part)
    found = [float(p > 0.5) for p, _ in pairs]
    mean_p, mean_g = sum(found) / n, share
    aligned = 0.0
    for f, (_, g) in zip(found, pairs, strict=True):
        a, b = f - mean_p, g - mean_g
        aligned += (1 + 2 * a * b / (a * a + b * b)) ** 2 / 4
    return {
        "MAE": sum(abs(p - g) for p, g in pairs) / n,
        "IoU": tp / (tp + fp + fn),
        "F-measure": 1.3 * precision * recall / (0.3 * precision + recall),
        "S-measure": 0.5 * s_object + 0.5 * s_region,
        "E-measure": aligned / n,
        "Pixel_Accuracy": (tp + tn) / n,
        "Precision": precision,
        "Recall": recall,
        "Dice_Score": 2 * tp / (2 * tp + fp + fn),
        "Specificity": tn / (tn + fp),
    }


def likeness(part: list[tuple[float, float]]) -> float:
    n = len(part)
    mp, mg = sum(p for p, _ in part) / n, sum(g for _, g in part) / n
    vp, vg = sum((p - mp) ** 2 for p, _ in part) / (n - 1), sum((g - mg) ** 2 for _, g in part) / (n - 1)
    cov = sum((p - mp) * (g - mg) for p, g in part) / (n - 1)
    top, bottom = 4 * mp * mg * cov, (mp**2 + mg**2) * (vp + vg)
    return top / bottom if top else float(bottom == 0)


def test_b30_the_ten_measures_are_those_of_the_reference_averaged_over_samples() -> None:
    logits, masks = some()
    found = segmentation_metrics(logits, masks)
    assert list(found) == NAMES
    rows = [reference(a[0].double().numpy(), b[0].double().numpy()) for a, b in zip(logits, masks, strict=True)]
    for name in NAMES:
        assert found[name] == pytest.approx(np.mean([row[name] for row in rows]), abs=1e-9), name
    assert len({round(row["IoU"], 3) for row in rows}) > 1, "samples that differ: a mean over pixels would not do"


def test_b30_measures_are_averaged_over_samples_not_over_batches() -> None:
    logits, masks = some()
    whole = overlap(logits, masks)
    first, rest = overlap(logits[:1], masks[:1]), overlap(logits[1:], masks[1:])
    assert whole["IoU"] == pytest.approx((first["IoU"] + 5 * rest["IoU"]) / 6)
    assert whole["IoU"] != pytest.approx((first["IoU"] + rest["IoU"]) / 2)
    ten = segmentation_metrics(logits, masks)
    assert whole == {"IoU": pytest.approx(ten["IoU"]), "Dice": pytest.approx(ten["Dice_Score"])}


@pytest.mark.parametrize(
    ("found", "wanted", "iou", "precision", "recall", "specificity"),
    [
        (0, 0, 1.0, 1.0, 1.0, 1.0),
        (1, 1, 1.0, 1.0, 1.0, 1.0),
        (1, 0, 0.0, 0.0, 0.0, 0.0),
        (0, 1, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_b30_empty_and_full_masks_are_defined(
    found: int, wanted: int, iou: float, precision: float, recall: float, specificity: float
) -> None:
    logits, masks = torch.full((1, 1, 6, 6), 40.0 if found else -40.0), torch.full((1, 1, 6, 6), float(wanted))
    ten = segmentation_metrics(logits, masks)
    assert (ten["IoU"], ten["Precision"], ten["Recall"]) == (iou, precision, recall)
    assert ten["Specificity"] == specificity
    assert (ten["S-measure"], ten["E-measure"]) == pytest.approx((float(found == wanted),) * 2)
    assert ten["F-measure"] == float(found == wanted)
    assert overlap(logits, masks)["IoU"] == iou


def test_b30_scores_that_are_no_numbers_are_no_object() -> None:
    _, masks = some(2)
    ten = segmentation_metrics(torch.full_like(masks, math.nan), masks)
    assert ten["IoU"] == 0.0
    assert all(math.isfinite(value) for value in ten.values())
    assert overlap(torch.full_like(masks, math.nan), masks)["IoU"] == 0.0


def test_b30_the_loss_is_the_documented_sum() -> None:
    logits, masks = (one.double() for one in some(3))
    chances = logits.sigmoid()
    pixels = -(masks * chances.log() + (1 - masks) * (1 - chances).log()).mean()
    overlap = []
    for chance, mask in zip(chances, masks, strict=True):
        both = (chance * mask).sum()
        overlap.append(1 - (both + 1) / (chance.sum() + mask.sum() - both + 1))
    expected = 5 * pixels + 3 * torch.stack(overlap).mean() + 2 * edge_loss(chances, masks) + 0.1 * 0.7
    predicted = Predicted(logits.float(), torch.tensor(0.7))
    assert segmentation_loss(predicted, masks).item() == pytest.approx(expected.item(), rel=1e-5)
    assert soft_iou_loss(chances, masks).item() == pytest.approx(torch.stack(overlap).mean().item())
    coarse = functional.avg_pool2d(logits, 2).float()
    more = segmentation_loss(predicted._replace(deep=(coarse,)), masks) - segmentation_loss(predicted, masks)
    upsampled = Predicted(functional.interpolate(coarse, scale_factor=2), torch.zeros(()))
    assert more.item() == pytest.approx(0.4 * segmentation_loss(upsampled, masks).item(), rel=1e-4)


def test_b30_edges_are_those_of_sobel() -> None:
    planes = torch.rand(1, 1, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    padded = np.pad(planes[0, 0].numpy(), 1, mode="edge")
    kernel = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]]) / 4.0
    total = 0.0
    for y in range(5):
        for x in range(5):
            window = padded[y : y + 3, x : x + 3]
            strength = math.sqrt((window * kernel).sum() ** 2 + (window * kernel.T).sum() ** 2 + 1e-6)
            total += (strength - 1e-3) ** 2
    assert edge_loss(planes, torch.zeros_like(planes)).item() == pytest.approx(total / 25, rel=1e-9)


def test_the_loss_is_finite_with_finite_gradients_at_both_ends() -> None:
    for value in (-200.0, 200.0):
        for mask in (0.0, 1.0):
            logits = torch.full((1, 1, 8, 8), value, requires_grad=True)
            loss = segmentation_loss(Predicted(logits, torch.zeros(())), torch.full((1, 1, 8, 8), mask))
            loss.backward()
            assert loss.isfinite()
            assert logits.grad.isfinite().all()
