"""Learning rates and what a schedule will do to them: the highest one, the one half an epoch ahead, and other ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trimtab.torchutil.param_groups import rates_of
from trimtab.torchutil.patch import wrap_on_object

if TYPE_CHECKING:
    from trimtab.doctor.probe import Probe


def current_rates(optimizers: Sequence[Any]) -> list[list[float]]:
    """The rates of every optimizer and group, as they are."""
    return [rates_of(optimizer, wait=True) for optimizer in optimizers]


def _highest(optimizers: Sequence[Any]) -> float:
    return max((rate for rates in current_rates(optimizers) for rate in rates), default=0.0)


def peaks(optimizers: Sequence[Any], schedulers: Sequence[Any], num: int) -> list[list[float]]:
    """The highest rates within so many moves of the schedules, which are not moved back here."""
    top = current_rates(optimizers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for scheduler in schedulers:
            if hasattr(scheduler, "num_bad_epochs"):
                continue  # it wants to be told how things go
            try:
                for _ in range(num):
                    scheduler.step()
                    now = current_rates(optimizers)
                    top = [[max(a, b) for a, b in zip(x, y, strict=True)] for x, y in zip(top, now, strict=True)]
            except Exception:
                continue  # it ends before that, or wants arguments
    return top


def set_rates(optimizers: Sequence[Any], rates: list[list[float]], factor: float = 1.0) -> None:
    """Put other rates in their place."""
    for optimizer, mine in zip(optimizers, rates, strict=True):
        for group, rate in zip(optimizer.param_groups, mine, strict=True):
            if isinstance(group.get("lr"), Tensor):
                group["lr"].fill_(rate * factor)
            elif "lr" in group:
                group["lr"] = rate * factor


@contextmanager
def frozen_schedule(scheduler: Any) -> Iterator[None]:
    """A schedule whose steps do nothing."""
    undo = wrap_on_object(scheduler, "step", lambda inner, *args, **kwargs: None)
    try:
        yield
    finally:
        undo()


def half_way(probe: Probe) -> float | None:
    """The learning rate half an epoch ahead, as a part of its peak; None where the length of an epoch is not known."""
    try:
        num = len(probe.target.loader) // 2  # type: ignore[arg-type]
    except TypeError:
        num = probe.scan.num // 2 if probe.scan.complete else 0
    if num < 4:
        return None
    probe.rewind()
    top = _highest(probe.optimizers)
    last = top
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for _ in range(num):
                for scheduler in probe.schedulers:
                    if not hasattr(scheduler, "num_bad_epochs"):
                        scheduler.step()
                last = _highest(probe.optimizers)
                top = max(top, last)
        except Exception:
            return None
        finally:
            probe.rewind()
    return last / top if top > 0 else None
