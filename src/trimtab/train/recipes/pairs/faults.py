"""The incidents of the document, injected on purpose: each is answered under a guard, and ruins the run without."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from trimtab.train.recipe import Fault, Parts, Settings
from trimtab.train.recipes.pairs.data import PairSet

HIGH_RATE = 10.0
FLIPPED = 1e30
FLIP_AT = 0.5
"""How much of the last stage is over when a bit flips."""


def _nan_pixel(parts: Parts, settings: Settings) -> Parts:
    """One image that many pairs show has one pixel of NaN."""
    data = parts.train_loader.dataset
    shown = int(torch.cat([data.asked.first, data.asked.second]).bincount().argmax())
    images = data.images.clone()
    images[shown, 0, 0, 0] = math.nan
    return replace(parts, train_loader=_with(parts.train_loader, PairSet(images, data.asked), settings))


def _rate(parts: Parts, settings: Settings) -> Parts:
    """The rate of the last stage is ten, in every group."""
    *before, last = parts.stages
    return replace(parts, stages=(*before, replace(last, learning_rate=HIGH_RATE, lr_factors={})))


def _bit_flip(parts: Parts, settings: Settings) -> Parts:
    """One weight is overwritten from outside, as by a bit that flips."""
    last, total = parts.stages[-1], parts.stages[-1].epochs * len(parts.train_loader)

    def flip(trainer: Any) -> None:
        if parts.before_step is not None:
            parts.before_step(trainer)
        if trainer.rig.stage.name == last.name and trainer.course.step == int(FLIP_AT * total):
            with torch.no_grad():
                trainer.model.head.weight[0, 0] = FLIPPED

    return replace(parts, before_step=flip)


def _with(loader: DataLoader[Any], data: PairSet, settings: Settings) -> DataLoader[Any]:
    return DataLoader(
        data,
        batch_size=loader.batch_size,
        shuffle=True,
        drop_last=True,
        pin_memory=loader.pin_memory,
        generator=torch.Generator().manual_seed(settings["seed"]),
    )


FAULTS = (
    Fault(name="nan-pixel", summary="one image has a pixel of NaN", inject=_nan_pixel),
    Fault(name="lr-10", summary=f"the learning rate of the last stage is {HIGH_RATE:g}", inject=_rate),
    Fault(name="bit-flip", summary=f"half-way through the last stage a weight becomes {FLIPPED:g}", inject=_bit_flip),
)
