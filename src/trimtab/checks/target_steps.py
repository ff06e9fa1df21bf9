"""The few lines of a training loop that every aid needs: batches for ever, the loss of one, one step, some steps."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.checks.target import Target
from trimtab.core.errors import InputError
from trimtab.sample.transfer import to_device

TARGET_KEYS = ("target", "targets", "label", "labels", "y")


def run_steps(target: Target, num: int, *, on_step: Callable[[int, float], bool | None] | None = None) -> list[float]:
    """Train `num` steps and return their losses; `on_step(step, loss)` is told each one and ends it by returning False.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> target = Target(
        ...     model=model,
        ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     loader=[(torch.ones(4, 2), torch.ones(4, 1))],
        ...     loss_fn=torch.nn.functional.mse_loss,
        ... )
        >>> first, *_, last = run_steps(target, 5)
        >>> last < first
        True
    """
    losses: list[float] = []
    batches = endless(target)
    for step in range(num):
        loss = compute_loss(target, next(batches))
        take_step(target, loss)
        if target.scheduler is not None and hasattr(target.scheduler, "step"):
            target.scheduler.step()
        losses.append(float(loss.detach()))
        if on_step is not None and on_step(step, losses[-1]) is False:
            break
    return losses


def endless(target: Target) -> Iterator[Any]:
    """Batches of the loader, from the beginning again whenever it ends."""
    while True:
        num = 0
        for batch in target.loader:
            num += 1
            yield batch
        if num == 0:
            raise InputError(
                "the loader gave no batch; expected at least one. A generator can be gone through only once: "
                "return a list, a DataLoader, or another thing that can be iterated over again"
            )


def raw_loss(target: Target, batch: Any) -> Any:
    """Whatever `step_fn`, or model and `loss_fn`, make of a batch, in the mode the model is in."""
    if target.step_fn is not None:
        return target.step_fn(target.model, batch)
    assert target.loss_fn is not None
    inputs, named, wanted = split(_beside_model(batch, target.model), target.model)
    return target.loss_fn(target.model(*inputs, **named), wanted)


def compute_loss(target: Target, batch: Any) -> Tensor:
    """The loss of one batch, in training mode, as `step_fn` or model and `loss_fn` give it."""
    target.model.train()
    loss = raw_loss(target, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        who = "step_fn" if target.step_fn is not None else "loss_fn"
        raise InputError(f"{who} returned {shape}; expected a tensor of one number, for example loss.mean()")
    return loss


def take_step(target: Target, loss: Tensor) -> None:
    """Backward pass and one step of every optimizer, through the scaler where there is one."""
    for one in target.optimizers:
        one.zero_grad()
    if target.scaler is None:
        loss.backward()  # type: ignore[no-untyped-call]
        for one in target.optimizers:
            one.step()
        return
    target.scaler.scale(loss).backward()
    for one in target.optimizers:
        target.scaler.step(one)
    target.scaler.update()


def validation_loss(target: Target) -> float:
    """The mean loss over `val_loader` in evaluation mode; NaN where there is none."""
    if target.val_loader is None:
        return math.nan
    losses = []
    target.model.eval()
    with torch.no_grad():
        for batch in target.val_loader:
            if target.step_fn is not None:
                losses.append(float(target.step_fn(target.model, batch)))
            elif target.loss_fn is not None:
                inputs, named, wanted = split(_beside_model(batch, target.model), target.model)
                losses.append(float(target.loss_fn(target.model(*inputs, **named), wanted)))
    target.model.train()
    return sum(losses) / len(losses) if losses else math.nan


def split(batch: Any, model: torch.nn.Module) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """What goes into the model, by place and by name, and what the loss compares its output with."""
    if isinstance(batch, Mapping):
        key = next((k for k in TARGET_KEYS if k in batch), None)
        if key is None:
            raise InputError(
                f"a batch is a dict of {', '.join(map(str, batch)) or 'nothing'} and none of {', '.join(TARGET_KEYS)} "
                "is in it; name the target so, or give step_fn(model, batch) in the place of loss_fn"
            )
        rest = {str(k): v for k, v in batch.items() if k != key}
        known = inspect.signature(model.forward).parameters
        if len(rest) == 1 and next(iter(rest)) not in known:
            return tuple(rest.values()), {}, batch[key]
        return (), rest, batch[key]
    if isinstance(batch, list | tuple):
        if len(batch) < 2:
            raise InputError(
                f"a batch is a {type(batch).__name__} of {len(batch)}; expected (input, target), or give "
                "step_fn(model, batch) in the place of loss_fn"
            )
        return tuple(batch[:-1]), {}, batch[-1]
    return (batch,), {}, batch  # it is its own target: an autoencoder


def _beside_model(batch: Any, model: torch.nn.Module) -> Any:
    """The batch where the model is; what is there already is not touched."""
    device = next(model.parameters()).device
    return to_device(batch, device)
