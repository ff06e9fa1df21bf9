"""GradientHealthMonitor: measures a model's gradients after each backward pass, and reports what is wrong with them."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Any, NotRequired, TypedDict
from weakref import WeakKeyDictionary, proxy

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from trimtab.compat import lines
from trimtab.compat.monitors.norm_functions import GradSnapshot, clip_gradients_by_global_norm, snapshot
from trimtab.compat.training_tags import Send, tag_sender
from trimtab.core.errors import InputError
from trimtab.record.csv_sink import statistics_metrics
from trimtab.sample.measure.meter import Meter

log = logging.getLogger("trimtab")

HEALTHY_NORM = (0.1, 10.0)
"""Between these the global norm of a model trained with the usual losses is unremarkable."""
CLIP_ABOVE, CLIP_TO = 10.0, 1.0
"""The quick-start rule: where the global norm is above the first, clip to the second."""
KEPT = 1000
"""Checks that `gradient_history` remembers."""

_LASTING = ("CRITICAL", "⚠️")  # what is worth saying again as long as it lasts


class LayerStats(TypedDict):
    """The gradient of one parameter."""

    norm: float
    mean: float
    std: float
    max: float
    min: float
    shape: tuple[int, ...]


class GradientStats(TypedDict):
    """The documented statistics of all gradients."""

    global_grad_norm: float
    max_grad_norm: float
    min_grad_norm: float
    mean_grad_norm: float
    has_nan: bool
    has_inf: bool
    layer_stats: dict[str, LayerStats]
    recommendations: list[str]
    param_count: int
    params_with_grads: int
    grad_norm_after_clip: NotRequired[float]
    loss_finite: NotRequired[bool]


class GradientHealthMonitor:
    """Measures the gradients of a model on demand, reports what is wrong with them, logs and clips them.

    `grad_clip_threshold` is what `apply_gradient_clipping` clips to by default. A norm below
    `vanishing_threshold` or a global norm above `exploding_threshold` is reported. `log_statistics` writes every
    `log_frequency` steps, and at once when there is new trouble. Without `enable_detailed_logging` only norms are
    measured and `layer_stats` stays empty, which costs a fraction.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from trimtab import GradientHealthMonitor
        >>> from trimtab.compat.monitors.gradient_monitor import CLIP_ABOVE, CLIP_TO
        >>> model = nn.Linear(4, 1)
        >>> monitor = GradientHealthMonitor(model)
        >>> (1e4 * model(torch.ones(8, 4)).sum()).backward()
        >>> stats = monitor.check_gradients()
        >>> stats["has_nan"], stats["params_with_grads"], stats["recommendations"][0][:30]
        (False, 2, '⚠️ Exploding gradients detecte')
        >>> if stats["global_grad_norm"] > CLIP_ABOVE:
        ...     before = monitor.apply_gradient_clipping(max_norm=CLIP_TO)
        >>> round(monitor.check_gradients()["global_grad_norm"], 3)
        1.0
    """

    def __init__(
        self,
        model: nn.Module,
        grad_clip_threshold: float = 1.0,
        vanishing_threshold: float = 1e-7,
        exploding_threshold: float = 100.0,
        log_frequency: int = 100,
        enable_detailed_logging: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"the model is a {type(model).__name__}; expected a torch.nn.Module")
        for name, value in (
            ("grad_clip_threshold", grad_clip_threshold),
            ("vanishing_threshold", vanishing_threshold),
            ("exploding_threshold", exploding_threshold),
        ):
            if not value >= 0:
                raise InputError(f"{name} is {value}; expected a number of at least 0")
        if log_frequency < 1:
            raise InputError(f"log_frequency is {log_frequency}; expected a number of steps, at least 1")
        self.model = model
        self.grad_clip_threshold = grad_clip_threshold
        self.vanishing_threshold = vanishing_threshold
        self.exploding_threshold = exploding_threshold
        self.log_frequency = log_frequency
        self.enable_detailed_logging = enable_detailed_logging
        self._meter: Meter | None = None
        self.reset_statistics()

    def reset_statistics(self) -> None:
        """Forget every check made so far."""
        self.step_counter = 0
        self.nan_inf_counts = {"nan": 0, "inf": 0}
        self.gradient_history: dict[str, deque[float]] = {
            name: deque(maxlen=KEPT) for name in ("global_norm", "max_norm", "min_norm")
        }
        self._last_logged: int | None = None
        self._reported: set[str] = set()

    def check_gradients(self) -> GradientStats:
        """Measure all gradients, with one wait for the device at most.

        Call it after `backward` and, with a GradScaler, after `unscale_`. Returns `global_grad_norm`, `max_grad_norm`,
        `min_grad_norm` and `mean_grad_norm` over parameters, `has_nan`, `has_inf`, `layer_stats` (`norm`, `mean`,
        `std`, `max`, `min` and `shape` by name), `recommendations`, `param_count` and `params_with_grads`. A NaN or Inf
        in any layer shows in the norms; without any gradient they are 0.
        """
        seen = self._look(detailed=self.enable_detailed_logging)
        there = seen.present
        norms = seen.norms[there] if there.any() else np.zeros(1)
        stats: GradientStats = {
            "global_grad_norm": seen.global_norm,
            "max_grad_norm": float(norms.max()),
            "min_grad_norm": float(norms.min()),
            "mean_grad_norm": float(norms.mean()),
            "has_nan": bool((seen.nan > 0).any()),
            "has_inf": bool((seen.inf > 0).any()),
            "layer_stats": _layers(seen) if self.enable_detailed_logging else {},
            "recommendations": recommendations(seen, self.vanishing_threshold, self.exploding_threshold),
            "param_count": len(seen.names),
            "params_with_grads": int(there.sum()),
        }
        self.step_counter += 1
        self.nan_inf_counts["nan"] += stats["has_nan"]
        self.nan_inf_counts["inf"] += stats["has_inf"]
        self.gradient_history["global_norm"].append(stats["global_grad_norm"])
        self.gradient_history["max_norm"].append(stats["max_grad_norm"])
        self.gradient_history["min_norm"].append(stats["min_grad_norm"])
        return stats

    def log_statistics(self, stats: GradientStats, step: int | None = None, logger: object = None) -> None:
        """Write what `check_gradients` found: a line and warnings to `logging`, numbers to an experiment logger.

        `logger` may have `.log(dict)` (wandb), `.log_metrics(dict)` (Lightning, MLflow) or `.add_scalar(tag, value,
        step)` (TensorBoard), be a `logging.Logger`, which then gets the line and the warnings, or a function of one
        dict. Written are the first call, every `log_frequency`-th step, and steps with trouble not seen in the last
        ones.
        """
        at = self.step_counter - 1 if step is None else step
        kinds = {_kind(text) for text in stats.get("recommendations", ())}
        news = kinds - self._reported
        due = self._due(at)
        # Trouble that comes and goes is reported once an interval, what is harmless once a run.
        self._reported = kinds | {kind for kind in self._reported if not (due and kind.startswith(_LASTING))}
        if not due and not news:
            return
        if due:
            self._last_logged = at
        own = logger if isinstance(logger, logging.Logger | logging.LoggerAdapter) else None
        out = log if own is None else own
        norms = (stats["global_grad_norm"], stats["max_grad_norm"], stats["min_grad_norm"], stats["mean_grad_norm"])
        out.info("%s", lines.gradient_health(step, *map(float, norms)))
        for text in stats.get("recommendations", ()):
            if _kind(text) in news or text.startswith(_LASTING):
                out.warning("%s", text)
        if logger is not None and own is None:
            send = tag_sender(logger if step is not None else _stepless(logger))
            self._contained(send, statistics_metrics(stats), at)

    def apply_gradient_clipping(self, max_norm: float | None = None) -> float:
        """Scale all gradients to a global norm of at most `max_norm` (else `grad_clip_threshold`); the norm before.

        Equal to `clip_grad_norm_` on finite gradients, huge ones included. With a NaN or Inf among them nothing is
        changed: the norm returned says so.
        """
        return clip_gradients_by_global_norm(self.model, self.grad_clip_threshold if max_norm is None else max_norm)

    def get_gradient_flow_summary(self) -> dict[str, list[tuple[str, float]]]:
        """The parameters that have a gradient now, with its norm, as vanishing, exploding and healthy ones.

        Non-finite gradients count as exploding; those that are zero by construction are healthy.
        """
        seen = self._look(detailed=False)
        small = vanishing(seen, self.vanishing_threshold)
        if not small.any() and mostly_zero(seen):
            small = seen.norms == 0
        large = seen.present & ~(seen.norms <= self.exploding_threshold)
        rest = seen.present & ~small & ~large

        def listed(rows: np.ndarray) -> list[tuple[str, float]]:
            return [(seen.names[i], float(seen.norms[i])) for i in np.flatnonzero(rows)]

        return {
            "layers_with_vanishing_grads": listed(small),
            "layers_with_exploding_grads": listed(large),
            "layers_with_healthy_grads": listed(rest),
        }

    def __getstate__(self) -> dict[str, object]:
        # A module that keeps its monitor is copied and saved with it; plans of launches belong to this process.
        return {**self.__dict__, "_meter": None}

    def _look(self, *, detailed: bool) -> GradSnapshot:
        if self._meter is None:
            self._meter = Meter({p.device for p in self.model.parameters()}, "auto")
        return snapshot(self.model, detailed=detailed, meter=self._meter)

    def _due(self, at: int) -> bool:
        last = self._last_logged
        if last is None or at % self.log_frequency == 0:
            return True
        return not 0 < at - last < self.log_frequency  # also for a second logger, and for a counter set back

    def _contained(self, send: Send, values: dict[str, float], at: int) -> None:
        """Send, and log a failure of the logger instead of raising it."""
        try:
            send(values, at)
        except Exception:
            log.exception("trimtab: the logger failed at step %s; training continues", at)


def _layers(seen: GradSnapshot) -> dict[str, LayerStats]:
    return {
        seen.names[i]: {
            "norm": float(seen.norms[i]),
            "mean": float(seen.mean[i]),
            "std": float(seen.std[i]),
            "max": float(seen.max[i]),
            "min": float(seen.min[i]),
            "shape": seen.shapes[i],
        }
        for i in np.flatnonzero(seen.present)
    }


def _kind(text: str) -> str:
    """What a recommendation is about, without its numbers."""
    head = text.partition("(")[0].partition(" of ")[0]
    return "".join(c for c in head if not c.isdigit())


def _stepless(logger: object) -> object:
    """The logger without our steps, if it counts its own: it would drop values of steps that look old to it."""
    if callable(getattr(logger, "add_scalar", None)):
        return logger
    log_them = getattr(logger, "log_metrics", None) or getattr(logger, "log", None)
    return _Stepless(log_them) if callable(log_them) else logger


class _Stepless:
    def __init__(self, log_them: Callable[[dict[str, float]], object]) -> None:
        self._log = log_them

    def log(self, values: dict[str, float]) -> None:
        """Pass the values on without a step."""
        self._log(values)


ISOLATED = 1e-4
"""A bias whose gradient is this much smaller per element than that of the weights beside it is zero by construction."""
MOSTLY = 0.5
"""Share of all gradients that must be exactly zero before that is trouble and not the way the model is built."""
NUM_NAMED = 4

Rows = NDArray[np.bool_]


def vanishing(seen: GradSnapshot, threshold: float) -> Rows:
    """Which parameters have a gradient below `threshold` that ought to be larger.

    Not those whose gradient is zero by construction: exactly zero (an embedding or a branch this batch did not use), or
    a bias that does nothing (before a BatchNorm, of attention keys) and gets rounding noise where the weights beside it
    get a real gradient. A weight matrix with a tiny gradient always counts; so does a bias in the company of such.
    """
    low = seen.present & (seen.norms < threshold) & (seen.norms > 0)
    if not low.any():
        return low
    rms, company = seen.rms, _company(seen)
    with np.errstate(invalid="ignore"):
        alone = ~_matrices(seen) & (rms < ISOLATED * company)
    out: Rows = low & ~alone
    return out


def mostly_zero(seen: GradSnapshot) -> bool:
    """Whether more than half of all gradients are exactly zero: the loss hardly depends on the model."""
    num = int(seen.present.sum())
    return num > 0 and int((seen.norms == 0).sum()) > MOSTLY * num


def recommendations(seen: GradSnapshot, vanishing_threshold: float, exploding_threshold: float) -> list[str]:
    """What is wrong and what to try, the gravest first; empty where nothing is.

    Example:
        >>> import torch
        >>> from trimtab.compat.monitors.norm_functions import snapshot
        >>> weight = torch.zeros(2, 2, requires_grad=True)
        >>> (400.0 * weight).sum().backward()
        >>> print(*recommendations(snapshot([weight]), 1e-7, 100.0))
        ⚠️ Exploding gradients detected (norm=800.00)!
           Consider: (1) Gradient clipping, (2) Reducing learning rate
    """
    if not seen.present.any():
        what = "every parameter is frozen" if len(seen.frozen) == len(seen.names) else "call this after loss.backward()"
        return [f"No gradients: {what}, before optimizer.step() and optimizer.zero_grad()."]
    out = _nonfinite(seen)
    if exploding_threshold < seen.global_norm < math.inf:
        out.append(lines.exploding(seen.global_norm))
    small = vanishing(seen, vanishing_threshold)
    if small.any():
        out.append(f"{lines.vanishing(float(seen.norms[small].min()))}\n   Layers: {_names(seen, small)}")
    elif mostly_zero(seen):
        zero = seen.norms == 0
        out.append(
            f"{lines.vanishing(0.0)}\n   {int(zero.sum())} of {int(seen.present.sum())} gradients are exactly zero: "
            f"{_names(seen, zero)}. Look for a detached loss, dead units, or gradients lost in float16"
        )
    if seen.absent:
        shown = ", ".join(seen.absent[:NUM_NAMED]) + (", ..." if len(seen.absent) > NUM_NAMED else "")
        out.append(
            f"{len(seen.absent)} trainable parameters have no gradient: {shown}. "
            "The loss does not depend on them: freeze them (requires_grad_(False)), or look for what cuts them off."
        )
    return out


def _nonfinite(seen: GradSnapshot) -> list[str]:
    out = []
    for word, counts in (("NaN", seen.nan), ("Inf", seen.inf)):
        rows = counts > 0
        if rows.any():
            out.append(
                f"CRITICAL: {word} in the gradients of {int(rows.sum())} of {int(seen.present.sum())} parameters: "
                f"{_names(seen, rows)}. Do not step. Try in this order: (1) a learning rate 10 times lower, (2) an "
                "epsilon in every normalisation, (3) a numerically stable loss, (4) clipping to 1.0, (5) a look for "
                "divisions by zero, logarithms and roots of zero"
            )
    return out


def _names(seen: GradSnapshot, rows: Rows) -> str:
    return lines.some([seen.names[i] for i in np.flatnonzero(rows)])


def _matrices(seen: GradSnapshot) -> Rows:
    """Weight matrices; not biases, which some models keep in more than one dimension."""
    wide = [sum(n > 1 for n in shape) >= 2 for shape in seen.shapes]
    return np.array(
        [w and "bias" not in name.rsplit(".", 1)[-1] for w, name in zip(wide, seen.names, strict=True)], bool
    )


def _company(seen: GradSnapshot) -> NDArray[np.float64]:
    """For each parameter the largest gradient per element of the matrices of its own module, or of those next to it."""
    rms = np.where(np.isfinite(seen.rms), seen.rms, 0.0)
    rows = np.flatnonzero(_matrices(seen))
    homes: dict[str, float] = {}
    for i in rows.tolist():
        home = seen.names[i].rpartition(".")[0]
        homes[home] = max(homes.get(home, 0.0), float(rms[i]))
    out = np.zeros(len(seen.names))
    for i, name in enumerate(seen.names):
        home = name.rpartition(".")[0]
        if home in homes:
            out[i] = homes[home]
        elif rows.size:
            place = int(np.searchsorted(rows, i))
            out[i] = rms[rows[max(place - 1, 0) : place + 1]].max()
    return out


_KEPT: WeakKeyDictionary[nn.Module, GradientHealthMonitor] = WeakKeyDictionary()
"""The monitor of each model that was checked without one: thresholds and cadence need a memory."""


def check_and_log_gradients(
    monitor_or_model: GradientHealthMonitor | nn.Module,
    step: int,
    apply_clipping: bool = False,
    max_grad_norm: float = 1.0,
    logger: object = None,
) -> GradientStats:
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
) -> GradientStats:
    """Check the loss and the gradients of a module after `loss.backward()`; the statistics, with `loss_finite`.

    A module that keeps a monitor as `grad_monitor` is checked with it; one that has a `logger` (a LightningModule) logs
    there. A loss of NaN or Inf is logged, and gradients that hold one are not clipped: skip that step.

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
        weak: Any = proxy(thing)  # a value that held its key would keep both alive
        _KEPT[thing] = GradientHealthMonitor(weak)
    return _KEPT[thing]


def _logger_of(module: nn.Module) -> object:
    """A LightningModule's logger; None if there is none that takes numbers."""
    try:
        logger: object = getattr(module, "logger", None)
    except RuntimeError:  # a LightningModule that is not in a trainer yet
        return None
    takes = any(callable(getattr(logger, name, None)) for name in ("log_metrics", "log", "add_scalar"))
    return logger if takes else None
