"""Gradient checks for a training loop that exists already: one call after the backward pass."""

from __future__ import annotations

import logging
import math
from typing import Any
from weakref import WeakKeyDictionary, proxy

from torch import Tensor, nn

from trimtab.core.errors import InputError
from trimtab.monitor.gradients import GradientHealthMonitor

log = logging.getLogger("trimtab")

_KEPT: WeakKeyDictionary[nn.Module, GradientHealthMonitor] = WeakKeyDictionary()
"""The monitor of each model that was checked without one: thresholds and cadence need a memory."""


def check_and_log_gradients(
    monitor_or_model: GradientHealthMonitor | nn.Module,
    step: int,
    apply_clipping: bool = False,
    max_grad_norm: float = 1.0,
    logger: Any = None,
) -> dict[str, Any]:
    """Measure, log on the monitor's cadence, and clip if asked; returns the statistics from before the clipping.

    The dictionary is that of `check_gradients` and, where clipping was asked for, `grad_norm_after_clip`: the norm the
    optimizer gets, which is the norm before where nothing had to be clipped, and non-finite where nothing could be.
    Call it after the last backward pass of an accumulation and after a GradScaler's `unscale_`.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> model(torch.full((1, 2), 30.0)).sum().backward()
        >>> stats = check_and_log_gradients(model, step=0, apply_clipping=True)
        >>> round(stats["global_grad_norm"], 2), round(stats["grad_norm_after_clip"], 4)
        (42.44, 1.0)
    """
    monitor = _monitor_of(monitor_or_model)
    stats = monitor.check_gradients()
    monitor.log_statistics(stats, step=step, logger=logger)
    if apply_clipping:
        before = monitor.apply_gradient_clipping(max_grad_norm)
        stats["grad_norm_after_clip"] = min(before, max_grad_norm) if math.isfinite(before) else before
    return stats


def integrate_health_checks(
    module: nn.Module,
    loss: Tensor | float,
    step: int,
    apply_gradient_clipping: bool = True,
    max_grad_norm: float = 1.0,
) -> dict[str, Any]:
    """Check the loss and the gradients of a module after `loss.backward()`; the statistics, with `loss_finite`.

    A module that keeps a monitor as `grad_monitor` is checked with it; one that has a `logger` (a LightningModule) logs
    there. A loss of NaN or Inf is said, and gradients that hold one are not clipped: skip that step.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> loss = model(torch.ones(4, 2)).square().mean()
        >>> loss.backward()
        >>> integrate_health_checks(model, loss, step=0)["loss_finite"]
        True
    """
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise InputError(f"the loss has the shape {tuple(loss.shape)}; expected one number, such as loss.mean()")
    monitor = getattr(module, "grad_monitor", None)
    stats = check_and_log_gradients(
        monitor if isinstance(monitor, GradientHealthMonitor) else module,
        step,
        apply_clipping=apply_gradient_clipping,
        max_grad_norm=max_grad_norm,
        logger=_logger_of(module),
    )
    value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
    stats["loss_finite"] = math.isfinite(value)
    if not stats["loss_finite"]:
        text = f"CRITICAL: the loss is {value} at step {step}: skip this step, and look at its batch first"
        stats["recommendations"].insert(0, text)
        log.warning("%s", text)
    return stats


def _monitor_of(thing: GradientHealthMonitor | nn.Module) -> GradientHealthMonitor:
    if isinstance(thing, GradientHealthMonitor):
        return thing
    if not isinstance(thing, nn.Module):
        raise InputError(f"got a {type(thing).__name__}; expected a GradientHealthMonitor or a model")
    if thing not in _KEPT:
        weak: Any = proxy(thing)  # a value that held its key would keep both for ever
        _KEPT[thing] = GradientHealthMonitor(weak)
    return _KEPT[thing]


def _logger_of(module: nn.Module) -> Any:
    """A LightningModule's logger; None where there is none that takes numbers."""
    try:
        logger = getattr(module, "logger", None)
    except RuntimeError:  # a LightningModule that is not in a trainer yet
        return None
    takes = any(callable(getattr(logger, name, None)) for name in ("log_metrics", "log", "add_scalar"))
    return logger if takes else None
