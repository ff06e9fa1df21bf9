"""The pull-style faces of the source documents: ask for the health of gradients, activations and losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.compat.monitors.activation_monitor import ActivationMonitor, get_activation_function_recommendations
    from trimtab.compat.monitors.diagnostics import (
        GradientDiagnostics,
        assert_all_requires_grad,
        check_amp_underflow,
        check_gradient_flow,
        check_inplace_operations,
        setup_gradient_diagnostics,
        validate_training_setup,
    )
    from trimtab.compat.monitors.gradient_monitor import (
        GradientHealthMonitor,
        check_and_log_gradients,
        integrate_health_checks,
    )
    from trimtab.compat.monitors.norm_functions import (
        GradientNorms,
        GradSnapshot,
        clip_gradients_by_global_norm,
        compute_global_gradient_norm,
        compute_l2_norm,
        compute_parameter_norm,
        effective_lr,
        gradient_norms,
        gradient_percentiles,
        layer_gradient_scale,
        scale_gradients,
    )
    from trimtab.compat.monitors.optimizer_state import UpdateRatio, adam_state_report, update_to_parameter_ratio
    from trimtab.compat.monitors.stability import (
        Clipped,
        LossHistory,
        StabilityKeeper,
        StabilityMonitor,
        check_nan_inf,
        check_training_stability,
        clip_gradients,
        find_nonfinite,
        get_training_stats,
        handle_nan_inf,
        handle_training_instability,
        keeper_of,
        monitor_training_health,
    )
    from trimtab.compat.monitors.training_health import TrainingHealthMonitor, format_health_report
    from trimtab.compat.stable_losses import replace_loss_function_with_stable_version, restore_loss_function

_HOME = {
    "ActivationMonitor": "trimtab.compat.monitors.activation_monitor",
    "get_activation_function_recommendations": "trimtab.compat.monitors.activation_monitor",
    "GradientDiagnostics": "trimtab.compat.monitors.diagnostics",
    "assert_all_requires_grad": "trimtab.compat.monitors.diagnostics",
    "check_gradient_flow": "trimtab.compat.monitors.diagnostics",
    "check_inplace_operations": "trimtab.compat.monitors.diagnostics",
    "setup_gradient_diagnostics": "trimtab.compat.monitors.diagnostics",
    "GradientHealthMonitor": "trimtab.compat.monitors.gradient_monitor",
    "check_and_log_gradients": "trimtab.compat.monitors.gradient_monitor",
    "integrate_health_checks": "trimtab.compat.monitors.gradient_monitor",
    "GradientNorms": "trimtab.compat.monitors.norm_functions",
    "clip_gradients_by_global_norm": "trimtab.compat.monitors.norm_functions",
    "compute_global_gradient_norm": "trimtab.compat.monitors.norm_functions",
    "compute_l2_norm": "trimtab.compat.monitors.norm_functions",
    "compute_parameter_norm": "trimtab.compat.monitors.norm_functions",
    "effective_lr": "trimtab.compat.monitors.norm_functions",
    "gradient_norms": "trimtab.compat.monitors.norm_functions",
    "gradient_percentiles": "trimtab.compat.monitors.norm_functions",
    "layer_gradient_scale": "trimtab.compat.monitors.norm_functions",
    "scale_gradients": "trimtab.compat.monitors.norm_functions",
    "UpdateRatio": "trimtab.compat.monitors.optimizer_state",
    "adam_state_report": "trimtab.compat.monitors.optimizer_state",
    "update_to_parameter_ratio": "trimtab.compat.monitors.optimizer_state",
    "GradSnapshot": "trimtab.compat.monitors.norm_functions",
    "check_nan_inf": "trimtab.compat.monitors.stability",
    "check_training_stability": "trimtab.compat.monitors.stability",
    "clip_gradients": "trimtab.compat.monitors.stability",
    "get_training_stats": "trimtab.compat.monitors.stability",
    "handle_nan_inf": "trimtab.compat.monitors.stability",
    "handle_training_instability": "trimtab.compat.monitors.stability",
    "monitor_training_health": "trimtab.compat.monitors.stability",
    "TrainingHealthMonitor": "trimtab.compat.monitors.training_health",
    "Clipped": "trimtab.compat.monitors.stability",
    "LossHistory": "trimtab.compat.monitors.stability",
    "StabilityKeeper": "trimtab.compat.monitors.stability",
    "StabilityMonitor": "trimtab.compat.monitors.stability",
    "find_nonfinite": "trimtab.compat.monitors.stability",
    "keeper_of": "trimtab.compat.monitors.stability",
    "format_health_report": "trimtab.compat.monitors.training_health",
    "check_amp_underflow": "trimtab.compat.monitors.diagnostics",
    "validate_training_setup": "trimtab.compat.monitors.diagnostics",
    "replace_loss_function_with_stable_version": "trimtab.compat.stable_losses",
    "restore_loss_function": "trimtab.compat.stable_losses",
}

__all__ = [
    "ActivationMonitor",
    "Clipped",
    "GradSnapshot",
    "GradientDiagnostics",
    "GradientHealthMonitor",
    "GradientNorms",
    "LossHistory",
    "StabilityKeeper",
    "StabilityMonitor",
    "TrainingHealthMonitor",
    "UpdateRatio",
    "adam_state_report",
    "assert_all_requires_grad",
    "check_amp_underflow",
    "check_and_log_gradients",
    "check_gradient_flow",
    "check_inplace_operations",
    "check_nan_inf",
    "check_training_stability",
    "clip_gradients",
    "clip_gradients_by_global_norm",
    "compute_global_gradient_norm",
    "compute_l2_norm",
    "compute_parameter_norm",
    "effective_lr",
    "find_nonfinite",
    "format_health_report",
    "get_activation_function_recommendations",
    "get_training_stats",
    "gradient_norms",
    "gradient_percentiles",
    "handle_nan_inf",
    "handle_training_instability",
    "integrate_health_checks",
    "keeper_of",
    "layer_gradient_scale",
    "monitor_training_health",
    "replace_loss_function_with_stable_version",
    "restore_loss_function",
    "scale_gradients",
    "setup_gradient_diagnostics",
    "update_to_parameter_ratio",
    "validate_training_setup",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        home = _HOME[name]
        value = getattr(import_module(home if "." in home else f"trimtab.compat.monitors.{home}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'trimtab.compat.monitors' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
