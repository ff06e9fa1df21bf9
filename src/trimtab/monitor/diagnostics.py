"""GradientDiagnostics: the `[GRAD]` line and what lies behind it, parameter by parameter, step by step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.core.errors import InputError
from trimtab.core.types import ABSENT, FROZEN
from trimtab.monitor.amp import AmpUnderflow, check_amp_underflow
from trimtab.monitor.flow import GradientFlow, check_gradient_flow
from trimtab.monitor.grad_report import grad_report
from trimtab.monitor.inplace import InplaceHazard, check_inplace_operations
from trimtab.monitor.norms import compute_global_gradient_norm
from trimtab.monitor.snapshot import snapshot
from trimtab.monitor.stability import clip_gradients
from trimtab.monitor.validation import SetupReport, assert_all_requires_grad, validate_training_setup

__all__ = [
    "AmpUnderflow",
    "GradientDiagnostics",
    "GradientFlow",
    "InplaceHazard",
    "SetupReport",
    "assert_all_requires_grad",
    "check_amp_underflow",
    "check_gradient_flow",
    "check_inplace_operations",
    "setup_gradient_diagnostics",
    "validate_training_setup",
]

log = logging.getLogger("trimtab")


class GradientDiagnostics:
    """Measures all gradients every `log_interval` steps, logs the `[GRAD]` line, and counts what goes wrong where.

    `clip_grad_norm` is the norm that `apply_gradient_clipping` clips to, 0 for none. `detect_anomaly` turns autograd's
    anomaly detection on until `cleanup`. `device` is where the model should be; `validate_training_setup` tells if it
    is not. `cleanup`, or leaving the `with` block, removes every hook and leaves anomaly detection as it was found.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from trimtab import GradientDiagnostics
        >>> model = nn.Linear(2, 1)
        >>> with GradientDiagnostics(log_interval=1, clip_grad_norm=1.0) as diagnostics:
        ...     diagnostics.register_model_hooks(model)
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     stats = diagnostics.log_gradient_stats(0)
        ...     norm = diagnostics.apply_gradient_clipping()
        >>> stats["num_zero"], stats["num_parameters"], round(norm, 3)
        (0, 2, 1.732)
        >>> stats["parameters"]["bias"]["grad_norm"], stats["parameters"]["bias"]["grad_is_none_count"]
        (1.0, 0)
    """

    def __init__(
        self,
        log_interval: int = 10,
        clip_grad_norm: float = 0.0,
        detect_anomaly: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if log_interval < 1 or not clip_grad_norm >= 0:
            raise InputError(
                f"log_interval is {log_interval} and clip_grad_norm {clip_grad_norm}; expected at least 1, and 0 (off) "
                "or a norm to clip to"
            )
        self.log_interval, self.clip_grad_norm = log_interval, clip_grad_norm
        self.device = torch.device(device) if device is not None else None
        self.counts: dict[str, dict[str, int]] = {}
        self._model: nn.Module | None = None
        self._handles: list[Callable[[], None]] = []
        self._hooked: set[int] = set()
        self._reached: set[int] = set()
        self._told: tuple[int, set[int]] = (-1, set())
        self._found_anomaly: tuple[bool, bool] | None = None
        if detect_anomaly:
            self.enable_anomaly_detection()

    # -- hooks ---------------------------------------------------------------------------------------------------

    def register_model_hooks(self, model: nn.Module) -> None:
        """Listen which parameters a backward pass reaches, so that an old gradient is not taken for a new one.

        From now on `model` may be left out elsewhere. The gradients themselves are measured when they are complete,
        after accumulation and unscaling, not in the hooks.
        """
        self.clear_hooks()
        self._model = model
        for p in model.parameters():
            if p.requires_grad:
                self._hooked.add(id(p))
                anything: Any = p  # torch does not type this one
                self._handles.append(anything.register_post_accumulate_grad_hook(self._heard).remove)

    def _heard(self, parameter: Tensor) -> None:
        self._reached.add(id(parameter))

    def clear_hooks(self) -> None:
        """Take every hook off."""
        for remove in self._handles:
            remove()
        self._handles.clear()
        self._hooked.clear()
        self._reached.clear()

    # -- measuring -----------------------------------------------------------------------------------------------

    def compute_global_grad_norm(self, model: nn.Module | None = None) -> float:
        """The norm of all gradients; it does not overflow on finite ones."""
        return compute_global_gradient_norm(self._chosen(model))

    def apply_gradient_clipping(
        self, model: nn.Module | None = None, *, optimizer: Any = None, scaler: Any = None
    ) -> float:
        """Clip to `clip_grad_norm`, where that is not 0; returns the norm before. A scaler needs its optimizer too."""
        limit = self.clip_grad_norm or math.inf
        return clip_gradients(self._chosen(model), limit, optimizer=optimizer, scaler=scaler).before

    def log_gradient_stats(self, step: int, model: nn.Module | None = None) -> dict[str, Any] | None:
        """Every `log_interval` steps measure, count and log; None in between. Call it in each step, after backward.

        Only trainable parameters count, and those without a gradient among them.
        """
        chosen = self._chosen(model)
        reached = self._take(step)
        if step % self.log_interval:
            return None
        seen = snapshot(chosen)
        none = np.array([self._got_none(p, norm, reached) for p, norm in zip(_params(chosen), seen.norms, strict=True)])
        return grad_report(step, seen, none, self.counts)

    def _take(self, step: int) -> set[int]:
        """The parameters reached since the step before; asked twice about one step, the answer is the same."""
        if step == self._told[0]:
            self._reached |= self._told[1]
        self._told, self._reached = (step, self._reached), set()
        return self._told[1]

    def _got_none(self, parameter: Tensor, norm: float, reached: set[int]) -> bool:
        stale = id(parameter) in self._hooked and id(parameter) not in reached
        return norm == ABSENT or (norm != FROZEN and stale)

    def check_amp_underflow(
        self, scaler: Any = None, model: nn.Module | None = None, *, unscaled: bool | None = None
    ) -> AmpUnderflow:
        """Which part of the gradients float16 cannot hold at the current scale; true when that is wrong."""
        found = check_amp_underflow(self._chosen(model), scaler, unscaled=unscaled)
        if found.underflow:
            worst = f"; worst {', '.join(found.worst)}" if found.worst else ""
            log.warning("AMP underflow: %.0f%% of the gradient is lost in float16%s", 100 * found.underflow_frac, worst)
        if found.backed_off:
            log.warning("AMP: the loss scale is down to %g, backed off by one overflow after the other", found.scale)
        return found

    def validate_training_setup(self, model: nn.Module, optimizer: Any, *, scaler: Any = None) -> SetupReport:
        """Look for what would keep a training from working, on the device of this object where it has one."""
        return validate_training_setup(model, optimizer, scaler=scaler, device=self.device)

    def _chosen(self, model: nn.Module | None) -> nn.Module:
        found = model if model is not None else self._model
        if found is None:
            raise InputError("no model is known; expected model=, or register_model_hooks(model) before")
        return found

    # -- anomaly detection and end -------------------------------------------------------------------------------

    def enable_anomaly_detection(self) -> None:
        """Let autograd look for NaN in every backward step, and name the forward line; slow."""
        if self._found_anomaly is None:
            self._found_anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        torch.autograd.set_detect_anomaly(True)

    def disable_anomaly_detection(self) -> None:
        """Stop that."""
        if self._found_anomaly is None:
            self._found_anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        torch.autograd.set_detect_anomaly(False)

    def cleanup(self) -> None:
        """Remove every hook, and leave anomaly detection as it was found. Cleaning up twice is harmless."""
        self.clear_hooks()
        self._model = None
        if self._found_anomaly is not None:
            mode, check_nan = self._found_anomaly
            torch.autograd.set_detect_anomaly(mode, check_nan)
            self._found_anomaly = None

    def __enter__(self) -> GradientDiagnostics:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cleanup()


def setup_gradient_diagnostics(
    model: nn.Module,
    optimizer: Any = None,
    *,
    log_interval: int = 10,
    clip_grad_norm: float = 0.0,
    detect_anomaly: bool = False,
    device: torch.device | str | None = None,
) -> GradientDiagnostics:
    """A `GradientDiagnostics` that listens to a model; with an optimizer the setup is looked at, too.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> diagnostics = setup_gradient_diagnostics(model, torch.optim.SGD(model.parameters(), lr=0.1), log_interval=1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> diagnostics.log_gradient_stats(0)["num_none"]
        0
        >>> diagnostics.cleanup()
    """
    diagnostics = GradientDiagnostics(log_interval, clip_grad_norm, detect_anomaly, device)
    diagnostics.register_model_hooks(model)
    if optimizer is not None:
        diagnostics.validate_training_setup(model, optimizer)
    return diagnostics


def _params(model: nn.Module) -> list[Tensor]:
    return [p for _, p in model.named_parameters()]
