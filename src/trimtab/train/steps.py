"""One optimizer step from its micro-batches: forward in the chosen precision, backward, and the guarded update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.errors import InputError
from trimtab.train.evaluation import LossFn, StepFn, loss_of
from trimtab.train.rig import Rig
from trimtab.train.settings import TrainConfig
from trimtab.train.stages import amp_dtype


def micro_batch(
    model: nn.Module,
    batch: Any,
    rig: Rig,
    config: TrainConfig,
    device: torch.device,
    loss_fn: LossFn | None,
    step_fn: StepFn | None,
) -> Tensor:
    """Forward and backward of one batch, its loss divided by how many make a step; returns the loss undivided."""
    dtype = amp_dtype(config, device)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        loss, _ = loss_of(model, batch, loss_fn, step_fn)
    if not isinstance(loss, Tensor):
        raise InputError(f"the loss is a {type(loss).__name__}; expected a tensor of one number, to go backward from")
    rig.guard.observe(loss=loss, batch=batch)
    shared = loss / config.accumulation_steps if config.accumulation_steps > 1 else loss
    (shared if rig.scaler is None else rig.scaler.scale(shared)).backward()
    return loss


def ready(scaler: Any, device: torch.device) -> None:
    """Let a scaler know its scale: torch's finds it out with the first loss, and after a resume there may be none."""
    if scaler is not None:
        scaler.scale(torch.zeros((), device=device, dtype=torch.float32))


def complete_tail(model: nn.Module, factor: float) -> None:
    """Make gradients of fewer micro-batches than usual a mean over those that there were."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def update(model: nn.Module, rig: Rig, loss: Tensor) -> None:
    """Step through the guard; the average follows only if the update went into the weights."""
    rejected, scale = rig.guard.rejected, _scale(rig)
    rig.guard.step(loss)
    rig.optimizer.zero_grad(set_to_none=True)
    if rig.ema is not None and rig.guard.rejected == rejected and not _scale(rig) < scale:
        rig.ema.update_parameters(model)


def _scale(rig: Rig) -> float:
    """The loss scale, where an average has to know whether a step was skipped: only then is it waited for."""
    return float(rig.scaler.get_scale()) if rig.scaler is not None and rig.ema is not None else 1.0
