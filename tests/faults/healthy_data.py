"""Healthy oddities of the data: noise, rare and hard samples, order, shifts, augmentation, sizes, repetition."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.faults.base import Run, set_lr
from tests.faults.families import WINDOW, split, text
from tests.faults.healthy_tools import (
    CLASSES,
    PIXELS,
    TOKENS,
    dice,
    fell,
    healthy,
    learned_if,
    on_batch,
    pretrain,
    rate,
    schedule,
)
from tests.runs.programs import digits

IMAGES = ("mlp", "cnn")  # digits and their classes


def other_source(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The same samples from another camera or in another language: images turned, texts read backwards."""
    if x.dtype == torch.int64:
        return y.flip(1), x.flip(1)
    if x.dim() == 4:
        return x * 0.4 + 0.3, y
    if x.shape[1] == 64:
        return x.view(-1, 8, 8).transpose(1, 2).flatten(1), y
    return x.flip(1), y.flip(1)


def first(count: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The first samples of a batch."""
    return x[:count], y[:count]


@healthy("mlp", "cnn", "rnn", "segment", steps=240)
def batch_of_one(run: Run) -> None:
    """One sample at a time: single losses and gradients jump by orders of magnitude."""
    set_lr(run.optimizer, rate(run) / (10 if run.task.family == "cnn" else 2))
    on_batch(run, lambda x, y: first(1, x, y))


@healthy(steps=200)
def batch_of_three(run: Run) -> None:
    """Three samples at a time, for ever noisy."""
    set_lr(run.optimizer, rate(run) / 2)
    on_batch(run, lambda x, y: first(3, x, y))


@healthy(steps=120)
def batch_size_of_any_kind(run: Run) -> None:
    """Every batch has another size, from two samples up."""
    on_batch(run, lambda x, y: first(int(torch.randint(2, len(x) + 1, (), generator=dice(run))), x, y))


@healthy(steps=120)
def last_batch_is_small(run: Run) -> None:
    """Every twelfth batch is the rest of an epoch, two samples only: its loss is an outlier, and so is its gradient."""
    on_batch(run, lambda x, y: first(2 if run.step % 12 == 11 else len(x), x, y))


@healthy(*PIXELS)
def heavy_tailed_inputs(run: Run) -> None:
    """Inputs with noise of a Student-t distribution: single pixels lie far outside the usual."""

    def disturb(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        generator = dice(run)
        normal = torch.randn(x.shape, generator=generator)
        spread = torch.randn((3, *x.shape), generator=generator).square().mean(0).sqrt()
        return x + 0.15 * normal / spread.clamp(min=0.02), y

    on_batch(run, disturb)


@healthy("mlp", "cnn", "rnn", "segment")
def labels_wrong_in_part(run: Run) -> None:
    """Four of ten labels are wrong (two of ten pixels), so that the loss falls a little and stays high."""
    classes = run.task.num_classes

    def confuse(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        generator = dice(run)
        dice_rolls = torch.rand(y.shape, generator=generator)
        if classes is None:
            return x, torch.where(dice_rolls < 0.2, 1 - y, y)
        return x, torch.where(dice_rolls < 0.4, torch.randint(classes, y.shape, generator=generator), y)

    on_batch(run, confuse)


@healthy(steps=180)
def hard_samples_now_and_then(run: Run) -> None:
    """Every thirty steps a third of the batch is of a rare kind: the loss spikes each time, a little less each time."""

    def mix(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if run.step % 30 != 20:
            return x, y
        count = len(x) // 3
        x_rare, y_rare = other_source(x[:count], y[:count])
        return torch.cat([x_rare, x[count:]]), torch.cat([y_rare, y[count:]])

    on_batch(run, mix)


@healthy()
def easy_to_hard(run: Run) -> None:
    """A curriculum: the loss falls and then rises, because inputs get noisier step by step."""

    def harden(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        generator = dice(run)
        level = max(run.step - 60, 0) / 100
        if x.dtype == torch.int64:
            swap = torch.rand(x.shape, generator=generator) < 0.6 * level
            return torch.where(swap, x.flatten()[torch.randperm(x.numel(), generator=generator)].view_as(x), x), y
        return x + 0.6 * level * torch.randn(x.shape, generator=generator), y

    on_batch(run, harden)


@healthy(*IMAGES, steps=200)
def sorted_by_class(run: Run) -> None:
    """Most of a batch is of one class, the next one after six steps: the loss is a saw, and it still learns."""
    (x, y), train = digits(), split()[0]

    def group(some: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        pool = train[y[train] == run.step // 6 % 10]
        rows = pool[torch.randint(len(pool), (16,), generator=dice(run))]
        return torch.cat([some[:16], x[rows]]), torch.cat([labels[:16], y[rows]])

    on_batch(run, group)


@healthy(*TOKENS)
def text_in_its_order(run: Run) -> None:
    """Nothing is shuffled: every batch is the next page, and chapters are easy or hard."""
    tokens = text()[: len(text()) * 9 // 10]

    def draw() -> tuple[Tensor, ...]:
        at = run.step * 6 * WINDOW % (len(tokens) - 6 * WINDOW - 1)
        piece = tokens[at : at + 6 * WINDOW + 1]
        return piece[:-1].view(6, WINDOW), piece[1:].view(6, WINDOW)

    run.draw = draw  # type: ignore[method-assign]


@healthy(steps=180)
def new_source_in_the_middle(run: Run) -> None:
    """From the middle on, half of every batch comes from a new source: the loss rises within a step, then falls."""

    def shift(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if run.step < 90:
            return x, y
        half = len(x) // 2
        x_new, y_new = other_source(x[:half], y[:half])
        return torch.cat([x_new, x[half:]]), torch.cat([y_new, y[half:]])

    on_batch(run, shift)


@healthy("mlp", "cnn", "segment")
def mixed_up(run: Run) -> None:
    """Mixup: images are blends, and two forwards share the loss; it stays high as no blend has one answer."""
    loss_of = run.task.loss

    def forward(batch: tuple[Tensor, ...]) -> Tensor:
        x, y = batch
        generator = dice(run)
        share = float(torch.rand((), generator=generator))
        order = torch.randperm(len(x), generator=generator)
        blend = share * x + (1 - share) * x[order]
        return share * loss_of(run.model, (blend, y)) + (1 - share) * loss_of(run.model, (blend, y[order]))

    run.forward = forward  # type: ignore[method-assign]


@healthy(*PIXELS)
def erased_at_random(run: Run) -> None:
    """A third of all pixels is set to zero at random, so that inputs are sparse and some samples unreadable."""
    on_batch(run, lambda x, y: (x * (torch.rand(x.shape, generator=dice(run)) > 0.33), y))


@healthy(*PIXELS)
def scaled_at_random(run: Run) -> None:
    """Each batch is brighter or darker by a factor of up to three, so that activations and gradients jump."""
    on_batch(run, lambda x, y: (x * 3 ** float(torch.rand((), generator=dice(run)) * 2 - 1), y))


@healthy("mlp", "cnn", "contrastive")
def half_of_inputs_always_zero(run: Run) -> None:
    """Half of the pixels are masked for ever: their weights have gradients of exactly zero."""

    def mask(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        keep = torch.arange(x.shape[1]) % 2 == 0
        return x * keep, y * keep if y.is_floating_point() else y

    on_batch(run, mask)
    run.task.val_batch = mask(*run.task.val_batch)


@healthy(*IMAGES, steps=240)
def classes_out_of_balance(run: Run) -> None:
    """Nineteen of twenty samples are of one class: the loss is low from the start, and jumps at every other sample."""
    (x, y), train = digits(), split()[0]
    common, rare = train[y[train] == 0], train[y[train] > 0]

    def draw() -> tuple[Tensor, ...]:
        generator = dice(run)
        which = torch.rand(32, generator=generator)
        rows = torch.where(
            which < 0.95,
            common[torch.randint(len(common), (32,), generator=generator)],
            rare[torch.randint(len(rare), (32,), generator=generator)],
        )
        return x[rows], y[rows]

    run.draw = draw  # type: ignore[method-assign]
    learned_if(run, lambda: fell(run, 0.4))


@healthy(*TOKENS)
def padded_batches(run: Run) -> None:
    """Most of a batch is padding that has no loss, and how much differs from batch to batch."""

    def pad(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        lengths = torch.randint(3, WINDOW, (len(x), 1), generator=dice(run))
        beyond = torch.arange(WINDOW) >= lengths
        return x.masked_fill(beyond, 0), y.masked_fill(beyond, -100)

    on_batch(run, pad)


@healthy(*TOKENS)
def lengths_of_any_kind(run: Run) -> None:
    """Batches of short sequences have other losses and gradients than batches of long ones; the rest is unused."""

    def cut(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        length = int(torch.randint(4, WINDOW + 1, (), generator=dice(run)))
        return x[:, :length], y[:, :length]

    on_batch(run, cut)


@healthy()
def one_batch_for_ever(run: Run) -> None:
    """The same batch at every step, learned by heart: the sanity check that everybody runs before training."""
    run.draw = lambda: run.task.batch(0, 0)  # type: ignore[method-assign]
    learned_if(run, lambda: fell(run, 0.85))


@healthy()
def epochs_of_seven_steps(run: Run) -> None:
    """Seven batches in the same order again and again: losses repeat with an exact period."""
    run.draw = lambda: run.task.batch(run.step % 7, 0)  # type: ignore[method-assign]
    learned_if(run, lambda: fell(run, 0.85))


@healthy()
def four_steps_on_each_batch(run: Run) -> None:
    """Each batch is used four times in a row: the loss falls within it and jumps at the next."""
    run.draw = lambda: run.task.batch(run.step // 4, 0)  # type: ignore[method-assign]


@healthy(*CLASSES, steps=120)
def already_learned(run: Run) -> None:
    """Fine-tuning: the loss begins as low as it will end, at a tenth of the rate, and does not fall any more."""
    pretrain(run, 120)
    set_lr(run.optimizer, rate(run) / 10)


@healthy()
def long_after_convergence(run: Run) -> None:
    """Trained on for long at a falling rate: a plateau from the first guarded step to the last."""
    pretrain(run, 100)
    schedule(run, lambda i: 0.3 * (1 - i / 160))
