"""What healthy cases are made of: the register, and small ways of changing a loop, its batches or its optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Generator, Tensor, nn, optim
from torch.optim import lr_scheduler

from tests.faults.base import STEPS, Case, Run, Task, on_device

ALL = ("mlp", "cnn", "rnn", "lm", "contrastive", "segment")
PIXELS = ("mlp", "cnn", "contrastive", "segment")  # inputs are numbers
TOKENS = ("rnn", "lm")
CLASSES = ("mlp", "cnn", "rnn", "lm")  # targets are classes
HEADED = ("mlp", "cnn", "rnn", "segment")  # the last module is a head of its own

CASES: dict[str, Case] = {}
Prepare = Callable[[Run], None]


def healthy(*families: str, steps: int = STEPS, **config: Any) -> Callable[[Prepare], Prepare]:
    """List a function that changes a run as a healthy case; its name and docstring are the case's."""

    def register(prepare: Prepare) -> Prepare:
        name = prepare.__name__
        assert name not in CASES, name
        doc = " ".join((prepare.__doc__ or "").split())
        CASES[name] = Case(name, "healthy", prepare, families=families or ALL, steps=steps, config=config, doc=doc)
        return prepare

    return register


def before(run: Run, part: str, hook: Callable[[], None]) -> None:
    """Do something before a part of the loop."""
    inner = getattr(run, part)

    def both() -> None:
        hook()
        inner()

    setattr(run, part, both)


def after(run: Run, part: str, hook: Callable[[], None]) -> None:
    """Do something after a part of the loop."""
    inner = getattr(run, part)

    def both() -> None:
        inner()
        hook()

    setattr(run, part, both)


def at_step(run: Run, step: int, hook: Callable[[], None]) -> None:
    """Do something once, before the step of that number."""

    def maybe() -> None:
        if run.step == step:
            hook()

    before(run, "one_step", maybe)


def on_batch(run: Run, change: Callable[..., tuple[Any, ...]]) -> None:
    """Let every batch pass through a function of its two parts."""
    inner = run.draw
    run.draw = lambda: change(*inner())  # type: ignore[method-assign]


def on_loss(run: Run, change: Callable[[Tensor], Tensor]) -> None:
    """Let every loss pass through a function."""
    inner = run.forward
    run.forward = lambda batch: change(inner(batch))  # type: ignore[method-assign]


def dice(run: Run, salt: int = 0) -> Generator:
    """A generator that follows from the run's seed and place, so that the same run draws the same."""
    return Generator().manual_seed(((run.seed * 1_009 + salt) * 10_007 + run.step) * 101 + run.micro)


def rebuild(run: Run, params: Iterable[Any] | None = None, **settings: Any) -> None:
    """A new optimizer of the run's kind and settings, for other parameters or with other settings."""
    kind = type(run.optimizer)
    known = inspect.signature(kind).parameters
    kept = {key: value for key, value in run.optimizer.defaults.items() if key in known}
    run.optimizer = kind(list(run.model.parameters() if params is None else params), **(kept | settings))


def use(run: Run, kind: Callable[..., optim.Optimizer], **settings: Any) -> None:
    """Another kind of optimizer."""
    run.optimizer = kind(run.model.parameters(), **settings)


def schedule(run: Run, factor: Callable[[int], float]) -> None:
    """A rate that is a function of the step, as a factor of the family's own."""
    run.scheduler = lr_scheduler.LambdaLR(run.optimizer, factor)


def rate(run: Run) -> float:
    """The family's own learning rate."""
    return float(run.optimizer.param_groups[0]["lr"])


def head_of(model: nn.Module) -> nn.Module:
    """The last module."""
    return list(model.children())[-1]


def learned_if(run: Run, check: Callable[[], bool]) -> None:
    """Where the held-out loss of the family is not the measure: what says that the run learned."""
    run.extra["learned"] = check


def alone(
    run: Run,
    model: nn.Module,
    optimizer: Any,
    batch: Callable[[Generator], tuple[Any, ...]],
    loss: Callable[[nn.Module, tuple[Any, ...]], Tensor],
    learned: Callable[[], bool],
) -> None:
    """Put a problem of its own in the family's place; batches are drawn from a generator that follows the run."""
    model.to(run.device)
    val_batch = batch(Generator().manual_seed(run.seed + 77_777))
    for one in optimizer.values() if isinstance(optimizer, dict) else [optimizer]:
        for state in one.state.values():  # some optimizers make theirs at once
            state.update({key: value.to(run.device) for key, value in state.items() if key != "step"})
    loss = on_device(loss, run.device)
    run.task = Task("alone", model, optimizer, lambda step, micro: batch(dice(run)), loss, val_batch)
    run.model, run.optimizer = model, optimizer
    learned_if(run, learned)


def turns(run: Run, *players: Callable[[tuple[Any, ...]], tuple[optim.Optimizer, Tensor]]) -> None:
    """A step in which several players move in turn: each gives the optimizer to step and the loss to step on."""

    def one_step() -> None:
        batch = run.next_batch()
        for play in players:
            optimizer, loss = play(batch)
            optimizer.zero_grad()
            loss.backward()
            run.tell(loss, batch)
            optimizer.step()
            run.losses.append(float(loss.detach()))

    run.one_step = one_step  # type: ignore[method-assign]


def mean(values: Iterable[float]) -> float:
    """The mean of some numbers."""
    found = list(values)
    return sum(found) / len(found)


def fell(run: Run, factor: float, first: int = 5, last: int = 20) -> bool:
    """Whether the training loss ended below this part of what it began with."""
    return mean(run.losses[-last:]) < factor * mean(run.losses[:first])


def val_loss(task: Task, model: nn.Module) -> float:
    """The held-out loss of a model, which is left as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    batch = tuple(part.to(dtype) if part.is_floating_point() else part for part in task.val_batch)
    with torch.no_grad():
        loss = float(task.loss(model, batch))
    for module in training:
        module.training = True
    return loss


def pretrain(run: Run, steps: int) -> None:
    """Train before the run begins, unseen, on batches that the run will not draw."""
    run.model.train()
    for step in range(10_000, 10_000 + steps):
        run.task.loss(run.model, run.task.batch(step, 0)).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
