"""Clip, check and correct: what a documented trainer asks for between backward and step, and after each epoch."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trimtab.core.config import PolicyConfig
from trimtab.core.contain import Contained
from trimtab.core.errors import InputError
from trimtab.core.types import Outcome
from trimtab.guard.protect import SAFE_EPS
from trimtab.monitor.loss_history import ISSUES, LossHistory, check_training_stability
from trimtab.monitor.model_health import HEALTH_KEYS, RECENT, get_training_stats, monitor_training_health
from trimtab.monitor.nonfinite import check_nan_inf, find_nonfinite, handle_nan_inf, report_nonfinite
from trimtab.monitor.norms import clip_gradients_by_global_norm
from trimtab.monitor.snapshot import snapshot
from trimtab.monitor.stability_remedies import FACTORS, StabilityKeeper, handle_training_instability, keeper_of
from trimtab.record import lines, training_tags
from trimtab.sample.transfer import number
from trimtab.torchutil.scaler import scale_of, unscale

__all__ = [
    "FACTORS",
    "HEALTH_KEYS",
    "ISSUES",
    "Clipped",
    "LossHistory",
    "StabilityKeeper",
    "StabilityMonitor",
    "check_nan_inf",
    "check_training_stability",
    "clip_gradients",
    "find_nonfinite",
    "get_training_stats",
    "handle_nan_inf",
    "handle_training_instability",
    "keeper_of",
    "monitor_training_health",
]

log = logging.getLogger("trimtab")

MAX_GRAD_NORM = 1.0
PERSISTENCE = 3
"""Epochs in a row before overfitting is acted upon: one noisy epoch is no reason to change a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """The norm of all gradients before and after clipping, and the parameters whose gradient is not finite."""

    before: float
    after: float
    nonfinite: tuple[str, ...] = ()

    @property
    def skip(self) -> bool:
        """Whether this step must not be made: a NaN or Inf was found, and nothing was changed."""
        return bool(self.nonfinite) or not math.isfinite(self.before)


def clip_gradients(
    model: nn.Module, max_norm: float | None = None, *, optimizer: Any = None, scaler: Any = None
) -> Clipped:
    """Scale all gradients down to a norm of at most `max_norm` (1.0), and log the norm before and after.

    With a `scaler` the gradients are unscaled first, which needs the `optimizer`: scaled ones would be clipped to
    nothing. Gradients with a NaN or Inf are named, and left alone: skip such a step (`.skip`); a scaler does so by
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
    if routine:  # while a scaler looks for its scale this happens now and then, and the scaler deals with it
        log.info("%d gradients overflowed at this scale; the scaler will skip the step and back off", len(names))
        return names
    for i in bad:
        report_nonfinite(f"gradient of {seen.names[i]}", seen.nan[i], seen.inf[i])
    return names


class StabilityMonitor:
    """Holds what the documented checks need: the model, its optimizer, the losses so far, and the corrections.

    `logger` gets the documented tags: a SummaryWriter, anything with `.log()`, or None. `factors`, `policy` and
    `recover` are those of `StabilityKeeper`; overfitting counts once it lasted `persistence` epochs. `close`, or
    leaving the `with` block, takes a cut of the learning rate back.

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
        optimizer: Any,
        max_grad_norm: float = MAX_GRAD_NORM,
        scaler: Any = None,
        logger: Any = None,
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
        self._told: dict[str, deque[float]] = {"training": deque(maxlen=RECENT), "validation": deque(maxlen=RECENT)}
        self._contained = Contained()
        self._send = training_tags.tag_sender(logger) if logger is not None else None
        self.keeper = StabilityKeeper(optimizer, policy=policy, factors=factors, recover=recover)

    def clip_gradients(self, max_norm: float | None = None) -> Clipped:
        """Clip to `max_norm`, or to the monitor's own limit; call it once a step, after backward."""
        limit = self.max_grad_norm if max_norm is None else max_norm
        result = clip_gradients(self.model, limit, optimizer=self.keeper.optimizer, scaler=self.scaler)
        self._tell({training_tags.GRAD_NORM_BEFORE: result.before, training_tags.GRAD_NORM_AFTER: result.after})
        self.steps += 1
        return result

    def check_nan_inf(self, tensor: Tensor | float, name: str) -> bool:
        """Whether a tensor or a loss holds a NaN or Inf; logs a warning with its name."""
        return check_nan_inf(tensor, name)

    def handle_nan_inf(self, tensor: Tensor, replacement_value: float = 0.0) -> Tensor:
        """A new tensor with every NaN and Inf replaced: an explicit choice, which the monitor never makes itself."""
        return handle_nan_inf(tensor, replacement_value)

    def check_parameters(self) -> tuple[str, ...]:
        """Names of parameters and buffers that hold a NaN or Inf, each logged; before and after a forward, say."""
        named = [(f"parameter {n}", p) for n, p in self.model.named_parameters()]
        bad = find_nonfinite([*named, *((f"buffer {n}", b) for n, b in self.model.named_buffers())])
        for name, (nan, inf) in bad.items():
            report_nonfinite(name, nan, inf)
        return tuple(bad)

    def check_training_stability(self, train_loss: Tensor | float, val_loss: Tensor | float | None = None) -> list[str]:
        """Judge an epoch by its losses, and correct what is wrong: the gravest first, each within its bounds."""
        self._told["training"].append(number(train_loss))  # as they are: the history of finite ones keeps no NaN
        if val_loss is not None:
            self._told["validation"].append(number(val_loss))
        issues = check_training_stability(train_loss, val_loss, self.history, persistence=self.persistence)
        for issue in sorted(issues, key=lambda name: self.keeper.factors[name]):
            self.handle_training_instability(issue)
        return issues

    def handle_training_instability(self, issue: str) -> Outcome:
        """Do what is documented for an issue, through the monitor's `StabilityKeeper`."""
        outcome = self.keeper.handle(issue)
        if outcome.applied:
            tag = (
                training_tags.ADJUSTED_WD if outcome.action.kind == "raise_weight_decay" else training_tags.ADJUSTED_LR
            )
            now = self.keeper.decays if tag == training_tags.ADJUSTED_WD else self.keeper.rates
            self._tell({training_tags.CORRECTIVE_ACTION: 1.0, tag: max(now)})
        return outcome

    def monitor_training_health(self, *, training: bool | None = True) -> dict[str, bool]:
        """The five documented booleans about this model, its optimizer and the losses told so far."""
        return monitor_training_health(self.model, self._told, self.optimizer, training=training)

    def get_training_stats(self) -> dict[str, Any]:
        """The documented numbers; the learning rate is the one really used."""
        return get_training_stats(
            self.model,
            self.optimizer,
            training_history=self.history.train,
            validation_history=self.history.val,
            scaler=self.scaler,
            learning_rate=next(iter(self.keeper.rates), None),
        )

    def _tell(self, values: Mapping[str, float]) -> None:
        if self._send is not None:
            self._contained.call("the logger of the training tags", self._send, values, self.steps)

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"steps": self.steps, "history": self.history.state_dict(), "keeper": self.keeper.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.steps = int(state["steps"])
        self.history.load_state_dict(state["history"])
        self.keeper.load_state_dict(state["keeper"])

    def close(self) -> None:
        """Take a cut of the learning rate back and let go of the optimizer."""
        self.keeper.remove()

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
