"""The documented TensorBoard tags (`Training/...`, `Loss/...`), for a SummaryWriter or anything with `.log()`."""

from __future__ import annotations

import logging
import math
import re
from collections import deque
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.types import Outcome, Record, Sample
from trimtab.record.sinks import LOGGERS, takes_step

GRAD_NORM_BEFORE = "Training/GradNorm_Before"
GRAD_NORM_AFTER = "Training/GradNorm_After"
CORRECTIVE_ACTION = "Training/CorrectiveAction"
ADJUSTED_LR = "Training/AdjustedLR"
ADJUSTED_WD = "Training/AdjustedWD"
QUANTITIES: Mapping[str, str] = {"loss": "Loss", "accuracy": "Accuracy", "f1": "F1"}
"""Quantities of a batch or a validation, and the family of their tags: `Loss/Train` and so on."""

_RAISED = re.compile(r"weight decay \S+ -> ([0-9.eE+-]+)")
_REMEMBERED = 64

Send = Callable[[Mapping[str, float], int], None]
"""Takes values by tag, and the step they belong to."""


def tag_sender(logger: object) -> Send:
    """A function that sends tagged values to a user's logger.

    A logger is an object with `.add_scalar(tag, value, step)`, with `.log_metrics(dict)` or `.log(dict)`, a
    `logging.Logger`, or a function of one dict.

    Example:
        >>> send = tag_sender(print)
        >>> send({"Loss/Train": 0.5}, 3)
        {'step': 3, 'Loss/Train': 0.5}
    """
    if isinstance(logger, (logging.Logger, logging.LoggerAdapter)):  # before .log: theirs takes a level first
        return lambda values, step: logger.info("%s", _as_text(values, step))
    loggers: Any = import_module(LOGGERS)  # it lives above this package
    if (send := loggers.tags_for(logger)) is not None:
        found: Send = send
        return found
    add_scalar: Any = getattr(logger, "add_scalar", None)
    if callable(add_scalar):
        return lambda values, step: _each(add_scalar, values, step)
    log: Any = getattr(logger, "log_metrics", None)
    if callable(log):
        return _dict_sender(log, rising=False)
    log = getattr(logger, "log", None)
    if callable(log):
        return _dict_sender(log, rising=True)
    if callable(logger):
        return lambda values, step: _call(logger, {"step": step, **values})
    raise InputError(
        f"{type(logger).__name__} cannot take tagged values; expected an object with .add_scalar(tag, value, step), "
        ".log(dict) or .log_metrics(dict), a logging.Logger, or a function of one dict"
    )


def _as_text(values: Mapping[str, float], step: int) -> str:
    return "  ".join([f"step {step}", *(f"{tag} {value:.6g}" for tag, value in values.items())])


def _each(add_scalar: Callable[..., object], values: Mapping[str, float], step: int) -> None:
    for tag, value in values.items():
        add_scalar(tag, value, step)


def _call(function: Callable[..., object], values: dict[str, float]) -> None:
    function(values)


def _dict_sender(log: Callable[..., object], *, rising: bool) -> Send:
    with_step, newest = takes_step(log), 0

    def send(values: Mapping[str, float], step: int) -> None:
        nonlocal newest
        if rising:  # such a log often drops what is older than its newest step
            step = newest = max(newest, step)
        if with_step:
            log(dict(values), step=step)
        else:
            log(dict(values))

    return send


class TrainingTagsSink:
    """Turns what a guard records into the documented tags.

    Per step `Training/GradNorm_Before`, `Training/GradNorm_After` and `Loss/Train` (also `Accuracy/Train`, `F1/Train`
    if the loop calls `guard.observe(accuracy=..., f1=...)`); with each validation `Loss/Val_Epoch` and, the mean
    since the last one, `Loss/Train_Epoch`; with each action that was carried out `Training/CorrectiveAction` = 1;
    `Training/AdjustedLR` while a cut is in force, `Training/AdjustedWD` where the decay was raised. Everything is at
    the step it is about. A mean leaves out non-finite values.

    Example:
        >>> import torch, trimtab
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> seen = []
        >>> with trimtab.Guard(model, optimizer, clip=0.5, sinks=[TrainingTagsSink(seen.append)], run_dir=False) as g:
        ...     loss = model(torch.ones(1, 2)).square().sum() + 1.0
        ...     loss.backward()
        ...     _ = g.step(loss)
        >>> sorted(seen[0])
        ['Loss/Train', 'Training/GradNorm_After', 'Training/GradNorm_Before', 'step']
    """

    def __init__(self, logger: object) -> None:
        self._logger = logger
        self._send = tag_sender(logger)
        self._sums: dict[str, tuple[float, int]] = {}
        self._cut: dict[str, float] = {}
        self._done: deque[tuple[int, str, str]] = deque(maxlen=_REMEMBERED)

    def write(self, record: Record) -> None:
        """Forward samples, and actions that were carried out."""
        if isinstance(record, Sample):
            values = self._validated(record) if record.phase == "val" else self._trained(record)
            self._put(values, record.step, record.optimizer)
        elif isinstance(record, Outcome) and record.applied:
            self._acted(record)

    def flush(self) -> None:
        """Let the logger flush, if it can."""
        flush = getattr(self._logger, "flush", None)
        if callable(flush):
            flush()

    def close(self) -> None:
        """Flush only: the logger belongs to the user."""
        self.flush()

    def _put(self, values: Mapping[str, float], step: int, optimizer: str) -> None:
        """Two optimizers do not share a tag: `Training/GradNorm_Before/generator`."""
        tail = f"/{optimizer}" if optimizer else ""
        if values:
            self._send({tag + tail: float(value) for tag, value in values.items()}, step)

    def _trained(self, sample: Sample) -> dict[str, float]:
        if sample.phase != "train":
            return {}
        scalars, out = sample.scalars, {}
        if "grad_norm" in scalars:
            norm = float(scalars["grad_norm"])
            out[GRAD_NORM_BEFORE] = norm
            out[GRAD_NORM_AFTER] = norm * float(scalars.get("clip_coef", 1.0))
        for name, family in QUANTITIES.items():
            if name in scalars:
                value = out[f"{family}/Train"] = float(scalars[name])
                self._add(family, value)
        return out | self._rate(sample)

    def _rate(self, sample: Sample) -> dict[str, float]:
        """The rate in use while a cut is in force, and once more when it has ended."""
        multiplier = float(sample.scalars.get("lr_multiplier", 1.0))
        was, self._cut[sample.optimizer] = self._cut.get(sample.optimizer, 1.0), multiplier
        if "lr/0" not in sample.scalars or (multiplier == 1.0 and was == 1.0):
            return {}
        return {ADJUSTED_LR: float(sample.scalars["lr/0"]) * multiplier}

    def _validated(self, sample: Sample) -> dict[str, float]:
        out = {f"{family}/Train_Epoch": total / num for family, (total, num) in self._sums.items() if num}
        self._sums.clear()
        for name, family in QUANTITIES.items():
            key = "val_loss" if name == "loss" else f"val/{name}"
            if key in sample.scalars:
                out[f"{family}/Val_Epoch"] = float(sample.scalars[key])
        return out

    def _add(self, family: str, value: float) -> None:
        if math.isfinite(value):
            total, num = self._sums.get(family, (0.0, 0))
            self._sums[family] = total + value, num + 1

    def _acted(self, outcome: Outcome) -> None:
        key = outcome.at, outcome.action.kind, outcome.optimizer
        if key in self._done:  # the same action again, later, with its effect
            return
        self._done.append(key)
        values = {CORRECTIVE_ACTION: 1.0}
        if raised := _RAISED.search(outcome.detail):
            values[ADJUSTED_WD] = float(raised[1])
        self._put(values, outcome.at, outcome.optimizer)
        add_text: Any = getattr(self._logger, "add_text", None)
        if callable(add_text):  # under a tag of its own: TensorBoard knows one kind of data per tag
            add_text(f"{CORRECTIVE_ACTION}/text", f"{outcome.action}: {outcome.detail}", outcome.at)
