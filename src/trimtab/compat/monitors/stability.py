"""StabilityMonitor: judges losses, gradients and weights, applies the documented corrections, reports the health."""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypedDict, TypeVar

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from trimtab.compat import lines, training_tags
from trimtab.compat.monitors.loss_history import (
    ISSUES,
    LOSS_EXPLOSION,
    OVERFITTING,
    TRAIN_LOSS_NAN_INF,
    VAL_LOSS_NAN_INF,
    HistoryState,
    LossHistory,
    check_training_stability,
)
from trimtab.compat.monitors.nonfinite_tensors import check_nan_inf, find_nonfinite, handle_nan_inf, report_nonfinite
from trimtab.compat.monitors.norm_functions import clip_gradients_by_global_norm, compute_global_gradient_norm, snapshot
from trimtab.core.config import PolicyConfig
from trimtab.core.contain import Contained
from trimtab.core.errors import AttachError, InputError
from trimtab.core.types import Action, Outcome
from trimtab.guard.protect import SAFE_EPS
from trimtab.guard.run_record import HEALTH_PARTS
from trimtab.remedies.cut_lr import CutLR, LrMultiplier
from trimtab.remedies.raise_weight_decay import RaiseWeightDecay
from trimtab.sample.transfer import number
from trimtab.torchutil.optimizers import groups_of, innermost, labelled, params_of, scale_of, unscale
from trimtab.torchutil.patch import wrap_on_object

FACTORS: Mapping[str, float] = {
    TRAIN_LOSS_NAN_INF: 0.5,
    VAL_LOSS_NAN_INF: 0.5,
    LOSS_EXPLOSION: 0.1,
    OVERFITTING: 1.5,
}
"""The documented factors: of the learning rate, and for overfitting of the weight decay."""

log = logging.getLogger("trimtab")

MAX_GRAD_NORM = 1.0
PERSISTENCE = 3
"""Epochs in a row before overfitting is corrected: one noisy epoch is no reason to change a run."""
HEALTH_KEYS = (*HEALTH_PARTS, "overall_healthy")
"""The keys of the documented dictionary, the same that `Guard.health()` uses."""
RECENT = 100
Losses = Iterable[Tensor | float] | Mapping[str, Iterable[Tensor | float]]
P = ParamSpec("P")
R = TypeVar("R")

_CORRECTORS: weakref.WeakValueDictionary[int, StabilityCorrector] = weakref.WeakValueDictionary()
"""By the id of the optimizer, which holds its corrector alive."""


class CorrectorState(TypedDict):
    """What a checkpoint holds of a corrector."""

    multiplier: Mapping[str, Any]
    steps: int
    spent: int
    last: dict[str, int]


class MonitorState(TypedDict):
    """What a checkpoint holds of a monitor."""

    steps: int
    history: HistoryState
    keeper: CorrectorState


class TrainingStats(TypedDict):
    """The documented numbers of a run."""

    training_history: list[float]
    validation_history: list[float]
    current_learning_rate: float | None
    current_weight_decay: float | None
    total_parameters: int
    trainable_parameters: int
    device: str
    amp_enabled: bool
    current_gradient_norm: float


class StabilityCorrector:
    """Cuts the learning rate and raises the weight decay of one optimizer, by a multiplier around its `step`.

    The multiplier applies only while the optimizer steps: no scheduler sees it, so none undoes it. It does not fall
    below `policy.floor`. There are at least `policy.cooldown` steps between two corrections of one kind, and at most
    `policy.budget` corrections in all. As documented, a cut lasts.

    Args:
        optimizer: What to correct; one optimizer has one corrector.
        policy: The bounds above.
        factors: Replaces documented factors by issue.
        recover: Let a cut grow back after the cool-down, tenfold in `policy.recover` steps.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> with StabilityCorrector(optimizer) as corrector:
        ...     corrector.handle("loss_explosion").detail
        'LR multiplier 1 -> 0.1, effective LR 0.01'
    """

    def __init__(
        self,
        optimizer: object,
        *,
        policy: PolicyConfig | None = None,
        factors: Mapping[str, float] | None = None,
        recover: bool = False,
    ) -> None:
        self.optimizer: Optimizer = innermost(optimizer)
        if id(self.optimizer) in _CORRECTORS:
            raise AttachError("this optimizer already has a StabilityCorrector; use that one, or remove() it first")
        self._policy = policy or PolicyConfig()
        self.factors = dict(FACTORS) | {_known(issue): value for issue, value in (factors or {}).items()}
        for issue, value in self.factors.items():
            _check_factor(issue, value)
        self._recover = recover
        self.multiplier = LrMultiplier(self.optimizer, self._policy)
        self.steps = self.spent = 0
        self.rewound_at = -1  # it never rolls back
        self._last: dict[str, int] = {}
        self._removed = False
        # Outside of every hook: what a guard puts into the groups during the step, it also takes out during the step.
        # Hooks run in the same order before and after the step, but two multipliers must be undone in reverse.
        self._unwrap = wrap_on_object(self.optimizer, "step", self._step)
        _CORRECTORS[id(self.optimizer)] = self

    def handle(self, issue: str, factor: float | None = None) -> Outcome:
        """Apply the documented correction for an issue, unless it is too soon or too often; returns the outcome."""
        factor = self.factors[_known(issue)] if factor is None else factor
        _check_factor(issue, factor)
        remedy: RaiseWeightDecay | CutLR = RaiseWeightDecay() if issue == OVERFITTING else CutLR()
        action = Action(kind=remedy.kind, args={"factor": factor})
        if why := self._not_now(remedy.kind):
            outcome = Outcome(at=self.steps, action=action, applied=False, detail=why)
        else:
            outcome = remedy.apply(action, self, self.steps)
        if outcome.applied:
            self._last[remedy.kind] = self.steps
            self.spent += 1
        log.warning("%s: %s: %s", issue, action, outcome.detail)
        return outcome

    def _not_now(self, kind: str) -> str:
        if self._removed:
            return "nothing was done: this corrector was removed"
        if self.spent >= self._policy.budget:
            return f"nothing was done: the budget of {self._policy.budget} corrections is spent"
        since = self.steps - self._last.get(kind, -self._policy.cooldown)
        if since < self._policy.cooldown:
            return f"nothing was done: the last one was {since} steps ago, at least {self._policy.cooldown} must pass"
        return ""

    @property
    def rates(self) -> list[float]:
        """The learning rate each group steps with, cuts included."""
        return [number(g["lr"]) * self.multiplier.value for g in self.optimizer.param_groups if "lr" in g]

    @property
    def decays(self) -> list[float]:
        """The weight decay of each group that has one."""
        found = [g.get("weight_decay") for g in self.optimizer.param_groups]
        return [number(decay) for decay in found if decay is not None]

    def _step(self, inner: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._removed:
            return inner(*args, **kwargs)
        self.steps += 1
        self.multiplier.apply()
        try:
            return inner(*args, **kwargs)
        finally:
            self.multiplier.undo()
            if self._recover:
                self.multiplier.recover()

    def remove(self) -> None:
        """Remove the multiplier: the scheduler's own rates apply again. A raised weight decay stays."""
        self._removed = True
        self.multiplier.remove()
        if _CORRECTORS.get(id(self.optimizer)) is self:
            del _CORRECTORS[id(self.optimizer)]
        self._unwrap()

    def state_dict(self) -> CorrectorState:
        """Plain data; the weight decay itself is saved with the optimizer."""
        return {
            "multiplier": self.multiplier.state_dict(),
            "steps": self.steps,
            "spent": self.spent,
            "last": dict(self._last),
        }

    def load_state_dict(self, state: CorrectorState) -> None:
        """Continue from where `state_dict` was taken."""
        self.multiplier.load_state_dict(state["multiplier"])
        self.steps, self.spent = int(state["steps"]), int(state["spent"])
        self._last = {str(kind): int(step) for kind, step in state["last"].items()}

    def __enter__(self) -> StabilityCorrector:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def corrector_of(optimizer: object) -> StabilityCorrector:
    """The corrector of an optimizer; without one, a new one with the documented settings."""
    found = _CORRECTORS.get(id(innermost(optimizer)))
    return found if found is not None else StabilityCorrector(optimizer)


def handle_training_instability(issue: str, optimizer: object, *, factor: float | None = None) -> Outcome:
    """Correct an unstable run: LR x0.5 after NaN or Inf, x0.1 after an explosion, weight decay x1.5 on overfitting.

    Works through the optimizer's `StabilityCorrector`, which bounds it; make one first to set factors, bounds or
    cool-down, and `corrector_of(optimizer).remove()` undoes the cut.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1, weight_decay=0.01)
        >>> handle_training_instability("train_loss_nan_inf", optimizer).applied
        True
        >>> corrector_of(optimizer).rates, optimizer.param_groups[0]["lr"]
        ([0.05], 0.1)
        >>> handle_training_instability("overfitting", optimizer).detail
        'weight decay 0.01 -> 0.015'
        >>> corrector_of(optimizer).remove()
    """
    return corrector_of(optimizer).handle(_known(issue), factor)


def _known(issue: str) -> str:
    if issue not in ISSUES:
        raise InputError(f"{issue!r} is not a known issue; expected one of {', '.join(ISSUES)}")
    return issue


def _check_factor(issue: str, factor: float) -> None:
    low, high = (1.0, 10.0) if issue == OVERFITTING else (0.0, 1.0)
    if not low < factor <= high:
        raise InputError(f"the factor for {issue} is {factor}; expected a number above {low:g}, at most {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """The norm of all gradients before and after clipping, and the parameters whose gradient is not finite."""

    before: float
    after: float
    nonfinite: tuple[str, ...] = ()

    @property
    def skip(self) -> bool:
        """Whether to skip this step: a NaN or Inf was found, and nothing was changed."""
        return bool(self.nonfinite) or not math.isfinite(self.before)


def clip_gradients(
    model: nn.Module,
    max_norm: float | None = None,
    *,
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
) -> Clipped:
    """Scale all gradients down to a norm of at most `max_norm` (1.0), and log the norm before and after.

    With a `scaler` the gradients are unscaled first, which needs the `optimizer`: scaled ones would be clipped to
    nearly 0. Gradients with a NaN or Inf are named, and left alone: skip such a step (`.skip`); a scaler does so by
    itself, and backs off, because the Inf is still there.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1, bias=False)
        >>> (model(torch.ones(1, 2)) * 3.0).sum().backward()
        >>> result = clip_gradients(model, max_norm=1.0)
        >>> round(result.before, 3), round(result.after, 3), result.skip
        (4.243, 1.0, False)
    """
    limit = MAX_GRAD_NORM if max_norm is None else max_norm
    scaled = scale_of(scaler) is not None
    if scaled and optimizer is None:
        raise InputError("clipping under a GradScaler needs optimizer=, to unscale its gradients first")
    if scaled:
        unscale(scaler, optimizer)
    before = clip_gradients_by_global_norm(model, limit)
    log.info("%s", lines.norm_before_clipping(before))
    if not math.isfinite(before):
        return Clipped(before=before, after=before, nonfinite=_name_nonfinite(model, routine=scaled))
    after = before * min(1.0, limit / (before + SAFE_EPS))
    log.info("%s", lines.norm_after_clipping(after))
    return Clipped(before=before, after=after)


def _name_nonfinite(model: nn.Module, *, routine: bool) -> tuple[str, ...]:
    seen = snapshot(model, detailed=False)
    bad = [int(i) for i in (seen.nan + seen.inf).nonzero()[0]]
    names = tuple(seen.names[i] for i in bad)
    if routine:  # overflow is normal while a scaler searches its scale; it skips the step
        log.info("%d gradients overflowed at this scale; the scaler will skip the step and back off", len(names))
        return names
    for i in bad:
        report_nonfinite(f"gradient of {seen.names[i]}", seen.nan[i], seen.inf[i])
    return names


class StabilityMonitor:
    """The documented checks and corrections for one model and its optimizer.

    `logger` gets the documented tags: a SummaryWriter, anything with `.log()`, or None. `factors`, `policy` and
    `recover` are those of `StabilityCorrector`; overfitting counts once it lasted `persistence` epochs. `close`, or
    leaving the `with` block, undoes a cut of the learning rate.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with StabilityMonitor(model, optimizer, max_grad_norm=0.5) as monitor:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     if not monitor.clip_gradients().skip:
        ...         optimizer.step()
        ...     monitor.check_training_stability(0.9, 1.0), monitor.check_training_stability(12.0, 1.0)
        ([], ['loss_explosion'])
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: object,
        max_grad_norm: float = MAX_GRAD_NORM,
        scaler: GradScaler | None = None,
        logger: object = None,
        *,
        factors: Mapping[str, float] | None = None,
        policy: PolicyConfig | None = None,
        recover: bool = False,
        persistence: int = PERSISTENCE,
    ) -> None:
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.max_grad_norm, self.persistence = max_grad_norm, persistence
        self.history = LossHistory()
        self.steps = 0
        self._losses: dict[str, deque[float]] = {"training": deque(maxlen=RECENT), "validation": deque(maxlen=RECENT)}
        self._contained = Contained()
        self._send = training_tags.tag_sender(logger) if logger is not None else None
        self.corrector = StabilityCorrector(optimizer, policy=policy, factors=factors, recover=recover)

    def clip_gradients(self, max_norm: float | None = None) -> Clipped:
        """Clip to `max_norm`, or to the monitor's own limit; call it once a step, after backward."""
        limit = self.max_grad_norm if max_norm is None else max_norm
        result = clip_gradients(self.model, limit, optimizer=self.corrector.optimizer, scaler=self.scaler)
        self._log({training_tags.GRAD_NORM_BEFORE: result.before, training_tags.GRAD_NORM_AFTER: result.after})
        self.steps += 1
        return result

    def check_nan_inf(self, tensor: Tensor | float, name: str) -> bool:
        """Whether a tensor or a loss holds a NaN or Inf; logs a warning with its name."""
        return check_nan_inf(tensor, name)

    def handle_nan_inf(self, tensor: Tensor, replacement_value: float = 0.0) -> Tensor:
        """A new tensor with every NaN and Inf replaced: an explicit choice, which the monitor never makes itself."""
        return handle_nan_inf(tensor, replacement_value)

    def check_parameters(self) -> tuple[str, ...]:
        """Names of parameters and buffers that hold a NaN or Inf, each logged."""
        named = [(f"parameter {n}", p) for n, p in self.model.named_parameters()]
        bad = find_nonfinite([*named, *((f"buffer {n}", b) for n, b in self.model.named_buffers())])
        for name, (nan, inf) in bad.items():
            report_nonfinite(name, nan, inf)
        return tuple(bad)

    def check_training_stability(self, train_loss: Tensor | float, val_loss: Tensor | float | None = None) -> list[str]:
        """Judge an epoch by its losses, and correct what is wrong: the gravest first, each within its bounds."""
        self._losses["training"].append(number(train_loss))  # NaN included, which `history` leaves out
        if val_loss is not None:
            self._losses["validation"].append(number(val_loss))
        issues = check_training_stability(train_loss, val_loss, self.history, persistence=self.persistence)
        for issue in sorted(issues, key=lambda name: self.corrector.factors[name]):
            self.handle_training_instability(issue)
        return issues

    def handle_training_instability(self, issue: str) -> Outcome:
        """Apply the documented correction for an issue, through the monitor's `StabilityCorrector`."""
        outcome = self.corrector.handle(issue)
        if outcome.applied:
            tag = (
                training_tags.ADJUSTED_WD if outcome.action.kind == "raise_weight_decay" else training_tags.ADJUSTED_LR
            )
            now = self.corrector.decays if tag == training_tags.ADJUSTED_WD else self.corrector.rates
            self._log({training_tags.CORRECTIVE_ACTION: 1.0, tag: max(now)})
        return outcome

    def monitor_training_health(self, *, training: bool | None = True) -> dict[str, bool]:
        """The five documented booleans about this model, its optimizer and its losses so far."""
        return monitor_training_health(self.model, self._losses, self.optimizer, training=training)

    def get_training_stats(self) -> TrainingStats:
        """The documented numbers; the learning rate includes cuts."""
        return get_training_stats(
            self.model,
            self.optimizer,
            training_history=self.history.train,
            validation_history=self.history.val,
            scaler=self.scaler,
            learning_rate=next(iter(self.corrector.rates), None),
        )

    def _log(self, values: Mapping[str, float]) -> None:
        if self._send is not None:
            self._contained.call("the logger of the training tags", self._send, values, self.steps)

    def state_dict(self) -> MonitorState:
        """Plain data."""
        return {"steps": self.steps, "history": self.history.state_dict(), "keeper": self.corrector.state_dict()}

    def load_state_dict(self, state: MonitorState) -> None:
        """Continue from where `state_dict` was taken."""
        self.steps = int(state["steps"])
        self.history.load_state_dict(state["history"])
        self.corrector.load_state_dict(state["keeper"])

    def close(self) -> None:
        """Undo a cut of the learning rate and release the optimizer."""
        self.corrector.remove()

    def __enter__(self) -> StabilityMonitor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # The documented spellings, for a trainer that holds a monitor.
    _clip_gradients = clip_gradients
    _check_nan_inf = check_nan_inf
    _handle_nan_inf = handle_nan_inf
    _check_training_stability = check_training_stability
    _handle_training_instability = handle_training_instability


def monitor_training_health(
    model: nn.Module,
    losses: Losses = (),
    optimizer: object = None,
    *,
    training: bool | None = True,
    recent: int = RECENT,
) -> dict[str, bool]:
    """Healthy or not, part by part; what is wrong is logged by name. Changes nothing.

    - `gradients_healthy`: no gradient holds a NaN or Inf.
    - `losses_healthy`: none of the last `recent` losses is NaN or Inf. `losses` is a list, or one list by name.
    - `parameters_healthy`: no parameter holds a NaN or Inf.
    - `model_healthy`: no buffer (running statistics, say) holds a NaN or Inf; the model is in the mode that `training`
      says, so that a model left in evaluation mode is seen (None asks nothing); and the optimizer, where one or several
      are given, holds every trainable parameter of the model and none that has left it.
    - `overall_healthy`: all of them.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> monitor_training_health(model, losses=[0.7, float("nan")])["losses_healthy"]
        False
        >>> monitor_training_health(model, losses=[0.7])["overall_healthy"]
        True
    """
    gradients = [(f"gradient of {name}", p.grad) for name, p in model.named_parameters() if p.grad is not None]
    parameters = [(f"parameter {name}", p) for name, p in model.named_parameters()]
    buffers = [(f"buffer {name}", b) for name, b in model.named_buffers()]
    bad = find_nonfinite([*gradients, *parameters, *buffers])  # together: one transfer
    troubles: dict[str, list[str]] = {
        "gradients_healthy": [name for name, _ in gradients if name in bad],
        "losses_healthy": _bad_losses(losses, recent),
        "parameters_healthy": [name for name, _ in parameters if name in bad],
        "model_healthy": [
            *(name for name, _ in buffers if name in bad),
            *_mode(model, training),
            *(mismatch(model, optimizer) if optimizer is not None else ()),
        ],
    }
    for part, found in troubles.items():
        if found:
            log.warning("%s is False: %s", part, "; ".join(found[:8]))
    report = {part: not troubles[part] for part in HEALTH_PARTS}
    return report | {"overall_healthy": all(report.values())}


def _bad_losses(losses: Losses, recent: int) -> list[str]:
    families = losses if isinstance(losses, Mapping) else {"": losses}
    out = []
    for name, values in families.items():
        known = [number(v) for v in values][-recent:]
        bad = sum(not math.isfinite(v) for v in known)
        if bad:
            out.append(f"{bad} of the last {len(known)} {f'{name} ' if name else ''}losses are NaN or Inf")
    return out


def _mode(model: nn.Module, training: bool | None) -> list[str]:
    if training is None or model.training == training:
        return []
    return [f"the model is in {'training' if model.training else 'evaluation'} mode"]


def mismatch(model: nn.Module, optimizer: object) -> list[str]:
    """What the optimizer misses of the model, and what it moves that is no longer there."""
    named = dict(model.named_parameters())
    mine = {id(p) for p in named.values()}
    held = {id(p): p for p in params_of(*labelled(optimizer).values())}
    missed = [name for name, p in named.items() if p.requires_grad and id(p) not in held]
    foreign = sum(key not in mine for key in held)
    out = [f"the optimizer does not hold {', '.join(missed[:4])}"] if missed else []
    return out + ([f"the optimizer holds {foreign} parameters that are not the model's"] if foreign else [])


def get_training_stats(
    model: nn.Module,
    optimizer: object = None,
    *,
    training_history: Sequence[float] = (),
    validation_history: Sequence[float] = (),
    scaler: GradScaler | None = None,
    amp_enabled: bool | None = None,
    learning_rate: float | None = None,
) -> TrainingStats:
    """The documented numbers of a run, in one dictionary.

    The rate and decay are those of the first parameter group; a rate that is cut around the steps cannot be read from
    it, so pass `learning_rate` if you know it. Without a scaler pass `amp_enabled` for bfloat16.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> stats = get_training_stats(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01))
        >>> stats["current_learning_rate"], stats["current_weight_decay"], stats["total_parameters"]
        (0.1, 0.01, 3)
    """
    groups = groups_of(*labelled(optimizer).values()) if optimizer is not None else []
    rate = learning_rate if learning_rate is not None else _first(groups, "lr")
    first = next(model.parameters(), None)
    enabled = bool(scaler.is_enabled()) if scaler is not None else False
    return {
        "training_history": list(training_history),
        "validation_history": list(validation_history),
        "current_learning_rate": rate,
        "current_weight_decay": _first(groups, "weight_decay"),
        "total_parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "device": str(first.device) if first is not None else "cpu",
        "amp_enabled": enabled if amp_enabled is None else amp_enabled,
        "current_gradient_norm": compute_global_gradient_norm(model),
    }


def _first(groups: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return next((number(g[key]) for g in groups if g.get(key) is not None), None)
