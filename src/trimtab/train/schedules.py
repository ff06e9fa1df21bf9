"""Learning-rate schedules, stepped with every optimizer step, each parameter group with a peak of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from trimtab.core.errors import InputError
from trimtab.train.settings import SCHEDULES

log = logging.getLogger("trimtab")


class Schedule:
    """A schedule with an exact linear warm-up before it; owns what the rates of an optimizer are.

    During the warm-up the rate at step s is `init + (s / warmup_steps) * (base - init)`; then the inner schedule
    begins at its own beginning. `step` is called after each optimizer step, `epoch_done` after each validation.

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
        self, optimizer: Optimizer, inner: Any, base_lrs: Sequence[float], warmup_steps: int, warmup_init_lr: float
    ) -> None:
        self.optimizer: Any = optimizer
        self.base_lrs = list(base_lrs)
        self.count = 0
        self._inner, self._warmup = inner, warmup_steps
        highest = max(self.base_lrs)
        self._first = [warmup_init_lr * base / highest for base in self.base_lrs]
        self._after = [float(group["lr"]) for group in self.optimizer.param_groups]
        if warmup_steps:
            self._warm()

    @property
    def rates(self) -> list[float]:
        """The learning rate of each group for the coming step, without what a guard may cut."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self) -> None:
        """One optimizer step was attempted."""
        self.count += 1
        if self.count < self._warmup:
            self._warm()
        elif self.count == self._warmup:
            self._put(self._after)
        elif self._inner is not None and not _by_metric(self._inner) and not self._over() and self._moved():
            self._inner.step()

    def epoch_done(self, metric: float) -> None:
        """A validation gave this loss: what `plateau` goes by."""
        if self._inner is not None and _by_metric(self._inner) and self.count >= self._warmup:
            self._inner.step(metric)

    def _warm(self) -> None:
        frac = self.count / self._warmup
        self._put([first + frac * (base - first) for first, base in zip(self._first, self.base_lrs, strict=True)])

    def _put(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _moved(self) -> bool:
        """Whether there was a step at all: a scaler may have skipped the first ones, and torch warns about those."""
        return self._inner.last_epoch > 0 or bool(getattr(self.optimizer, "_opt_called", False))

    def _over(self) -> bool:
        total = getattr(self._inner, "total_steps", None)  # one cycle must not be stepped beyond its end
        return total is not None and self._inner.last_epoch >= total - 1

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        inner = {} if self._inner is None else self._inner.state_dict()
        return {"count": self.count, "inner": inner, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; the rates themselves come with the optimizer."""
        self.count = int(state["count"])
        if self._inner is not None:
            self._inner.load_state_dict(dict(state["inner"]))


def make_schedule(
    optimizer: Optimizer,
    kind: str,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    warmup_init_lr: float = 0.0,
    min_lr: float = 0.0,
    pct_start: float = 0.1,
    gamma: float = 0.1,
    step_size: int = 0,
    t_mult: int = 1,
    factor: Callable[[int], float] | None = None,
) -> Schedule:
    """The schedule of that kind over `total_steps`; each group's own rate is its base, and its peak in `onecycle`.

    `step_size` is how many steps `step` keeps a rate (a third of the run unless given) and how long a first cycle of
    `cosine_restart` is (a quarter). `gamma` is the factor of `step` and `plateau`, and what is left at the end of
    `exponential`. `factor` is the function of `lambda`; without it the rate falls with one over the root of the steps.

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
    total = max(int(total_steps), 1)
    warmup = min(warmup_steps, total // 2)
    if warmup < warmup_steps:
        log.warning("a warm-up of %d steps is more than half of the run's %d: %d it is", warmup_steps, total, warmup)
    bases = [float(group["lr"]) for group in optimizer.param_groups]
    if kind == "onecycle":  # its rise is its warm-up
        share = warmup / total if warmup else pct_start
        inner: Any = lr_scheduler.OneCycleLR(
            optimizer, max_lr=bases, total_steps=max(total, 2), pct_start=share, cycle_momentum=False
        )
        return Schedule(optimizer, inner, bases, 0, 0.0)
    left = max(total - warmup, 1)
    inner = _inner(optimizer, kind, left, min_lr=min_lr, gamma=gamma, size=step_size, t_mult=t_mult, factor=factor)
    return Schedule(optimizer, inner, bases, warmup, warmup_init_lr)


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
) -> Any:
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


def _inverse_root(step: int) -> float:
    return float((1.0 + step / 100.0) ** -0.5)


def _by_metric(inner: Any) -> bool:
    return isinstance(inner, lr_scheduler.ReduceLROnPlateau)
