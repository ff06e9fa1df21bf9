"""GradientDiagnostics: the `[GRAD]` line with its counts by parameter, the gradient flow, and what float16 loses."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVarTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from trimtab.compat import lines
from trimtab.compat.monitors.norm_functions import GradSnapshot, compute_global_gradient_norm, snapshot
from trimtab.compat.monitors.setup_validation import SetupReport, assert_all_requires_grad, validate_training_setup
from trimtab.compat.monitors.stability import clip_gradients
from trimtab.core.errors import InputError
from trimtab.core.types import ABSENT, FROZEN, Column
from trimtab.sample.measure import reference as measure
from trimtab.sample.transfer import number, to_host
from trimtab.torchutil.optimizers import scale_of
from trimtab.torchutil.trial_pass import InplaceHazard, check_inplace_operations, gradients_of, without_trace

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
Ts = TypeVarTuple("Ts")


class GradReport(TypedDict):
    """One measurement of all gradients."""

    step: int
    global_norm: float
    num_zero: int
    num_nonfinite: int
    num_parameters: int
    num_none: int
    max_norm: float
    avg_norm: float
    min_norm: float
    problems: list[str]
    parameters: dict[str, dict[str, float]]


class GradientDiagnostics:
    """Measures all gradients every `log_interval` steps, logs the `[GRAD]` line, and counts what goes wrong where.

    `clip_grad_norm` is the norm that `apply_gradient_clipping` clips to, 0 for none. `detect_anomaly` turns autograd's
    anomaly detection on until `cleanup`. `device` is where the model should be; `validate_training_setup` reports if it
    is not. `cleanup`, or leaving the `with` block, removes every hook and restores anomaly detection.

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
        self._taken: tuple[int, set[int]] = (-1, set())
        self._found_anomaly: tuple[bool, bool] | None = None
        if detect_anomaly:
            self.enable_anomaly_detection()

    # -- hooks ---------------------------------------------------------------------------------------------------

    def register_model_hooks(self, model: nn.Module) -> None:
        """Note which parameters a backward pass reaches, so that an old gradient is not mistaken for a new one.

        From now on `model` may be left out elsewhere. The gradients themselves are measured when they are complete,
        after accumulation and unscaling, not in the hooks.
        """
        self.clear_hooks()
        self._model = model
        for p in model.parameters():
            if p.requires_grad:
                self._hooked.add(id(p))
                anything: Any = p  # torch does not type this one
                self._handles.append(anything.register_post_accumulate_grad_hook(self._note).remove)

    def _note(self, parameter: Tensor) -> None:
        self._reached.add(id(parameter))

    def clear_hooks(self) -> None:
        """Remove every hook."""
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
        self, model: nn.Module | None = None, *, optimizer: Optimizer | None = None, scaler: GradScaler | None = None
    ) -> float:
        """Clip to `clip_grad_norm` unless that is 0; returns the norm before. A scaler needs its optimizer too."""
        limit = self.clip_grad_norm or math.inf
        return clip_gradients(self._chosen(model), limit, optimizer=optimizer, scaler=scaler).before

    def log_gradient_stats(self, step: int, model: nn.Module | None = None) -> GradReport | None:
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
        """The parameters reached since the step before; the same for a second call in one step."""
        if step == self._taken[0]:
            self._reached |= self._taken[1]
        self._taken, self._reached = (step, self._reached), set()
        return self._taken[1]

    def _got_none(self, parameter: Tensor, norm: float, reached: set[int]) -> bool:
        stale = id(parameter) in self._hooked and id(parameter) not in reached
        return norm == ABSENT or (norm != FROZEN and stale)

    def check_amp_underflow(
        self, scaler: GradScaler | None = None, model: nn.Module | None = None, *, unscaled: bool | None = None
    ) -> AmpUnderflow:
        """Which part of the gradients float16 cannot hold at the current scale; true when that is wrong."""
        found = check_amp_underflow(self._chosen(model), scaler, unscaled=unscaled)
        if found.underflow:
            worst = f"; worst {', '.join(found.worst)}" if found.worst else ""
            log.warning("AMP underflow: %.0f%% of the gradient is lost in float16%s", 100 * found.underflow_frac, worst)
        if found.backed_off:
            log.warning("AMP: the loss scale is down to %g, backed off by one overflow after the other", found.scale)
        return found

    def validate_training_setup(
        self, model: nn.Module, optimizer: object, *, scaler: GradScaler | None = None
    ) -> SetupReport:
        """Look for what would keep a training from working, on the device of this object if it has one."""
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
        """Turn anomaly detection off."""
        if self._found_anomaly is None:
            self._found_anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        torch.autograd.set_detect_anomaly(False)

    def cleanup(self) -> None:
        """Remove every hook and restore anomaly detection. A second call is harmless."""
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
    optimizer: object = None,
    *,
    log_interval: int = 10,
    clip_grad_norm: float = 0.0,
    detect_anomaly: bool = False,
    device: torch.device | str | None = None,
) -> GradientDiagnostics:
    """A `GradientDiagnostics` with hooks on a model; with an optimizer it also validates the setup.

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


HIGH_GLOBAL, LOW_GLOBAL = 100.0, 1e-8
ZERO_SHARE = 0.5
NUM_NAMED = 10
COUNTS = ("grad_is_none_count", "grad_all_zero_count", "grad_nan_inf_count")

Mask = NDArray[np.bool_]


def grad_report(step: int, seen: GradSnapshot, none: Mask, counts: dict[str, dict[str, int]]) -> GradReport:
    """Log one look at the gradients, add it to the `counts` by parameter, and return its numbers.

    `none` marks the trainable parameters that got no new gradient.

    Example:
        >>> import torch
        >>> from trimtab.compat.monitors.norm_functions import snapshot
        >>> model = torch.nn.Linear(2, 1)
        >>> model(torch.zeros(1, 2)).sum().backward()
        >>> report = grad_report(0, snapshot(model), np.zeros(2, bool), {})
        >>> report["problems"], report["parameters"]["weight"]["grad_all_zero_count"]
        (['weight: zero gradient (norm 0.00e+00)'], 1)
    """
    there = seen.present & ~none
    bad = there & (seen.nan + seen.inf > 0)
    zero = there & (seen.norms < ZERO_NORM)
    trainable = there | none
    norms = seen.norms[there & ~bad].tolist()
    parameters = {
        seen.names[i]: _counted(counts, seen, i, (bool(none[i]), bool(zero[i]), bool(bad[i])))
        for i in np.flatnonzero(trainable).tolist()
    }
    num_zero, num_bad, num_none, num = (int(mask.sum()) for mask in (zero, bad, none, trainable))
    counted = {"num_zero": num_zero, "num_nonfinite": num_bad, "num_parameters": num}
    log.info("%s", lines.gradient_diagnostics(step, seen.global_norm, norms, **counted))
    problems = _problems(seen, none, zero, bad)
    _warn(seen.global_norm, num_zero + num_none, num, problems)
    return {
        "step": step,
        "global_norm": seen.global_norm,
        "num_zero": num_zero,
        "num_nonfinite": num_bad,
        "num_parameters": num,
        "num_none": num_none,
        "max_norm": max(norms, default=math.nan),
        "avg_norm": sum(norms) / len(norms) if norms else math.nan,
        "min_norm": min(norms, default=math.nan),
        "problems": problems,
        "parameters": parameters,
    }


def _counted(
    counts: dict[str, dict[str, int]], seen: GradSnapshot, i: int, hits: tuple[bool, bool, bool]
) -> dict[str, float]:
    """How often a parameter was in which trouble so far, and what its gradient is now; NaN where it got none."""
    mine = counts.setdefault(seen.names[i], dict.fromkeys(COUNTS, 0))
    for key, hit in zip(COUNTS, hits, strict=True):
        mine[key] += hit
    now = {"grad_norm": seen.norms[i], "grad_abs_mean": seen.abs_mean[i], "grad_abs_max": seen.absmax[i]}
    return {**mine, **{key: math.nan if hits[0] else float(value) for key, value in now.items()}}


def _problems(seen: GradSnapshot, none: Mask, zero: Mask, bad: Mask) -> list[str]:
    """One line for each parameter in trouble, in the model's order."""
    out = []
    for i in np.flatnonzero(none | zero | bad):
        if none[i]:
            what = "no gradient"
        elif bad[i]:
            what = f"{int(seen.nan[i])} NaN and {int(seen.inf[i])} Inf in the gradient"
        else:
            what = f"zero gradient (norm {seen.norms[i]:.2e})"
        out.append(f"{seen.names[i]}: {what}")
    return out


def _warn(norm: float, num_idle: int, num: int, problems: list[str]) -> None:
    for line in problems[:NUM_NAMED]:
        log.warning("[GRAD]   %s", line)
    if len(problems) > NUM_NAMED:
        log.warning("[GRAD]   and %d more", len(problems) - NUM_NAMED)
    if num and num_idle / num > ZERO_SHARE:
        log.warning("[GRAD] %d of %d parameters have a zero gradient or none", num_idle, num)
    if norm > HIGH_GLOBAL:
        log.warning("[GRAD] the global norm is %.2e, above %g: exploding?", norm, HIGH_GLOBAL)
    elif norm < LOW_GLOBAL:
        log.warning("[GRAD] the global norm is %.2e, below %g: vanishing?", norm, LOW_GLOBAL)


MIN_SCALE = 2.0
"""A scale below this has been backed off again and again: the documented criterion."""
UNDERFLOW_SHARE = 0.1
SUBNORMAL = 2.0**-10
"""Times a value: what then looks too small for float16 is subnormal there, and keeps only some of its digits."""
NUM_WORST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AmpUnderflow:
    """What float16 makes of the gradients: shares of the elements that are not zero.

    `underflow_frac` becomes 0, `subnormal_frac` keeps only some digits; `worst` are the parameters that lose most.
    `scale` is the scaler's, None without one; `backed_off` says that it fell below 2: overflow, not underflow.
    """

    underflow_frac: float
    subnormal_frac: float
    scale: float | None
    backed_off: bool
    worst: tuple[str, ...] = ()
    share: float = UNDERFLOW_SHARE

    @property
    def underflow(self) -> bool:
        """Whether more than `share` of the gradient is lost."""
        return self.underflow_frac > self.share

    def __bool__(self) -> bool:
        """True when something is wrong."""
        return self.underflow or self.backed_off


def check_amp_underflow(
    model: nn.Module, scaler: GradScaler | None = None, *, unscaled: bool | None = None, share: float = UNDERFLOW_SHARE
) -> AmpUnderflow:
    """Measure which part of the gradients float16 cannot hold at the current scale; call it after backward.

    `unscaled` says whether the gradients were unscaled already; None asks the scaler. Without a scaler they are judged
    as they are. Exact zeros are left out, as they may be true zeros: what gradients computed in float16 have
    lost cannot be seen any more.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> (model(torch.ones(1, 2)) * 1e-9).sum().backward()
        >>> check_amp_underflow(model).underflow_frac
        1.0
        >>> check_amp_underflow(model, torch.amp.GradScaler("cpu", init_scale=65536.0), unscaled=True).underflow_frac
        0.0
    """
    found = scale_of(scaler)
    scale = None if found is None else number(found)
    if unscaled is None:
        unscaled = _was_unscaled(scaler)
    factor = scale if scale is not None and unscaled else 1.0
    named = [(name, measure.plain(p.grad)) for name, p in model.named_parameters() if p.grad is not None]
    backed_off = scale is not None and scale < MIN_SCALE
    if not named:
        return AmpUnderflow(underflow_frac=0.0, subnormal_frac=0.0, scale=scale, backed_off=backed_off, share=share)
    sizes = np.array([t.numel() for _, t in named], np.float64)
    table = to_host(torch.cat([_twice(t, factor).to(named[0][1].device) for _, t in named])).astype(np.float64)
    columns = list(Column)
    zero, tiny = table[:, columns.index(Column.ZERO_FRAC)], table[:, columns.index(Column.UNDERFLOW_FRAC)]
    alive = sizes * (1.0 - zero[::2])
    lost, dim = sizes * tiny[::2], sizes * tiny[1::2]
    total = max(float(alive.sum()), 1.0)
    order = np.argsort(-lost / np.maximum(alive, 1.0), kind="stable")[:NUM_WORST]
    return AmpUnderflow(
        underflow_frac=float(lost.sum()) / total,
        subnormal_frac=float((dim - lost).sum()) / total,
        scale=scale,
        backed_off=backed_off,
        worst=tuple(named[i][0] for i in order if lost[i] > 0),
        share=share,
    )


def _twice(tensor: Tensor, factor: float) -> Tensor:
    """Its columns at this scale, and again so small that subnormal values show as underflow."""
    wide = tensor.float() if tensor.device.type == "mps" else tensor.double()
    return measure.full([wide * factor, wide * (factor * SUBNORMAL)])


def _was_unscaled(scaler: object) -> bool:
    states = getattr(scaler, "_per_optimizer_states", None) or {}
    return any(getattr(state.get("stage"), "name", "READY") != "READY" for state in states.values())


ZERO_NORM = 1e-8
"""A gradient with a smaller norm counts as zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFlow:
    """Where one backward pass arrived: the norm of every gradient, and the parameters it missed.

    `missing` got no gradient at all, `zero` one with a norm below 1e-8, `nonfinite` one with a NaN or Inf; `frozen`
    want none. `detached` says that the loss depends on no parameter.
    """

    norms: Mapping[str, float]
    missing: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    nonfinite: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    detached: bool = False

    @property
    def ok(self) -> bool:
        """Whether every trainable parameter got a gradient that moves it."""
        return not (self.missing or self.zero or self.nonfinite or self.detached)


def check_gradient_flow(model: nn.Module, loss: Tensor | Callable[[*Ts], object], *inputs: *Ts) -> GradientFlow:
    """Run a backward pass and see which parameters get a gradient; the model is left as it was.

    `loss` is the loss tensor, whose graph is kept for your own backward, or a function that computes it, called with
    `inputs`. The function may also call backward itself. Earlier gradients are
    ignored and restored afterwards, as are the mode, the buffers and the random numbers.

    Example:
        >>> import torch
        >>> model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
        >>> flow = check_gradient_flow(model, lambda x: model["used"](x).sum(), torch.ones(1, 2))
        >>> flow.ok, flow.missing
        (False, ('unused.weight', 'unused.bias'))
    """
    with without_trace(model):
        made = loss if isinstance(loss, Tensor) else loss(*inputs)
        if not any(p.grad is not None for p in model.parameters()):  # else the function called backward itself
            if not isinstance(made, Tensor):
                raise InputError(
                    f"the function returned a {type(made).__name__} and left no gradients; expected a loss tensor, or "
                    "that it calls backward()"
                )
            _fill(model, made, keep_graph=isinstance(loss, Tensor))
        seen = snapshot(model, detailed=False)
    bad = seen.nan + seen.inf > 0
    small = seen.present & (seen.norms < ZERO_NORM)
    return GradientFlow(
        norms={seen.names[i]: float(seen.norms[i]) for i in np.flatnonzero(seen.present)},
        missing=tuple(seen.names[i] for i in np.flatnonzero(seen.norms == ABSENT)),
        zero=tuple(seen.names[i] for i in np.flatnonzero(small)),
        nonfinite=tuple(seen.names[i] for i in np.flatnonzero(bad)),
        frozen=seen.frozen,
        detached=not bool(seen.present.any()),
    )


def _fill(model: nn.Module, loss: Tensor, *, keep_graph: bool) -> None:
    """Put the gradients of a loss into the model."""
    if loss.numel() != 1:
        raise InputError(f"the loss has shape {tuple(loss.shape)}; expected one number, for example loss.mean()")
    mine = {id(p) for p in model.parameters()}
    for p, grad in gradients_of(loss, keep_graph=keep_graph):
        if id(p) in mine:
            p.grad = grad
