"""The documented corrections of an unstable run, layered over any scheduler, bounded, and taken back on `remove`."""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Mapping
from typing import Any

from trimtab.core.config import PolicyConfig
from trimtab.core.errors import AttachError, InputError
from trimtab.core.types import Action, Outcome, Remedy
from trimtab.monitor.loss_history import ISSUES, LOSS_EXPLOSION, OVERFITTING, TRAIN_LOSS_NAN_INF, VAL_LOSS_NAN_INF
from trimtab.remedies.cut_lr import CutLR, LrMultiplier
from trimtab.remedies.raise_weight_decay import RaiseWeightDecay
from trimtab.sample.transfer import number
from trimtab.torchutil.optimizer_argument import innermost

log = logging.getLogger("trimtab")

FACTORS: Mapping[str, float] = {
    TRAIN_LOSS_NAN_INF: 0.5,
    VAL_LOSS_NAN_INF: 0.5,
    LOSS_EXPLOSION: 0.1,
    OVERFITTING: 1.5,
}
"""The documented factors: of the learning rate, and for overfitting of the weight decay."""

_KEEPERS: weakref.WeakValueDictionary[int, StabilityKeeper] = weakref.WeakValueDictionary()
"""By the id of the optimizer, which keeps its keeper alive and dies with it."""


class StabilityKeeper:
    """Cuts the learning rate and raises the weight decay of one optimizer; owns the multiplier around its `step`.

    The cut is a multiplier that is there only while the optimizer steps: no scheduler sees it, so none undoes it. It
    does not go below `policy.floor`; between two corrections of one kind lie at least `policy.cooldown` steps, and
    there are at most `policy.budget` in all. It lasts, as documented, unless `recover` is set: then it grows back after
    the cool-down, tenfold in `policy.recover` steps. `factors` replaces documented factors by issue.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> with StabilityKeeper(optimizer) as keeper:
        ...     keeper.handle("loss_explosion").detail
        'LR multiplier 1 -> 0.1, effective LR 0.01'
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        policy: PolicyConfig | None = None,
        factors: Mapping[str, float] | None = None,
        recover: bool = False,
    ) -> None:
        self.optimizer: Any = innermost(optimizer)
        if id(self.optimizer) in _KEEPERS:
            raise AttachError("this optimizer already has a StabilityKeeper; use that one, or remove() it first")
        self._policy = policy or PolicyConfig()
        self.factors = dict(FACTORS) | {_known(issue): value for issue, value in (factors or {}).items()}
        for issue, value in self.factors.items():
            _check_factor(issue, value)
        self._recover = recover
        self.multiplier = LrMultiplier(self.optimizer, self._policy)
        self.steps = self.spent = 0
        self._last: dict[str, int] = {}
        self._removed = False
        self._install()
        _KEEPERS[id(self.optimizer)] = self

    def handle(self, issue: str, factor: float | None = None) -> Outcome:
        """Do what is documented for an issue, unless it is too soon or too often; says what became of it."""
        factor = self.factors[_known(issue)] if factor is None else factor
        _check_factor(issue, factor)
        remedy: Remedy = RaiseWeightDecay() if issue == OVERFITTING else CutLR()
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
            return "nothing was done: this keeper was removed"
        if self.spent >= self._policy.budget:
            return f"nothing was done: the budget of {self._policy.budget} corrections is spent"
        since = self.steps - self._last.get(kind, -self._policy.cooldown)
        if since < self._policy.cooldown:
            return f"nothing was done: the last one was {since} steps ago, at least {self._policy.cooldown} must pass"
        return ""

    @property
    def rates(self) -> list[float]:
        """The learning rate each group really steps with."""
        return [number(g["lr"]) * self.multiplier.value for g in self.optimizer.param_groups if "lr" in g]

    @property
    def decays(self) -> list[float]:
        """The weight decay of each group that has one."""
        found = [g.get("weight_decay") for g in self.optimizer.param_groups]
        return [number(decay) for decay in found if decay is not None]

    def _install(self) -> None:
        """Around `step`, outside of every hook: what a guard puts into the groups in between, it takes out in between.

        Hooks would run in one order before and after the step, and two multipliers must be undone in reverse.
        """
        inner = self.optimizer.step
        self._had = self.optimizer.__dict__.get("step")

        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
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

        # A bound method carrying the inner one's marks: LR schedulers look for both on `optimizer.step`. But not its
        # signature: a GradScaler reads that, and fails where bound methods wrap each other.
        marked: Any = functools.wraps(inner)(step)
        del marked.__wrapped__
        self._mine = types.MethodType(marked, self.optimizer)
        self.optimizer.step = self._mine

    def remove(self) -> None:
        """Take the multiplier off: the scheduler's own rates hold again. A raised weight decay stays."""
        self._removed = True
        self.multiplier.remove()
        if _KEEPERS.get(id(self.optimizer)) is self:
            del _KEEPERS[id(self.optimizer)]
        if self.optimizer.__dict__.get("step") is self._mine:  # else somebody wrapped it since: it stays, doing nothing
            if self._had is None:
                del self.optimizer.step
            else:
                self.optimizer.step = self._had

    def state_dict(self) -> dict[str, Any]:
        """Plain data; the weight decay itself is saved with the optimizer."""
        return {
            "multiplier": self.multiplier.state_dict(),
            "steps": self.steps,
            "spent": self.spent,
            "last": dict(self._last),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.multiplier.load_state_dict(state["multiplier"])
        self.steps, self.spent = int(state["steps"]), int(state["spent"])
        self._last = {str(kind): int(step) for kind, step in state["last"].items()}

    def __enter__(self) -> StabilityKeeper:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def keeper_of(optimizer: Any) -> StabilityKeeper:
    """The keeper of an optimizer; made, with documented settings, where it has none yet."""
    found = _KEEPERS.get(id(innermost(optimizer)))
    return found if found is not None else StabilityKeeper(optimizer)


def handle_training_instability(issue: str, optimizer: Any, *, factor: float | None = None) -> Outcome:
    """Correct an unstable run: LR x0.5 after NaN or Inf, x0.1 after an explosion, weight decay x1.5 on overfitting.

    Works through the optimizer's `StabilityKeeper`, which bounds it; make one first to set factors, bounds or
    cool-down, and `keeper_of(optimizer).remove()` takes the cut back.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1, weight_decay=0.01)
        >>> handle_training_instability("train_loss_nan_inf", optimizer).applied
        True
        >>> keeper_of(optimizer).rates, optimizer.param_groups[0]["lr"]
        ([0.05], 0.1)
        >>> handle_training_instability("overfitting", optimizer).detail
        'weight decay 0.01 -> 0.015'
        >>> keeper_of(optimizer).remove()
    """
    return keeper_of(optimizer).handle(_known(issue), factor)


def _known(issue: str) -> str:
    if issue not in ISSUES:
        raise InputError(f"{issue!r} is no known issue; expected one of {', '.join(ISSUES)}")
    return issue


def _check_factor(issue: str, factor: float) -> None:
    low, high = (1.0, 10.0) if issue == OVERFITTING else (0.0, 1.0)
    if not low < factor <= high:
        raise InputError(f"the factor for {issue} is {factor}; expected a number above {low:g}, at most {high:g}")
