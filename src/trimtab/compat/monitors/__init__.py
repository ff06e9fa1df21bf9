"""Functions and classes of the source documents that report on gradients, activations and losses when asked."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.compat.monitors.activation_monitor import ActivationMonitor as ActivationMonitor
    from trimtab.compat.monitors.activation_monitor import (
        get_activation_function_recommendations as get_activation_function_recommendations,
    )
    from trimtab.compat.monitors.diagnostics import GradientDiagnostics as GradientDiagnostics
    from trimtab.compat.monitors.diagnostics import assert_all_requires_grad as assert_all_requires_grad
    from trimtab.compat.monitors.diagnostics import check_amp_underflow as check_amp_underflow
    from trimtab.compat.monitors.diagnostics import check_gradient_flow as check_gradient_flow
    from trimtab.compat.monitors.diagnostics import check_inplace_operations as check_inplace_operations
    from trimtab.compat.monitors.diagnostics import setup_gradient_diagnostics as setup_gradient_diagnostics
    from trimtab.compat.monitors.diagnostics import validate_training_setup as validate_training_setup
    from trimtab.compat.monitors.gradient_monitor import GradientHealthMonitor as GradientHealthMonitor
    from trimtab.compat.monitors.gradient_monitor import check_and_log_gradients as check_and_log_gradients
    from trimtab.compat.monitors.gradient_monitor import integrate_health_checks as integrate_health_checks
    from trimtab.compat.monitors.loss_history import LossHistory as LossHistory
    from trimtab.compat.monitors.loss_history import check_training_stability as check_training_stability
    from trimtab.compat.monitors.nonfinite_tensors import check_nan_inf as check_nan_inf
    from trimtab.compat.monitors.nonfinite_tensors import find_nonfinite as find_nonfinite
    from trimtab.compat.monitors.nonfinite_tensors import handle_nan_inf as handle_nan_inf
    from trimtab.compat.monitors.norm_functions import GradientNorms as GradientNorms
    from trimtab.compat.monitors.norm_functions import GradSnapshot as GradSnapshot
    from trimtab.compat.monitors.norm_functions import clip_gradients_by_global_norm as clip_gradients_by_global_norm
    from trimtab.compat.monitors.norm_functions import compute_global_gradient_norm as compute_global_gradient_norm
    from trimtab.compat.monitors.norm_functions import compute_l2_norm as compute_l2_norm
    from trimtab.compat.monitors.norm_functions import compute_parameter_norm as compute_parameter_norm
    from trimtab.compat.monitors.norm_functions import effective_lr as effective_lr
    from trimtab.compat.monitors.norm_functions import gradient_norms as gradient_norms
    from trimtab.compat.monitors.norm_functions import gradient_percentiles as gradient_percentiles
    from trimtab.compat.monitors.norm_functions import layer_gradient_scale as layer_gradient_scale
    from trimtab.compat.monitors.norm_functions import scale_gradients as scale_gradients
    from trimtab.compat.monitors.optimizer_state import UpdateRatio as UpdateRatio
    from trimtab.compat.monitors.optimizer_state import adam_state_report as adam_state_report
    from trimtab.compat.monitors.optimizer_state import update_to_parameter_ratio as update_to_parameter_ratio
    from trimtab.compat.monitors.stability import Clipped as Clipped
    from trimtab.compat.monitors.stability import StabilityCorrector as StabilityCorrector
    from trimtab.compat.monitors.stability import StabilityMonitor as StabilityMonitor
    from trimtab.compat.monitors.stability import clip_gradients as clip_gradients
    from trimtab.compat.monitors.stability import corrector_of as corrector_of
    from trimtab.compat.monitors.stability import get_training_stats as get_training_stats
    from trimtab.compat.monitors.stability import handle_training_instability as handle_training_instability
    from trimtab.compat.monitors.stability import monitor_training_health as monitor_training_health
    from trimtab.compat.monitors.training_health import TrainingHealthMonitor as TrainingHealthMonitor
    from trimtab.compat.monitors.training_health import format_health_report as format_health_report
    from trimtab.compat.stable_losses import (
        replace_loss_function_with_stable_version as replace_loss_function_with_stable_version,
    )
    from trimtab.compat.stable_losses import restore_loss_function as restore_loss_function

_NAMES = {
    "monitors.activation_monitor": "ActivationMonitor get_activation_function_recommendations",
    "monitors.diagnostics": (
        "GradientDiagnostics assert_all_requires_grad check_amp_underflow check_gradient_flow "
        "check_inplace_operations setup_gradient_diagnostics validate_training_setup"
    ),
    "monitors.gradient_monitor": "GradientHealthMonitor check_and_log_gradients integrate_health_checks",
    "monitors.loss_history": "LossHistory check_training_stability",
    "monitors.nonfinite_tensors": "check_nan_inf find_nonfinite handle_nan_inf",
    "monitors.norm_functions": (
        "GradSnapshot GradientNorms clip_gradients_by_global_norm compute_global_gradient_norm compute_l2_norm "
        "compute_parameter_norm effective_lr gradient_norms gradient_percentiles layer_gradient_scale "
        "scale_gradients"
    ),
    "monitors.optimizer_state": "UpdateRatio adam_state_report update_to_parameter_ratio",
    "monitors.stability": (
        "Clipped StabilityCorrector StabilityMonitor clip_gradients corrector_of get_training_stats "
        "handle_training_instability monitor_training_health"
    ),
    "monitors.training_health": "TrainingHealthMonitor format_health_report",
    "stable_losses": "replace_loss_function_with_stable_version restore_loss_function",
}
_HOME = {name: f"trimtab.compat.{module}" for module, names in _NAMES.items() for name in names.split()}
"""Where each name is defined: modules are imported when one of their names is used."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'trimtab.compat.monitors' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
