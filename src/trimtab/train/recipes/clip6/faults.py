"""Incidents of six-modality training, to be injected on purpose."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from trimtab.train.recipe import Fault, Parts, Settings, rate_spike
from trimtab.train.recipes.clip6.views import make_loader

LOST_FRAC = 0.05
SPIKE_STEPS = 10


def _with_views(parts: Parts, settings: Settings, views: list[Tensor]) -> Parts:
    return replace(parts, train_loader=make_loader(views, parts.config.batch_size, settings["seed"]))


def _views(parts: Parts) -> list[Tensor]:
    return [view.clone() for view in parts.train_loader.dataset.tensors]


def _nan_image(parts: Parts, settings: Settings) -> Parts:
    views = _views(parts)
    views[0].flatten(1)[0, 7] = math.nan
    # The samples of that batch are left out from then on: as many steps take more epochs.
    config = replace(parts.config, num_epochs=2 * parts.config.num_epochs)
    return replace(_with_views(parts, settings, views), config=config)


def _zero_rows(parts: Parts, settings: Settings) -> Parts:
    views = _views(parts)
    draw = torch.Generator().manual_seed(settings["seed"])
    for view in views[1:]:
        view[torch.rand(len(view), generator=draw) < LOST_FRAC] = 0.0
    return _with_views(parts, settings, views)


def _lr_spike(parts: Parts, settings: Settings) -> Parts:
    """A bug multiplies the rate by 1000 for some steps: written into the optimizer, and taken out again."""
    first = settings["steps"] // 2
    return rate_spike(parts, lambda trainer: first <= trainer.course.step < first + SPIKE_STEPS)


FAULTS = (
    Fault(name="nan-image", summary="one training picture holds a NaN", inject=_nan_image),
    Fault(
        name="lr-x1000",
        summary=f"the rate is 1000 times too high for {SPIKE_STEPS} steps in the middle",
        inject=_lr_spike,
    ),
    Fault(
        name="zero-rows",
        summary=f"{LOST_FRAC:.0%} of the names are lost, and their rows zero: --loss original makes NaN of them",
        inject=_zero_rows,
    ),
)
