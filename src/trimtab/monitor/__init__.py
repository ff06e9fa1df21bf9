"""The pull-style faces of the source documents: ask for the health of gradients, activations and losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.losses.replace import replace_loss_function_with_stable_version, restore_loss_function
    from trimtab.monitor.activation_advice import get_activation_function_recommendations
    from trimtab.monitor.activations import ActivationMonitor
    from trimtab.monitor.diagnostics import (
        GradientDiagnostics,
        assert_all_requires_grad,
        check_amp_underflow,
        check_gradient_flow,
        check_inplace_operations,
        setup_gradient_diagnostics,
        validate_training_setup,
    )
    from trimtab.monitor.gradients import GradientHealthMonitor
    from trimtab.monitor.integrate import check_and_log_gradients, integrate_health_checks
    from trimtab.monitor.norms import (
        GradientNorms,
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
    from trimtab.monitor.optimizer_state import UpdateRatio, adam_state_report, update_to_parameter_ratio
    from trimtab.monitor.snapshot import GradSnapshot
    from trimtab.monitor.stability import (
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
    from trimtab.monitor.training_health import TrainingHealthMonitor, format_health_report

_HOME = {
    "ActivationMonitor": "activations",
    "get_activation_function_recommendations": "activation_advice",
    "GradientDiagnostics": "diagnostics",
    "assert_all_requires_grad": "diagnostics",
    "check_gradient_flow": "diagnostics",
    "check_inplace_operations": "diagnostics",
    "setup_gradient_diagnostics": "diagnostics",
    "GradientHealthMonitor": "gradients",
    "check_and_log_gradients": "integrate",
    "integrate_health_checks": "integrate",
    "GradientNorms": "norms",
    "clip_gradients_by_global_norm": "norms",
    "compute_global_gradient_norm": "norms",
    "compute_l2_norm": "norms",
    "compute_parameter_norm": "norms",
    "effective_lr": "norms",
    "gradient_norms": "norms",
    "gradient_percentiles": "norms",
    "layer_gradient_scale": "norms",
    "scale_gradients": "norms",
    "UpdateRatio": "optimizer_state",
    "adam_state_report": "optimizer_state",
    "update_to_parameter_ratio": "optimizer_state",
    "GradSnapshot": "snapshot",
    "check_nan_inf": "stability",
    "check_training_stability": "stability",
    "clip_gradients": "stability",
    "get_training_stats": "stability",
    "handle_nan_inf": "stability",
    "handle_training_instability": "stability",
    "monitor_training_health": "stability",
    "TrainingHealthMonitor": "training_health",
    "Clipped": "stability",
    "LossHistory": "stability",
    "StabilityKeeper": "stability",
    "StabilityMonitor": "stability",
    "find_nonfinite": "stability",
    "keeper_of": "stability",
    "format_health_report": "training_health",
    "check_amp_underflow": "diagnostics",
    "validate_training_setup": "diagnostics",
    "replace_loss_function_with_stable_version": "trimtab.losses.replace",
    "restore_loss_function": "trimtab.losses.replace",
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
        value = getattr(import_module(home if "." in home else f"trimtab.monitor.{home}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'trimtab.monitor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
