"""Learning-rate schedules, stepped with every optimizer step; each parameter group has its own peak."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypedDict

from torch.optim import Optimizer, lr_scheduler

from trimtab.core.errors import InputError
from trimtab.torchutil.optimizers import rates_of
from trimtab.train.settings import SCHEDULES

log = logging.getLogger("trimtab")
RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""What torch's schedulers keep in the groups of an optimizer."""
LENGTHLESS = ("none", "plateau", "lambda")
"""Schedules that need not know how many steps there will be."""


class ScheduleState(TypedDict):
    """What a checkpoint holds of a schedule."""

    count: int
    inner: dict[str, object]
    base_lrs: list[float]
    plan: dict[str, object]


class Schedule:
    """A schedule with an exact linear warm-up before it; owns what the rates of an optimizer are.

    During the warm-up the rate at step s is `init + (s / warmup_steps) * (base - init)`; then the inner schedule
    begins at its own beginning. `step` is called after each optimizer step, `epoch_done` after each validation. `plan`
    is what the schedule was made from: resumed from a checkpoint with another plan, it follows its own.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=5e-5)
        >>> schedule = make_schedule(optimizer, "none", total_steps=600, warmup_steps=200, warmup_init_lr=1e-6)
        >>> for _ in range(100):
        ...     optimizer.step(); schedule.step()
        >>> f"{schedule.rates[0]:.3e}"
        '2.550e-05'
    """

    def __init__(
        self,
        optimizer: Optimizer,
        inner: lr_scheduler.LRScheduler | None,
        base_lrs: Sequence[float],
        warmup_steps: int,
        warmup_init_lr: float,
        plan: Mapping[str, object] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.base_lrs = list(base_lrs)
        self.count = 0
        self._other: list[str] = []  # what a checkpoint that was loaded had planned otherwise
        self._inner, self._warmup, self._plan = inner, warmup_steps, dict(plan or {})
        highest = max(self.base_lrs)
        self._first = [warmup_init_lr * base / highest for base in self.base_lrs]
        self._after = rates_of(self.optimizer, wait=True)
        self._groups = [{k: group[k] for k in RATES if k in group} for group in self.optimizer.param_groups]
        self._initial = copy.deepcopy(self._inner_state())
        if warmup_steps:
            self._warm()

    @property
    def rates(self) -> list[float]:
        """The learning rate of each group for the next step, before any cut by a guard."""
        return rates_of(self.optimizer, wait=True)

    def step(self) -> None:
        """Count an attempted optimizer step, and set the rates of the next."""
        self.count += 1
        if self.count < self._warmup:
            self._warm()
        elif self.count == self._warmup:
            self._put(self._after)
        elif (inner := self._inner) is None or isinstance(inner, lr_scheduler.ReduceLROnPlateau) or _is_over(inner):
            return
        elif inner.last_epoch > 0 or self._stepped():
            inner.step()

    def epoch_done(self, metric: float) -> None:
        """Report a validation loss, for `plateau`. A non-finite one is ignored."""
        if not math.isfinite(metric):
            return
        if isinstance(self._inner, lr_scheduler.ReduceLROnPlateau) and self.count >= self._warmup:
            self._inner.step(metric)

    def _warm(self) -> None:
        frac = self.count / self._warmup
        self._put([first + frac * (base - first) for first, base in zip(self._first, self.base_lrs, strict=True)])

    def _put(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _stepped(self) -> bool:
        """Whether there was a step at all: a scaler may have skipped the first ones, and torch warns about those."""
        return bool(getattr(self.optimizer, "_opt_called", False))

    def state_dict(self) -> ScheduleState:
        """Plain data."""
        base_lrs, plan = list(self.base_lrs), dict(self._plan)
        return {"count": self.count, "inner": self._inner_state(), "base_lrs": base_lrs, "plan": plan}

    def load_state_dict(self, state: ScheduleState) -> None:
        """Continue from where `state_dict` was taken; the rates come with the optimizer, unless the plan is new."""
        saved: dict[str, object] = {"base_lrs": list(state["base_lrs"]), **state.get("plan", self._plan)}
        here: dict[str, object] = {"base_lrs": self.base_lrs, **self._plan}
        differing = [name for name in {**saved, **here} if saved.get(name) != here.get(name)]
        other = [f"{name} was {saved.get(name)}, is {here.get(name)}" for name in differing]
        self.count, self._other = int(state["count"]), other
        if self._inner is not None and not other:
            self._inner.load_state_dict(dict(state["inner"]))

    def follow_plan(self) -> None:
        """After a resume from a checkpoint with another plan: go to the same step of this plan."""
        if not self._other:
            return
        log.warning("the schedule continues at step %d of another plan: %s", self.count, "; ".join(self._other))
        self._other, count = [], self.count
        for group, own in zip(self.optimizer.param_groups, self._groups, strict=True):
            for name in RATES:
                group.pop(name, None)
            group |= own
        if self._inner is not None:
            self._inner.load_state_dict(copy.deepcopy(self._initial))
        self.count = 0
        setattr(self.optimizer, "_opt_called", True)  # noqa: B010  # torch warns about steps that no optimizer made
        if self._warmup:
            self._warm()
        for _ in range(count):
            self.step()

    def _inner_state(self) -> dict[str, object]:
        return {} if self._inner is None else dict(self._inner.state_dict())


def make_schedule(
    optimizer: Optimizer,
    kind: str,
    *,
    total_steps: int | None,
    warmup_steps: int = 0,
    warmup_init_lr: float = 0.0,
    min_lr: float = 0.0,
    min_lr_ratio: float = 0.0,
    pct_start: float = 0.1,
    div_factor: float = 25.0,
    gamma: float = 0.1,
    step_size: int = 0,
    t_mult: int = 1,
    factor: Callable[[int], float] | None = None,
) -> Schedule:
    """The schedule of that kind over `total_steps`; each group's own rate is its base, and its peak in `onecycle`.

    If the number of steps is unknown, `total_steps` is None: `none`, `plateau` and `lambda` work, `step`
    and `cosine_restart` with a `step_size`.
    `step_size` is how many steps `step` keeps a rate (a third of the run unless given) and how long a first cycle of
    `cosine_restart` is (a quarter). `gamma` is the factor of `step` and `plateau`, and what is left at the end of
    `exponential`. `onecycle` begins at its peak over `div_factor`. `cosine` ends at `min_lr`, or each group at
    `min_lr_ratio` of its own rate. `factor` is the function of `lambda`; without it the rate falls with one over the
    root of the steps.

    Example:
        >>> import torch
        >>> head, body = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> groups = [{"params": head.parameters(), "lr": 1e-3}, {"params": body.parameters(), "lr": 1e-4}]
        >>> optimizer = torch.optim.SGD(groups)
        >>> schedule = make_schedule(optimizer, "onecycle", total_steps=100)
        >>> peak = [0.0, 0.0]
        >>> for _ in range(100):
        ...     peak = [max(one) for one in zip(peak, schedule.rates)]
        ...     optimizer.step(); schedule.step()
        >>> [f"{rate:.0e}" for rate in peak]
        ['1e-03', '1e-04']
    """
    if kind not in SCHEDULES:
        raise InputError(f"scheduler_type is {kind!r}; expected one of {', '.join(SCHEDULES)}")
    if total_steps is None and kind not in LENGTHLESS and not (step_size and kind in ("step", "cosine_restart")):
        raise InputError(
            f"the loader does not say how long it is, and a schedule of kind {kind!r} must know; give max_steps, or "
            f"scheduler_type {', '.join(LENGTHLESS)}"
        )
    total = max(2 * warmup_steps if total_steps is None else int(total_steps), 1)
    warmup = min(warmup_steps, total // 2)
    if warmup < warmup_steps:
        log.warning("a warm-up of %d steps is more than half of the run's %d: %d it is", warmup_steps, total, warmup)
    bases = rates_of(optimizer, wait=True)
    plan = {"kind": kind, "total_steps": total_steps, "warmup_steps": warmup, "warmup_init_lr": warmup_init_lr}
    plan |= {"min_lr": min_lr, "pct_start": pct_start, "gamma": gamma, "step_size": step_size, "t_mult": t_mult}
    if min_lr_ratio:
        plan["min_lr_ratio"] = min_lr_ratio
    if div_factor != 25.0:
        plan["div_factor"] = div_factor
    if kind == "onecycle":  # its rise is its warm-up
        share = warmup / total if warmup else pct_start
        inner: lr_scheduler.LRScheduler | None = lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=bases,
            total_steps=max(total, 2),
            pct_start=share,
            div_factor=div_factor,
            cycle_momentum=False,
        )
        return Schedule(optimizer, inner, bases, 0, 0.0, plan)
    left = max(total - warmup, 1)
    if kind == "cosine" and min_lr_ratio:  # torch's has one end for all groups
        kind, factor = "lambda", partial(_cosine, left, min_lr_ratio)
    inner = _inner(optimizer, kind, left, min_lr=min_lr, gamma=gamma, size=step_size, t_mult=t_mult, factor=factor)
    return Schedule(optimizer, inner, bases, warmup, warmup_init_lr, plan)


def _inner(
    optimizer: Optimizer,
    kind: str,
    total: int,
    *,
    min_lr: float,
    gamma: float,
    size: int,
    t_mult: int,
    factor: Callable[[int], float] | None,
) -> lr_scheduler.LRScheduler | None:
    if kind == "cosine":
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=total, eta_min=min_lr)
    if kind == "cosine_restart":
        first = size or max(total // 4, 1)
        return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=first, T_mult=t_mult, eta_min=min_lr)
    if kind == "step":
        return lr_scheduler.StepLR(optimizer, step_size=size or max(total // 3, 1), gamma=gamma)
    if kind == "exponential":
        return lr_scheduler.ExponentialLR(optimizer, gamma=gamma ** (1.0 / total))
    if kind == "plateau":
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=gamma, patience=3, min_lr=min_lr)
    if kind == "lambda":
        return lr_scheduler.LambdaLR(optimizer, factor or _inverse_root)
    return None


def _cosine(total: int, least: float, step: int) -> float:
    return least + (1.0 - least) * 0.5 * (1.0 + math.cos(math.pi * min(step / total, 1.0)))


def _inverse_root(step: int) -> float:
    return float((1.0 + step / 100.0) ** -0.5)


def _is_over(inner: lr_scheduler.LRScheduler) -> bool:
    total: int | None = getattr(inner, "total_steps", None)  # one cycle must not be stepped beyond its end
    return total is not None and inner.last_epoch >= total - 1
