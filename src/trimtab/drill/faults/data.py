"""Faults of the data: what the loader gives is broken, blank, mislabelled, out of range or the same again."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.doctor.batch_tensors import mapped
from trimtab.drill.injection import HURT, NONFINITE, alter, alter_once, fault, inputs, spoilt, targets
from trimtab.drill.score import Fault, NotApplicableError
from trimtab.drill.trial import Run

DATA: list[Fault] = []
NO_CLASS = 1 << 24


@fault(DATA, "data", "nonfinite-input", *NONFINITE)
def nan_in_inputs(run: Run) -> None:
    """One number of one batch is NaN."""
    alter_once(run, "draw", inputs(run, spoilt(torch.nan)))


@fault(DATA, "data", "nonfinite-input", *NONFINITE)
def inf_in_inputs(run: Run) -> None:
    """One number of one batch is infinite."""
    alter_once(run, "draw", inputs(run, spoilt(torch.inf)))


@fault(DATA, "data", "outlier-batch", *HURT, "update-ratio", "weight-jump", silent=True)
def inputs_thousandfold(run: Run) -> None:
    """The inputs of one batch are a thousand times as large."""
    alter_once(run, "draw", inputs(run, lambda x: x * 1000))


@fault(DATA, "data", "outlier-batch", *HURT, "oscillating-loss", "update-ratio", "collapsed-output", silent=True)
def inputs_not_normalised(run: Run) -> None:
    """The inputs are bytes from now on, 255 times as large."""
    alter(run, "draw", inputs(run, lambda x: x * 255))


@fault(DATA, "data", "constant-batch", "collapsed-output", *HURT, silent=True)
def inputs_blank(run: Run) -> None:
    """Every sample is zeros from now on."""
    alter(run, "draw", inputs(run, torch.zeros_like, real=False))


@fault(DATA, "data", "repeated-batch", "data-replayed", "overfitting", silent=True)
def same_batch_again(run: Run) -> None:
    """The loader gives one batch again and again from now on."""
    batch = run.draw()
    run.draw = lambda: batch  # type: ignore[method-assign]


@fault(DATA, "data", "empty-batch", *NONFINITE, "step-exception", silent=True)
def empty_batch(run: Run) -> None:
    """A filter leaves nothing of one batch."""
    alter_once(run, "draw", lambda batch: mapped(batch, lambda _, t: t[:0] if t.dim() else t))


@fault(DATA, "data", "label-range", "step-exception")
def label_out_of_range(run: Run) -> None:
    """One label is higher than there are classes."""

    def raised(y: Tensor) -> Tensor:
        y.view(-1)[0] = NO_CLASS
        return y

    alter_once(run, "draw", targets(run, lambda y: raised(y.contiguous()), whole=True))


@fault(DATA, "data", "targets-do-not-predict", *HURT, "not-learning")
def targets_shuffled(run: Run) -> None:
    """Every sample has another one's target from now on."""

    def mixed(y: Tensor) -> Tensor:
        if len(y) < 2:
            raise NotApplicableError("a batch is one sample: there is no other target")
        return y[torch.randperm(len(y), generator=torch.Generator().manual_seed(run.step)).to(y.device)]

    alter(run, "draw", targets(run, mixed))


@fault(
    DATA, "data", "constant-batch", "collapsed-output", "targets-do-not-predict", "loss-spike", silent=True
)  # fmt: skip
def one_class_only(run: Run) -> None:
    """Every target is the same class from now on."""
    alter(run, "draw", targets(run, lambda y: torch.zeros_like(y) + y.reshape(-1)[0], whole=True))
