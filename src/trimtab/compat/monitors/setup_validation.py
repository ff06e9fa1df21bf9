"""Is a training set up so that it can work? Model, optimizer, devices, rates: asked once, before the first step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from trimtab.compat.lines import some
from trimtab.compat.monitors.nonfinite_tensors import find_nonfinite
from trimtab.compat.monitors.stability import mismatch
from trimtab.core.errors import InputError
from trimtab.sample.transfer import number
from trimtab.torchutil.optimizers import groups_of, labelled, scale_of

log = logging.getLogger("trimtab")

HIGHEST_LR, LOWEST_LR = 1.0, 1e-8
"""A learning rate outside of these is suspicious."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupReport:
    """What would keep a training from working, what looks odd, and one line for each parameter group."""

    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no problems; there may be warnings."""
        return not self.problems


def assert_all_requires_grad(model: nn.Module, *, frozen: Sequence[str] = ()) -> None:
    """Raise InputError with the names of parameters that do not require a gradient.

    `frozen` are patterns of names that may, as `"backbone.*"`.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> assert_all_requires_grad(model)
        >>> model.bias.requires_grad_(False) is model.bias
        True
        >>> assert_all_requires_grad(model, frozen=["bias"])
        >>> assert_all_requires_grad(model)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        trimtab.core.errors.InputError: 1 of 2 parameters do not require a gradient: bias; expected all to train. ...
    """
    named = list(model.named_parameters())
    off = [n for n, p in named if not p.requires_grad and not any(fnmatchcase(n, pattern) for pattern in frozen)]
    if off:
        raise InputError(
            f"{len(off)} of {len(named)} parameters do not require a gradient: {some(off)}; expected all to train. "
            "Call requires_grad_(True) on them, or name them in frozen=."
        )


def validate_training_setup(
    model: nn.Module,
    optimizer: object,
    *,
    scaler: GradScaler | None = None,
    device: torch.device | str | None = None,
    training: bool | None = True,
) -> SetupReport:
    """Look for what would keep a training from working; every line is logged, nothing is changed or raised.

    Problems: no parameter, or none trainable; an optimizer that misses trainable parameters or moves others; one that
    is not on `device`; optimizer state on another device than its parameter; NaN or Inf in a parameter; a scaler
    over float16 parameters, which it refuses to unscale. Warnings: a learning rate above 1.0 or below 1e-8, and a
    model that is not in training mode (`training=None`: not checked).

    Example:
        >>> model = nn.Linear(2, 1)
        >>> report = validate_training_setup(model, torch.optim.SGD(model.parameters(), lr=10.0))
        >>> report.ok, report.warnings
        (True, ('the learning rate of group 0 is 10, suspicious above 1',))
        >>> report.groups
        ('group 0: 2 parameters, learning rate 10, weight decay 0',)
    """
    optimizers = list(labelled(optimizer).values())
    groups = groups_of(*optimizers)
    problems = [*_model_problems(model, device, scaler), *mismatch(model, optimizer), *_state_problems(optimizers)]
    warnings = list(_odd_rates(groups))
    if training is not None and model.training != training:
        warnings.append(f"the model is in {'training' if model.training else 'evaluation'} mode")
    report = SetupReport(
        problems=tuple(problems), warnings=tuple(warnings), groups=tuple(_line(i, g) for i, g in enumerate(groups))
    )
    for line in report.groups:
        log.info("%s", line)
    for line in report.problems + report.warnings:
        log.warning("training setup: %s", line)
    return report


def _model_problems(model: nn.Module, device: torch.device | str | None, scaler: GradScaler | None) -> Iterator[str]:
    named = list(model.named_parameters())
    if not any(p.requires_grad for _, p in named):
        yield "the model has no parameters" if not named else f"none of the {len(named)} parameters is trainable"
    if device is not None:
        wanted = torch.device(device)
        if away := [n for n, p in named if not _on(p, wanted)]:
            yield f"not on {wanted}: {some(away)}; move the model before the optimizer is built"
    if bad := list(find_nonfinite(named)):
        yield f"NaN or Inf in {some(bad)}"
    if scale_of(scaler) is not None and (half := [n for n, p in named if p.dtype is torch.float16 and p.requires_grad]):
        yield f"a GradScaler cannot unscale float16 parameters ({some(half)}); keep them in float32 and use autocast"


def _on(tensor: Tensor, wanted: torch.device) -> bool:
    """`cuda` means any of them, `cuda:1` that one."""
    here = tensor.device
    return here.type == wanted.type and (wanted.index is None or here.index == wanted.index)


def _state_problems(optimizers: Sequence[Optimizer]) -> Iterator[str]:
    for one in optimizers:
        states: Mapping[Tensor, object] = getattr(one, "state", {})
        pairs = [(p, v) for p, state in states.items() if isinstance(state, dict) for v in state.values()]
        # Counters may live anywhere; what has the parameter's shape moves with it.
        away = sum(isinstance(v, Tensor) and v.shape == p.shape and v.device != p.device for p, v in pairs)
        if away:
            yield f"{away} tensors of the state of {type(one).__name__} are on another device than their parameter"


def _odd_rates(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for i, group in enumerate(groups):
        if "lr" not in group:
            continue
        lr = number(group["lr"])
        if not lr <= HIGHEST_LR:
            yield f"the learning rate of group {i} is {lr:g}, suspicious above {HIGHEST_LR:g}"
        elif lr < LOWEST_LR:
            yield f"the learning rate of group {i} is {lr:g}, suspicious below {LOWEST_LR:g}"


def _line(i: int, group: Mapping[str, Any]) -> str:
    known = {"learning rate": group.get("lr"), "weight decay": group.get("weight_decay")}
    shown = [f"{name} {number(value):g}" for name, value in known.items() if value is not None]
    return ", ".join([f"group {i}: {len(group['params'])} parameters", *shown])
