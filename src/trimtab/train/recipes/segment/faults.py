"""What may go wrong in a segmentation: the documented incident and its relatives, injected on purpose."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from trimtab.core.errors import InputError
from trimtab.train.recipe import Fault, Parts, Settings
from trimtab.train.recipes.segment.stages import ALL
from trimtab.train.trainer import Hook, Trainer

Rows = DataLoader[tuple[Tensor, ...]]

EPOCH, BATCH = 2, 5
"""Where the documented run failed: in the second epoch after unfreezing, batch 5."""
WILD_RATE = 1.0
NUM_BAD_MASKS = 3
FAR_TOO_LARGE = 2.0**60


class Poison:
    """Puts batches together, one of them with an infinite pixel."""

    def __init__(self, at: int) -> None:
        self._at, self._count = at, 0

    def __call__(self, rows: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
        """The next batch; the `at`th has an infinity in its first pixel."""
        self._count += 1
        images, masks = default_collate(rows)
        if self._count == self._at:
            images[0, 0, 0, 0] = math.inf
        return images, masks


def _inf_pixel(parts: Parts, settings: Settings) -> Parts:
    loader = parts.train_loader
    before = sum(stage.epochs for stage in parts.stages if stage.name != ALL)
    if len(loader) < BATCH or parts.stages[-1].epochs < EPOCH:
        raise InputError(
            f"stage 2 has {parts.stages[-1].epochs} epochs of {len(loader)} batches; "
            f"the fault is in epoch {EPOCH}, batch {BATCH}: give more --epochs or pictures"
        )
    return replace(parts, train_loader=_again(loader, Poison((before + EPOCH - 1) * len(loader) + BATCH)))


class SpoiledMasks(Dataset[tuple[Tensor, ...]]):
    """The same rows, the first masks with a NaN."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """A picture and its mask."""
        image, mask = self._rows[index]
        if index < NUM_BAD_MASKS:
            mask = mask.clone()
            mask[:, 0, 0] = math.nan
        return image, mask


def _nan_mask(parts: Parts, settings: Settings) -> Parts:
    return replace(parts, train_loader=_again(parts.train_loader, None, SpoiledMasks(parts.train_loader.dataset)))


def _wild_rate(parts: Parts, settings: Settings) -> Parts:
    first, *others = parts.stages
    return replace(parts, stages=(first, *(replace(stage, learning_rate=WILD_RATE) for stage in others)))


def _overflow(parts: Parts, settings: Settings) -> Parts:
    last = parts.stages[-1]
    scaler = {**last.scaler, "init_scale": FAR_TOO_LARGE}
    config = replace(parts.config, use_amp=True, amp_dtype="fp16")
    return replace(parts, config=config, stages=(*parts.stages[:-1], replace(last, scaler=scaler)))


def _again(loader: Rows, collate: Poison | None, rows: SpoiledMasks | None = None) -> Rows:
    """The same loader over other rows, or with another collate function; in this process, where that can count."""
    return DataLoader(
        rows or loader.dataset,
        batch_size=loader.batch_size,
        shuffle=True,
        generator=loader.generator,
        drop_last=loader.drop_last,
        collate_fn=collate,
    )


def kill_at(step: int) -> Hook:
    """End this process as a power cut would, before that optimizer step, counted over all stages from 1."""

    def kill(trainer: Trainer) -> None:
        if trainer.course.steps_done + 1 == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


FAULTS = (
    Fault(
        name="inf-pixel", summary=f"one pixel is infinite in stage 2, epoch {EPOCH}, batch {BATCH}", inject=_inf_pixel
    ),
    Fault(name="stage2-lr", summary=f"stage 2 runs at a learning rate of {WILD_RATE:g}", inject=_wild_rate),
    Fault(name="nan-mask", summary=f"{NUM_BAD_MASKS} training masks hold a NaN", inject=_nan_mask),
    Fault(
        name="scaler-overflow",
        summary="float16 with far too large a loss scale: routine for a scaler, and no alarm",
        inject=_overflow,
    ),
)
