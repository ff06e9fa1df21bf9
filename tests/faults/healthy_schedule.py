"""Healthy oddities of the rate and of the loop: schedules, precision, clipping, accumulation, scale of the loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.faults.base import Run, set_lr
from tests.faults.healthy_tools import (
    CLASSES,
    after,
    at_step,
    before,
    dice,
    fell,
    healthy,
    learned_if,
    on_batch,
    on_loss,
    rate,
    rebuild,
    schedule,
)

ADAPTIVE = ("mlp", "rnn", "lm", "contrastive", "segment")  # these optimizers do not mind the scale of the loss


@healthy()
def warmup_short(run: Run) -> None:
    """The first update is of size zero and the next ones tiny: a warm-up from nothing in ten steps."""
    schedule(run, lambda i: min(i / 10, 1.0))


@healthy()
def warmup_long(run: Run) -> None:
    """The loss hardly moves for a long while, because three quarters of the run are warm-up."""
    schedule(run, lambda i: min(i / 120, 1.0))


@healthy()
def cosine_to_zero(run: Run) -> None:
    """Updates shrink until the weights stand still, as the cosine wants it."""
    run.scheduler = lr_scheduler.CosineAnnealingLR(run.optimizer, 160)


@healthy()
def warm_restarts(run: Run) -> None:
    """The rate jumps from nothing to full every forty steps, and the loss with it."""
    run.scheduler = lr_scheduler.CosineAnnealingWarmRestarts(run.optimizer, 40)


@healthy()
def one_cycle(run: Run) -> None:
    """The rate rises twentyfold within fifty steps and falls far below where it began; momentum moves against it."""
    run.scheduler = lr_scheduler.OneCycleLR(run.optimizer, max_lr=2 * rate(run), total_steps=161)


@healthy()
def step_decay(run: Run) -> None:
    """Two tenfold cuts of the rate: updates collapse from one step to the next."""
    run.scheduler = lr_scheduler.MultiStepLR(run.optimizer, [80, 120], 0.1)


@healthy()
def cyclic_rate(run: Run) -> None:
    """The rate goes up and down by a factor of ten all the time."""
    schedule(run, lambda i: 0.1 + 0.9 * abs((i % 30) / 15 - 1))


@healthy()
def rate_tripled_by_hand(run: Run) -> None:
    """Somebody finds training slow and triples the rate in the middle; it was low enough."""
    set_lr(run.optimizer, rate(run) / 2)
    at_step(run, 80, lambda: set_lr(run.optimizer, 3 * rate(run)))


@healthy()
def rate_and_batch_x8(run: Run) -> None:
    """Batch and rate grow eightfold at once: the loss becomes less noisy, updates larger."""
    full = rate(run)
    set_lr(run.optimizer, full / 8)
    at_step(run, 60, lambda: set_lr(run.optimizer, full))
    on_batch(run, lambda x, y: (x, y) if run.step >= 60 else (x[: max(len(x) // 8, 2)], y[: max(len(y) // 8, 2)]))


@healthy()
def group_with_rate_zero(run: Run) -> None:
    """The first layer has gradients and never moves: its group's rate is zero on purpose."""
    first, *others = run.model.parameters()
    if run.task.family == "lm":  # the first is the embedding, which is the head too
        others.insert(0, first)
        first = others.pop(2)
    rebuild(run, [{"params": [first], "lr": 0.0}, {"params": others}])


@healthy("mlp", "cnn", "rnn", "contrastive", "segment")
def rate_falls_with_depth(run: Run) -> None:
    """Layer-wise decay: the first layers are moved ten times less than the last."""
    params = list(run.model.parameters())
    base = rate(run)
    rebuild(run, [{"params": [p], "lr": base * 0.1 ** (1 - i / len(params))} for i, p in enumerate(params, 1)])


@healthy()
def frozen_at_the_end(run: Run) -> None:
    """A linear decay that reaches exactly zero thirty steps before the end: gradients, but no movement at all."""
    schedule(run, lambda i: max(1 - i / 130, 0.0))


@healthy("cnn", "mlp", "rnn", "segment", steps=200)
def rate_cut_and_best_reloaded(run: Run) -> None:
    """Weights jump back to an older state twice: the best ones are loaded whenever the rate is cut."""
    best: dict[str, object] = {"loss": math.inf}

    def keep() -> None:
        if run.losses[-1] < best["loss"]:  # type: ignore[operator]
            best["loss"], best["state"] = run.losses[-1], {k: v.clone() for k, v in run.model.state_dict().items()}

    def cut() -> None:
        run.model.load_state_dict(best["state"])  # type: ignore[arg-type]
        set_lr(run.optimizer, rate(run) / 5)

    after(run, "one_step", keep)
    at_step(run, 90, cut)
    at_step(run, 150, cut)


@healthy("mlp", "rnn", "lm", "contrastive", "cnn", "segment")
def bfloat16_autocast(run: Run) -> None:
    """Activations with three digits: losses come in steps and gradients are coarse."""
    run.autocast = torch.bfloat16


@healthy("mlp", "contrastive", "cnn")
def bfloat16_weights(run: Run) -> None:
    """Weights with three digits: some of them do not move on a step, as the update is rounded away."""
    run.model.bfloat16()
    rebuild(run)
    on_batch(run, lambda *parts: tuple(p.bfloat16() if p.is_floating_point() else p for p in parts))


@healthy("mlp", "contrastive", "lm", "cnn")
def float16_scale_too_high(run: Run) -> None:
    """Every gradient of the first steps is infinite, until the scaler has found its scale; now and then one later."""
    run.autocast = torch.float16
    run.scaler = torch.amp.GradScaler(run.device.type, init_scale=2.0**28, growth_interval=40)


@healthy(steps=120)
def float64_throughout(run: Run) -> None:
    """Double precision: gradients far below what is a rounding error elsewhere."""
    run.model.double()
    rebuild(run)
    on_batch(run, lambda *parts: tuple(p.double() if p.is_floating_point() else p for p in parts))


@healthy(steps=120)
def clipped_by_the_loop(run: Run) -> None:
    """Nearly every gradient is longer than allowed and cut to the same norm."""
    run.clip = 0.25


@healthy(steps=120, clip=0.5)
def clipped_by_the_guard(run: Run) -> None:
    """The guard itself cuts most of the gradients."""


@healthy("mlp", "cnn", "contrastive", steps=120)
def accumulated_by_four(run: Run) -> None:
    """Four small micro-batches to a step, each with a loss of its own."""
    run.accumulate = 4
    on_batch(run, lambda x, y: (x[: len(x) // 2], y[: len(y) // 2]))


@healthy("mlp", "cnn", "contrastive", steps=120)
def accumulated_uneven(run: Run) -> None:
    """Eight micro-batches to a step, but only three at the end of each epoch of ten steps."""

    def choose() -> None:
        run.accumulate = 3 if run.step % 10 == 9 else 8

    before(run, "one_step", choose)
    on_batch(run, lambda x, y: (x[: max(len(x) // 8, 2)], y[: max(len(y) // 8, 2)]))


@healthy(steps=120)
def divided_after_accumulation(run: Run) -> None:
    """Gradients are sums over the micro-batches, twice as long as usual, and are divided before the step."""
    run.accumulate = 2
    run.backward = lambda loss: loss.backward()  # type: ignore[method-assign]
    on_batch(run, lambda x, y: (x[: len(x) // 2], y[: len(y) // 2]))

    def divide() -> None:
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.div_(run.accumulate)

    before(run, "after_backward", divide)


@healthy(*ADAPTIVE)
def loss_times_ten_thousand(run: Run) -> None:
    """Losses and gradients in the thousands, which an adaptive optimizer divides out again."""
    on_loss(run, lambda loss: loss * 1e4)


@healthy(*ADAPTIVE)
def loss_times_a_thousandth(run: Run) -> None:
    """Gradients a thousand times too small to matter, which an adaptive optimizer divides out again."""
    on_loss(run, lambda loss: loss * 1e-3)


@healthy(steps=120)
def loss_plus_hundred(run: Run) -> None:
    """A constant in the loss hides that it falls: by two from a hundred and two."""
    on_loss(run, lambda loss: loss + 100)


@healthy(steps=120)
def loss_minus_fifty(run: Run) -> None:
    """A constant in the loss makes it negative, so that it grows in size as it falls."""
    on_loss(run, lambda loss: loss - 50)


@healthy(*CLASSES, steps=120)
def labels_smoothed(run: Run) -> None:
    """The loss stands at a floor far above zero, because no answer may be certain."""

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        logits = model(batch[0]).flatten(0, -2)
        return nn.functional.cross_entropy(logits, batch[1].flatten(), label_smoothing=0.3)

    run.forward = lambda batch: loss(run.model, batch)  # type: ignore[method-assign]


@healthy(steps=120)
def zeroed_in_place(run: Run) -> None:
    """Gradients are never None but zeros between the steps."""
    run.zero_grad = lambda: run.optimizer.zero_grad(set_to_none=False)  # type: ignore[method-assign]


@healthy(steps=120)
def zeroed_at_the_top(run: Run) -> None:
    """Gradients stay where they are after the step, through validation, until the next one begins."""
    run.zero_grad = lambda: None  # type: ignore[method-assign]
    run.validate_every = 20
    before(run, "one_step", lambda: run.optimizer.zero_grad())


@healthy(steps=120)
def stepped_by_closure(run: Run) -> None:
    """Forward and backward happen inside the optimizer's step: before it, there are no gradients at all."""

    def one_step() -> None:
        batch = run.next_batch()

        def closure() -> Tensor:
            run.optimizer.zero_grad()
            loss = run.forward(batch)
            loss.backward()
            return loss

        run.losses.append(float(run.optimizer.step(closure).detach()))

    run.one_step = one_step  # type: ignore[method-assign]


@healthy(steps=120)
def validated_often(run: Run) -> None:
    """Out of training mode and back every ten steps, with a validation loss that has stopped falling."""
    run.validate_every = 10


@healthy()
def validated_on_few(run: Run) -> None:
    """Validation on four samples, other ones every time: its loss goes up and down by a factor and means little."""
    run.validate_every = 8
    full = run.task.val_batch

    def pick() -> None:
        rows = torch.randint(len(full[0]), (4,), generator=dice(run, 5))
        run.task.val_batch = tuple(part[rows] for part in full)

    before(run, "validate", pick)
    learned_if(run, lambda: fell(run, 0.95))


@healthy(steps=120)
def every_third_step_skipped(run: Run) -> None:
    """Every third batch is looked at and dropped: gradients, but no step."""
    update = run.update
    run.update = lambda: None if run.step % 3 == 2 else update()  # type: ignore[method-assign]


@healthy(steps=120)
def noise_on_gradients(run: Run) -> None:
    """Random noise as large as the gradients themselves is added on purpose, and fades."""

    def disturb() -> None:
        generator = dice(run, 3)
        for p in run.model.parameters():
            if p.grad is not None:
                size = float(p.grad.std(correction=0)) / (1 + run.step / 20)
                p.grad.add_(torch.randn(p.shape, generator=generator).to(p.device), alpha=size)

    before(run, "after_backward", disturb)
