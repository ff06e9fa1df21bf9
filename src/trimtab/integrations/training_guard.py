"""One guard over a training that a framework drives: built when the framework is ready, closed when it ends.

Every integration tells it the same things: model and optimizers, losses, the batch, validation. The rest is hooks.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from trimtab.core.config import resolve
from trimtab.core.contain import Contained
from trimtab.core.errors import InputError, MissingPackageError, TrainingStopped, TrimtabError
from trimtab.core.types import Finding
from trimtab.guard.guard import Guard

log = logging.getLogger("trimtab")
Attach = Callable[..., Guard | None]
"""Called with the model, the optimizers and what else the framework has; makes the guard."""
VALIDATION = ("val", "valid", "validation", "eval", "test")
"""How frameworks and their users begin the names of validation metrics."""


def missing(package: str, extra: str) -> MissingPackageError:
    """The error for a package that is not installed, with the line that installs it."""
    return MissingPackageError(f"{package} is not installed; install it with: pip install 'trimtab[{extra}]'")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse, at once, what `Guard` would refuse only when training begins."""
    try:
        inspect.signature(Guard).bind(None, None, **settings)
    except TypeError as error:
        raise InputError(f"{error}; expected keywords of trimtab.Guard, such as clip, mode or run_dir") from None
    names = ("preset", "clip", "mode", "lag", "checkpoint_every")
    resolve(settings.get("config"), **{name: settings.get(name) for name in names})


class TrainingGuard:
    """What the callbacks and handlers of all frameworks have in common.

    Args:
        framework: Its name, for messages.
        settings: Keywords for `Guard`, from the user.
        stop: Asks the framework to end the training; None: a remedy that stops raises `TrainingStopped`.
        attach: Makes the guard, and then decides how it ends and where its state is kept; None: `Guard.attach`.
    """

    def __init__(
        self,
        framework: str,
        settings: Mapping[str, Any],
        stop: Callable[[], None] | None = None,
        attach: Attach | None = None,
    ) -> None:
        check_settings(settings)
        self._framework, self._settings = framework, dict(settings)
        self._stop = stop if attach is None else None
        self._attach = attach
        self._contained = Contained()
        self._state: Mapping[str, Any] | None = None
        self._notices: set[str] = set()
        self._loss_name: str | None = None  # of the validation: the first that was found
        self.guard: Guard | None = None

    @property
    def running(self) -> bool:
        """Whether there is a guard that is open."""
        return self.guard is not None and not self.guard.closed

    @property
    def findings(self) -> list[Finding]:
        """What was found so far."""
        return [] if self.guard is None else self.guard.findings

    def begin(
        self,
        model: Any,
        optimizer: Any,
        *,
        theirs: str = "",
        steps_left: Callable[[], float | None] | None = None,
        **found: Any,
    ) -> None:
        """Guard the training that begins.

        `theirs` says how the framework clips, `steps_left` how many optimizer steps are to come, and `found` what the
        framework has besides.
        """
        self.end()
        settings = {**{key: value for key, value in found.items() if value is not None}, **self._settings}
        attach = functools.partial(self._attach or Guard.attach, model, optimizer, **settings)
        guard: Guard | None = self._contained.call("attaching a guard", attach)
        self.guard = guard
        if guard is None:
            return
        guard.watch_clipping()
        if self._stop is not None:
            guard.stop_by(self._stopped)
        state, self._state = self._state, None
        if state is not None:
            self._contained.call("going on from a checkpoint", guard.load_state_dict, state)
        if steps_left is not None:
            self._contained.call("counting the steps to come", self._tell_total, guard, steps_left)
        if theirs and guard.config.clip and guard.config.mode != "observe":
            ours = self._settings.get("clip", guard.config.clip.norm)
            self.notice(f"{theirs} and clip={ours!r} are both set: the smaller limit decides")

    def _tell_total(self, guard: Guard, steps_left: Callable[[], float | None]) -> None:
        """Say how many steps the run will have at its end, as far as the framework knows it."""
        left = steps_left()
        if left is not None and math.isfinite(left) and left > 0:
            guard.observe(total_steps=max((lane.attempts for lane in guard.lanes.values()), default=0) + left)

    def notice(self, text: str) -> None:
        """Say something once."""
        if text not in self._notices:
            self._notices.add(text)
            log.warning("%s: %s", self._framework, text)

    def loss(self, loss: Any, batch: Any = None) -> None:
        """Before the step: the loss of one micro-batch, not divided and not scaled, and that micro-batch."""
        if self.guard is not None and self.running:
            self.guard.observe(loss, batch)

    def clips(self, optimizer: Any) -> None:
        """Gradients are ready and unscaled, and the framework is about to clip them in whatever way."""
        if self.guard is not None and self.running:
            self.guard.before_clipping(optimizer)

    def validated(self, metrics: Mapping[str, Any], name: str | None = None) -> None:
        """A validation ended with these metrics, the loss among them, under `name` or under a usual name."""
        if self.guard is None or not self.running:
            return
        numbers = {key: value for key, value in metrics.items() if is_number(value)}
        found = loss_name(numbers)
        if name is None and self._loss_name is not None and self._loss_name not in numbers and found is not None:
            return  # of another data set: one series of losses is of one of them
        key = (self._loss_name or found) if name is None else name
        if key is None or key not in numbers:
            wanted = "a name with `val` and `loss`" if name is None else repr(name)
            self.notice(f"no validation loss under {wanted} among {sorted(numbers)}; name it with validation=")
            return
        self._loss_name = key
        self.guard.validate(numbers.pop(key), **{k.replace("/", "_"): v for k, v in numbers.items()})

    def state_dict(self) -> dict[str, Any]:
        """What the framework's checkpoint keeps; empty before training, and where nothing is to be kept there."""
        if self._attach is not None:
            return {}
        return dict(self._state or {}) if self.guard is None else self.guard.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: now, or as soon as training begins."""
        if not state:
            return
        if self.guard is not None and self.running:
            self._contained.call("going on from a checkpoint", self.guard.load_state_dict, state)
        else:
            self._state, self.guard = state, None

    def end(self, error: BaseException | None = None) -> None:
        """Training is over, or failed."""
        if self.guard is None or not self.running:
            return
        try:
            self.guard.__exit__(None if error is None else type(error), error, None)
        except TrimtabError:
            raise
        except Exception as failure:
            self._contained.report("closing a guard", failure)

    def _stopped(self, reason: TrainingStopped) -> None:
        log.error("%s: %s", self._framework, reason)
        if self._stop is not None:
            self._stop()


def is_number(value: object) -> bool:
    """Whether it is a number, or a tensor with one."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def words_of(name: str) -> list[str]:
    """The words of a metric's name.

    Example:
        >>> words_of("val/loss_epoch")
        ['val', 'loss', 'epoch']
    """
    for mark in "/-. :":
        name = name.replace(mark, "_")
    return [word for word in name.lower().split("_") if word]


def loss_name(names: Iterable[str]) -> str | None:
    """Which of these is the loss of a validation: the shortest name that says both.

    Example:
        >>> loss_name(["train_loss", "val_acc", "val_loss", "val_loss_aux"])
        'val_loss'
        >>> loss_name(["accuracy"]) is None
        True
    """
    told = [name for name in names if "loss" in words_of(name) and set(VALIDATION) & set(words_of(name))]
    return min(told, key=lambda name: (len(words_of(name)), len(name)), default=None)


def of_validation(metrics: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    """Those that are named after a validation, and `name`."""
    return {k: v for k, v in metrics.items() if k == name or set(VALIDATION) & set(words_of(k))}
