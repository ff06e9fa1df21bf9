"""Faults of numbers: NaN, Inf, overflow and underflow, from wherever they really come, and mixed precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.faults.base import Case, Run
from tests.faults.inject import (
    CLASSES,
    NORMED,
    ONSET,
    REAL,
    alter,
    alter_once,
    before,
    fault,
    head,
    inputs,
    moments,
    put,
    rebuild,
    targets,
    weight,
)  # fmt: skip

NUMERICS: dict[str, Case] = {}
BAD = ("nonfinite-loss", "nonfinite-gradient", "nonfinite-weight")


@fault(NUMERICS, "numerics", "nonfinite", "nonfinite-input", *BAD, at=ONSET, families=REAL)
def nan_sample(run: Run) -> None:
    """One number of one sample is NaN."""
    alter_once(run, "draw", inputs(put((3, ..., 5), torch.nan)))


@fault(NUMERICS, "numerics", "nonfinite", "nonfinite-input", *BAD, at=ONSET, families=REAL)
def inf_sample(run: Run) -> None:
    """One number of one sample is infinite."""
    alter_once(run, "draw", inputs(put((0, ..., 2), torch.inf)))


@fault(NUMERICS, "numerics", "nonfinite", "nonfinite-input", *BAD, at=ONSET, families=("segment",))
def nan_target(run: Run) -> None:
    """One pixel of one mask is NaN."""
    alter_once(run, "draw", targets(put((1, ..., 3), torch.nan)))


@fault(NUMERICS, "numerics", "nonfinite", "nonfinite-input", "constant-batch", *BAD, at=ONSET, families=REAL)
def blank_batch_normalised(run: Run) -> None:
    """A blank batch is divided by its standard deviation, which is zero."""
    alter_once(run, "draw", inputs(lambda x: (x * 0) / (x * 0).std()))


@fault(NUMERICS, "numerics", "nonfinite", "nonfinite-loss", at=ONSET, silent=True)
def nan_in_loss_only(run: Run) -> None:
    """A constant term of the loss is NaN; the gradients are right."""
    alter_once(run, "forward", lambda loss: loss + torch.nan)


@fault(NUMERICS, "numerics", "nonfinite", *BAD, at=ONSET)
def inf_loss_weight(run: Run) -> None:
    """The loss is divided by a count that is zero."""
    alter_once(run, "forward", lambda loss: loss / 0)


@fault(NUMERICS, "numerics", "nonfinite", *BAD, at=ONSET)
def log_of_zero(run: Run) -> None:
    """An entropy term takes 0 * log(0)."""

    def entropy(loss: Tensor) -> Tensor:
        chance = (weight(run) * 0).flatten()
        return loss - 0.01 * (chance * chance.log()).sum()

    alter_once(run, "forward", entropy)


@fault(NUMERICS, "numerics", "nonfinite", "nonfinite-gradient", "nonfinite-weight", "nonfinite-loss", at=ONSET)
def root_of_zero_backward(run: Run) -> None:
    """A distance to itself: the loss is finite, the derivative of the root at zero is not."""
    alter_once(
        run, "forward", lambda loss: loss + 0.1 * (weight(run) - weight(run).detach()).square().sum().sqrt()
    )  # fmt: skip


@fault(NUMERICS, "numerics", "nonfinite", "nonfinite-gradient", "nonfinite-weight", "nonfinite-loss", at=ONSET)
def where_hides_nan(run: Run) -> None:
    """`where` keeps the log of zero out of the loss, not out of the gradient."""

    def masked(loss: Tensor) -> Tensor:
        positive = weight(run) * (weight(run) > 0)
        return loss + 1e-3 * torch.where(positive > 0, positive.log(), 0.0).mean()

    alter_once(run, "forward", masked)


@fault(NUMERICS, "numerics", "nonfinite", *BAD, "zero-gradient", at=ONSET, families=CLASSES, silent=True)
def every_label_ignored(run: Run) -> None:
    """All labels of a batch are the one that is left out: the mean of nothing."""
    alter_once(run, "draw", targets(lambda y: torch.full_like(y, -100)))


@fault(NUMERICS, "numerics", "nonfinite", *BAD, at=ONSET)
def empty_mask(run: Run) -> None:
    """The loss is a sum under a mask, divided by how many it keeps, which is none."""
    alter_once(run, "forward", lambda loss: loss * 0 / torch.tensor(0.0))


@fault(NUMERICS, "numerics", "nonfinite", "nonfinite-gradient", "nonfinite-weight", "nonfinite-loss", at=ONSET)
def nan_in_one_gradient(run: Run) -> None:
    """One element of one gradient is NaN."""
    before(run, "after_backward", lambda: spoil_gradient(run, torch.nan, run.step == ONSET))


@fault(NUMERICS, "numerics", "nonfinite", "nonfinite-gradient", "nonfinite-weight", "nonfinite-loss", at=ONSET)
def inf_gradient_clipped(run: Run) -> None:
    """One gradient is infinite, and clipping to a norm spreads it over all of them."""
    run.clip = 1e3  # clips nothing else
    before(run, "after_backward", lambda: spoil_gradient(run, torch.inf, run.step == ONSET))


def spoil_gradient(run: Run, value: float, now: bool) -> None:
    """Put a value into a gradient."""
    if now:
        grad = weight(run).grad
        assert grad is not None
        grad.view(-1)[7] = value


@fault(NUMERICS, "numerics", "nonfinite", "nonfinite-weight", "weight-corrupted", *BAD[:2], at=ONSET)
def nan_in_weight(run: Run) -> None:
    """One weight becomes NaN between two steps."""
    with torch.no_grad():
        weight(run).view(-1)[3] = torch.nan


@fault(
    NUMERICS, "numerics", "nonfinite", "nonfinite-buffer", "nonfinite-validation",
    at=ONSET, families=NORMED, silent=True,
)  # fmt: skip
def nan_in_batchnorm(run: Run) -> None:
    """A running variance is NaN: training goes on as if nothing had happened, evaluation is lost."""
    run.validate_every = 20
    norm = next(m for m in run.model.modules() if isinstance(m, nn.BatchNorm2d))
    assert norm.running_var is not None
    norm.running_var[2] = torch.nan


@fault(NUMERICS, "state", "nonfinite", "nonfinite-optimizer-state", "nonfinite-weight", *BAD[:2], at=ONSET)
def nan_in_moment(run: Run) -> None:
    """One number in the optimizer's memory is NaN."""
    moments(run)[2].view(-1)[0] = torch.nan


@fault(NUMERICS, "numerics", "nonfinite", "nonfinite-validation", at=ONSET, silent=True)
def nan_in_validation_only(run: Run) -> None:
    """The validation loss is divided by zero; training is well."""
    run.validate_every = 20
    loss = run.task.loss
    run.task.loss = lambda model, batch: loss(model, batch) * (1.0 if model.training else torch.nan)


@fault(NUMERICS, "amp", "nonfinite", *BAD, since=ONSET)
def fp16_activation_overflow(run: Run) -> None:
    """The last layer's output leaves the range of fp16 once."""
    if run.step == ONSET:
        hook = head(run).register_forward_hook(lambda module, args, out: (out * 1e8).half().float())
        run.extra["hook"] = hook
    elif run.step == ONSET + 1:
        run.extra["hook"].remove()


@fault(NUMERICS, "amp", "nonfinite", *BAD, "gradient-underflow", families=("mlp", "contrastive", "lm"))
def adam_in_pure_fp16(run: Run) -> None:
    """All of the model is fp16, where Adam's eps is zero: 0 / 0 for every gradient that underflows."""
    run.model.half()
    rebuild(run, torch.optim.Adam, lr=3e-3, foreach=False)
    alter(run, "draw", lambda batch: tuple(x.half() if x.is_floating_point() else x for x in batch))


@fault(NUMERICS, "amp", "drift", "weights-unchanged", "update-ratio", "not-learning", "learning-rate")
def bf16_weights_swallow_updates(run: Run) -> None:
    """The weights are bf16, and the updates are smaller than their rounding."""
    run.model.bfloat16()
    rebuild(run, torch.optim.SGD, lr=1e-4)
    alter(run, "draw", lambda batch: tuple(x.bfloat16() if x.is_floating_point() else x for x in batch))


@fault(
    NUMERICS, "amp", "drift", "gradient-underflow", "zero-gradient", "vanishing-gradient", "not-learning",
    "update-ratio", silent=True,
)  # fmt: skip
def fp16_gradients_underflow(run: Run) -> None:
    """Autocast to fp16 without a scaler, and a loss so small that most gradients round to zero."""
    run.autocast = torch.float16
    alter(run, "forward", lambda loss: loss * 1e-6)


def with_scaler(run: Run, autocast: torch.dtype | None = torch.float16) -> None:
    """A loss scaler, and fp16 to give it a reason."""
    run.autocast, run.scaler = autocast, torch.amp.GradScaler(run.device.type, init_scale=1024.0)


@fault(NUMERICS, "amp", "wiring", "scale-collapse", "nonfinite-loss", "nonfinite-gradient", at=ONSET, setup=with_scaler)
def scale_collapses(run: Run) -> None:
    """The loss overflows fp16 in every step from now on: the scaler halves its scale for ever."""
    alter(run, "forward", lambda loss: (loss.half() * 1e4 * 1e4).square())  # no scale makes its gradient finite


@fault(NUMERICS, "amp", "wiring", "scale-collapse", "nonfinite-gradient", at=ONSET, setup=with_scaler, silent=True)
def scale_collapses_quietly(run: Run) -> None:
    """One gradient overflows in every step from now on: the loss is finite, and no update is made any more."""
    before(run, "after_backward", lambda: spoil_gradient(run, torch.inf, True))


@fault(NUMERICS, "amp", "wiring", "clip-before-unscale", "chronic-clipping", silent=True)
def clip_before_unscale(run: Run) -> None:
    """The scaled gradients are clipped to 1.0: after unscaling next to nothing is left."""
    with_scaler(run)
    before(run, "after_backward", lambda: nn.utils.clip_grad_norm_(run.model.parameters(), 1.0))


@fault(NUMERICS, "amp", "drift", "needless-scaler", steps=320, families=("mlp", "cnn", "contrastive"), silent=True)
def scaler_in_fp32(run: Run) -> None:
    """A loss scaler where nothing is fp16: it costs time and does no harm, so there is no hurry."""
    with_scaler(run, autocast=None)


@fault(NUMERICS, "amp", "wiring", "needless-scaler", silent=True)
def scaler_in_bf16(run: Run) -> None:
    """A loss scaler beside bf16, which has the range of fp32."""
    with_scaler(run, autocast=torch.bfloat16)


@fault(NUMERICS, "amp", "abrupt", "step-exception", at=ONSET, setup=with_scaler)
def unscaled_twice(run: Run) -> None:
    """`unscale_` is called by the loop and again for clipping: the second call is refused."""
    run.clip = 1.0
    before(run, "after_backward", lambda: run.scaler and run.scaler.unscale_(run.optimizer))
