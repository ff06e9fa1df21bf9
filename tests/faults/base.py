"""The common ground of faults and look-alikes: a task, a plain training loop whose parts a case may replace, a case.

The loop is the one people write. A case changes as little of it as shows the trouble (or the healthy oddity): it
replaces one of the loop's parts before the run, or does something at a certain step. The guard is attached by hooks and
told what a user would tell it: the loss and the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim

from trimtab import Guard

STEPS = 160


@dataclass
class Task:
    """A small training problem: what to train, on what, and how the loss is computed. All of it follows from a seed.

    `batch(step, micro)` gives the same batch for the same numbers. `loss(model, batch)` calls `model(...)` (the root)
    and returns a scalar. `num_classes` is None for tasks that are no classification.
    """

    family: str
    model: nn.Module
    optimizer: Any
    batch: Callable[[int, int], tuple[Any, ...]]
    loss: Callable[[nn.Module, tuple[Any, ...]], Tensor]
    val_batch: tuple[Any, ...]
    num_classes: int | None = None


@dataclass
class Case:
    """A fault to be found, or a healthy oddity to be left alone.

    `prepare(run)` runs before the guard is attached (change the model, the optimizer, the schedule, the loop's parts);
    `at(run)` runs at the beginning of every step, before the batch is drawn, with `run.step` set.
    `names` are the findings that name this fault rightly, best first; empty for a healthy case. `onset` is the step at
    which a fault begins to act. `kind` says how fast it must be found: nonfinite, abrupt, wiring or drift.
    `always_harmful` marks a fault that hurts in real life though so short a run may not show it.
    """

    name: str
    group: str  # numerics, dynamics, wiring, amp, data, state; or healthy
    prepare: Callable[[Run], None] = lambda run: None
    at: Callable[[Run], None] = lambda run: None
    names: tuple[str, ...] = ()
    kind: str = ""
    onset: int = 0
    families: tuple[str, ...] = ()
    steps: int = STEPS
    config: dict[str, Any] = field(default_factory=dict)
    doc: str = ""
    always_harmful: bool = False

    @property
    def healthy(self) -> bool:
        return not self.names


class Run:
    """One training run. Every method below `train` is a part that a case may replace on the instance."""

    def __init__(self, task: Task, case: Case, seed: int, device: str = "cpu") -> None:
        self.task, self.case, self.seed = task, case, seed
        self.device = torch.device(device)
        self.model, self.optimizer = task.model, task.optimizer
        self.scaler: torch.amp.GradScaler | None = None
        self.scheduler: Any = None
        self.ema: Any = None
        self.autocast: torch.dtype | None = None
        self.accumulate = 1
        self.clip: float | None = None  # the loop's own clip_grad_norm_
        self.validate_every = 0
        self.step = self.micro = 0
        self.losses: list[float] = []
        self.guard: Guard | None = None
        self.extra: dict[str, Any] = {}  # what a case wants to remember between steps

    def train(self, attach: Callable[[Run], Guard | None]) -> Run:
        """Prepare, attach, run all steps, close. An exception in a step ends the run as it would a user's."""
        self.case.prepare(self)
        self.guard = attach(self)
        try:
            for step in range(self.case.steps):
                self.step = step
                self.case.at(self)
                self.one_step()
        except Exception as error:
            if self.guard is not None:
                self.guard.__exit__(type(error), error, error.__traceback__)
            self.extra["error"] = error
        if self.guard is not None:
            self.guard.close()
        return self

    def one_step(self) -> None:
        total = 0.0
        for micro in range(self.accumulate):
            self.micro = micro
            batch = self.next_batch()
            loss = self.forward(batch)
            self.backward(loss)
            self.tell(loss, batch)
            total += float(loss.detach()) / self.accumulate
        self.losses.append(total)
        self.after_backward()
        self.update()
        self.zero_grad()
        self.after_update()

    def next_batch(self) -> tuple[Any, ...]:
        """What `draw` gives, on the device of the run: it is drawn and changed on the host, alike for every device."""
        return moved(self.draw(), self.device)

    def draw(self) -> tuple[Any, ...]:
        return self.task.batch(self.step, self.micro)

    def forward(self, batch: tuple[Any, ...]) -> Tensor:
        with torch.autocast(self.device.type, self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            return self.task.loss(self.model, batch)

    def backward(self, loss: Tensor) -> None:
        loss = loss / self.accumulate if self.accumulate > 1 else loss
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def tell(self, loss: Tensor, batch: tuple[Any, ...]) -> None:
        if self.guard is not None:
            self.guard.observe(loss=loss, batch=batch)

    def after_backward(self) -> None:
        if self.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)

    def update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def after_update(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        if self.validate_every and self.step % self.validate_every == self.validate_every - 1:
            self.validate()

    def validate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            loss = self.task.loss(self.model, self.task.val_batch)
        self.model.train()
        if self.guard is not None:
            self.guard.validate(loss)

    @property
    def harmed(self) -> bool:
        """Whether the run ended badly by itself: see the harness for the comparison with a clean run."""
        return not self.losses or not math.isfinite(sum(self.losses[-10:]))


def moved(batch: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """The batch on a device; what is there already is not copied."""
    return tuple(part.to(device) if isinstance(part, Tensor) else part for part in batch)


def on_device(
    loss: Callable[[nn.Module, tuple[Any, ...]], Tensor], device: torch.device
) -> Callable[[nn.Module, tuple[Any, ...]], Tensor]:
    """The same loss of batches that may still be on the host."""
    return loss if device.type == "cpu" else lambda model, batch: loss(model, moved(batch, device))


def set_lr(optimizer: optim.Optimizer, lr: float) -> None:
    """Set the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
