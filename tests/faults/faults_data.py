"""Faults of the data: what the loader gives is broken, blank, mislabelled, out of range or the same again."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.faults.base import Case, Run
from tests.faults.inject import (
    CLASSES,
    ONSET,
    REAL,
    alter,
    alter_once,
    fault,
    inputs,
    put,
    targets,
)  # fmt: skip

DATA: dict[str, Case] = {}
HURT = ("loss-spike", "exploding-gradient", "diverging-loss")
UNLEARNABLE = ("targets-do-not-predict", "not-learning")
LOST = ("nonfinite-loss", "nonfinite-gradient", "nonfinite-weight")


LENGTH = {"mlp": 44, "cnn": 44, "rnn": 140, "lm": 210, "contrastive": 44, "segment": 89}  # batches in an epoch


class Loader:
    """As much of a data loader as is known to a guard: its length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def known_loader(run: Run) -> None:
    """Tell the guard how long an epoch is."""
    run.extra["loader"] = Loader(LENGTH[run.task.family])


@fault(DATA, "data", "abrupt", "constant-batch", "collapsed-output", *HURT, at=ONSET, silent=True)
def inputs_blank(run: Run) -> None:
    """Every sample is zeros from now on."""
    alter(run, "draw", inputs(torch.zeros_like))


@fault(DATA, "data", "wiring", "constant-batch", "collapsed-output", *UNLEARNABLE)
def inputs_constant_from_the_start(run: Run) -> None:
    """Every sample is the same."""
    if run.task.family == "contrastive":
        alter(run, "draw", lambda batch: tuple(torch.full_like(x, 0.5) for x in batch))
    else:
        alter(run, "draw", inputs(torch.ones_like))


@fault(DATA, "data", "wiring", "repeated-batch", "data-replayed", "overfitting", at=ONSET, silent=True)
def same_batch_again(run: Run) -> None:
    """The loader gives the same batch again and again from now on."""
    batch = run.task.batch(ONSET, 0)
    run.draw = lambda: batch  # type: ignore[method-assign]


@fault(DATA, "data", "wiring", "repeated-batch", "data-replayed", "overfitting", onset=1, silent=True)
def first_batch_for_ever(run: Run) -> None:
    """`next(iter(loader))` in the loop, without shuffling: the first batch for ever."""
    known_loader(run)
    run.draw = lambda: run.task.batch(0, 0)  # type: ignore[method-assign]


@fault(
    DATA, "data", "wiring", "data-replayed", "repeated-batch", "overfitting", at=30, setup=known_loader, silent=True
)  # fmt: skip
def loader_restarts(run: Run) -> None:
    """The loader is begun anew after every ten batches and gives the same ten again."""
    run.draw = lambda: run.task.batch(run.step % 10, run.micro)  # type: ignore[method-assign]


@fault(
    DATA, "data", "drift", "data-replayed", "repeated-batch", "overfitting", at=40, setup=known_loader, silent=True
)  # fmt: skip
def resumed_at_the_beginning(run: Run) -> None:
    """After a resume within an epoch the loader begins at its first batch again."""
    run.draw = lambda: run.task.batch(run.step - 40, run.micro)  # type: ignore[method-assign]


@fault(DATA, "data", "nonfinite", "empty-batch", *LOST, "step-exception", at=ONSET, silent=True)
def empty_batch(run: Run) -> None:
    """A filter leaves nothing of one batch."""
    alter_once(run, "draw", lambda batch: tuple(x[:0] for x in batch))


@fault(DATA, "data", "abrupt", "label-range", "step-exception", at=ONSET, families=CLASSES)
def label_out_of_range(run: Run) -> None:
    """One label is one too high: classes counted from one."""
    alter_once(run, "draw", targets(put((0, ...), float(run.task.num_classes or 0))))


@fault(DATA, "data", "abrupt", "label-range", "step-exception", at=ONSET, families=CLASSES)
def label_negative(run: Run) -> None:
    """One label is -1, and nobody said that it means none."""
    alter_once(run, "draw", targets(put((0, ...), -1)))


@fault(DATA, "data", "abrupt", "label-range", "step-exception", at=ONSET, families=("rnn", "lm"))
def token_out_of_vocabulary(run: Run) -> None:
    """The tokeniser knows more tokens than the embedding."""
    alter_once(run, "draw", inputs(put((0, 0), float(run.task.num_classes or 0))))


def shuffle(run: Run) -> None:
    """Give every sample another one's target."""

    def mixed(y: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(run.step)
        return y.flatten()[torch.randperm(y.numel(), generator=generator)].view_as(y) if y.dtype == torch.int64 else (
            y[torch.randperm(len(y), generator=generator)]
        )  # fmt: skip

    alter(run, "draw", targets(mixed))


@fault(DATA, "data", "drift", *UNLEARNABLE)
def labels_shuffled(run: Run) -> None:
    """Every sample has another one's target from the start."""
    shuffle(run)


@fault(DATA, "data", "drift", "targets-do-not-predict", *HURT, "not-learning", at=ONSET)
def labels_shuffled_midway(run: Run) -> None:
    """Every sample has another one's target from now on."""
    shuffle(run)


@fault(DATA, "data", "drift", *UNLEARNABLE)
def targets_off_by_one(run: Run) -> None:
    """Samples and targets are read from two lists, one of which lacks its first entry."""
    alter(run, "draw", targets(lambda y: y.roll(1, 0)))


@fault(
    DATA, "data", "abrupt", "outlier-batch", *HURT, "oscillating-loss", "update-ratio", "collapsed-output",
    at=ONSET, families=REAL, silent=True,
)  # fmt: skip
def inputs_not_normalised(run: Run) -> None:
    """The inputs are bytes from now on, 255 times as large (BatchNorm hides it until the model is used elsewhere)."""
    alter(run, "draw", inputs(lambda x: x * 255))


@fault(DATA, "data", "abrupt", "outlier-batch", *HURT, *LOST, at=ONSET, families=REAL)
def outlier_sample(run: Run) -> None:
    """One sensor reading of one sample is a million."""
    alter_once(run, "draw", inputs(put((2, ..., 4), 1e6)))


@fault(
    DATA, "data", "abrupt", "outlier-batch", "label-range", *HURT, "update-ratio", at=ONSET, families=("segment",),
    silent=True,
)  # fmt: skip
def masks_in_bytes(run: Run) -> None:
    """The masks are 0 and 255 from now on: the loss falls below zero without end."""
    alter(run, "draw", targets(lambda y: y * 255))


@fault(
    DATA, "data", "wiring", "label-range", "outlier-batch", "diverging-loss", "exploding-gradient",
    families=("segment",), silent=True,
)  # fmt: skip
def masks_in_bytes_from_the_start(run: Run) -> None:
    """The masks are 0 and 255: the loss falls below zero without end."""
    alter(run, "draw", targets(lambda y: y * 255))


@fault(
    DATA, "data", "drift", "constant-batch", "collapsed-output", "targets-do-not-predict", "loss-spike",
    at=ONSET, families=CLASSES, silent=True,
)  # fmt: skip
def one_class_only(run: Run) -> None:
    """Every target is the same from now on: the model learns to say nothing else."""
    alter(run, "draw", targets(lambda y: torch.full_like(y, 3)))


@fault(DATA, "data", "drift", "repeated-rows", silent=True, families=("mlp", "cnn", "contrastive"))
def samples_four_times(run: Run) -> None:
    """Four loader workers share one random state: every sample stands in the batch four times."""
    alter(run, "draw", lambda batch: tuple(torch.cat([part[: len(part) // 4]] * 4) for part in batch))


@fault(DATA, "data", "abrupt", "step-exception", at=ONSET)
def sample_of_another_shape(run: Run) -> None:
    """One batch has another shape than all others."""
    family = run.task.family
    alter_once(run, "draw", inputs(lambda x: x.repeat(1, 2) if family != "segment" else x.repeat(1, 2, 1, 1)))


@fault(DATA, "data", "abrupt", "step-exception", at=ONSET)
def out_of_memory(run: Run) -> None:
    """The forward pass runs out of memory."""

    def fail(value: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")

    alter_once(run, "forward", fail)
