"""A guard's checkpoints: when to save, which to certify or condemn, and where to go on from."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from trimtab.act.contain import Contained
from trimtab.core.config import Config
from trimtab.core.errors import CheckpointError, InputError
from trimtab.core.types import Severity, Snapshot, Verdict
from trimtab.recover.checkpointer import Checkpointer
from trimtab.recover.signals import SignalWatch
from trimtab.sample.forward import inert, only_traced

log = logging.getLogger("trimtab")


class Keeper:
    """Saves between two iterations: then schedulers, averages and gradients are as the next step will find them.

    A resumable loader says when that is, just before it fetches the next batch; without one, the first call of the
    model after a step has to do, when the next batch is already fetched.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        objects: Mapping[str, Any],
        *,
        config: Config,
        steps: Callable[[], int],
    ) -> None:
        self.checkpointer = checkpointer
        self._objects = {name: one for name, one in objects.items() if one is not None}
        self._every, self._steps = config.checkpoint_every, steps
        self._saved = 0
        self._last_trouble = -1
        self._failed = False
        self._contained = Contained()
        self._signals = SignalWatch() if config.checkpoint_on_signal else None
        self._undo: list[Callable[[], None]] = []
        loader: Any = objects.get("loader")
        if hasattr(loader, "before_next"):
            loader.before_next = self.between
            self._undo.append(lambda: setattr(loader, "before_next", None))
        else:
            self._undo.append(objects["model"].register_forward_pre_hook(_Between(self)).remove)

    def between(self) -> None:
        """Between two iterations: save if it is time to, or if the process is asked to end."""
        self._contained.call("saving a checkpoint", self._between)  # it runs inside the user's own calls

    def _between(self) -> None:
        step = self._steps()
        ending = self._signals is not None and self._signals.pending is not None
        due = self._every > 0 and step - self._saved >= self._every
        if ending or (due and step - self._last_trouble > 1):
            self.save(step)
        if ending and self._signals is not None:
            self._finish()
            self._signals.answer()

    def save(self, step: int, **verdict: Any) -> Snapshot | None:
        """Save now; a failure is told and costs the checkpoint, not the run."""
        try:
            snapshot = self.checkpointer.save(step, verdict=verdict, **self._objects)
        except CheckpointError as error:
            if not self._failed:
                log.warning("step %d could not be saved: %s; training goes on", step, error)
            self._failed = True
            return None
        self._saved, self._failed = step, False
        return snapshot

    def heard(self, verdict: Verdict) -> None:
        """Trouble condemns what was saved since; quiet certifies what came before it."""
        worst = verdict.worst
        if worst is not None and worst.severity >= Severity.ERROR:
            self._last_trouble = verdict.step
            began = min(int(worst.evidence.get("onset", verdict.step)), verdict.step)
            self.checkpointer.condemn(began, f"{worst.code} {worst.name} at step {verdict.step}")
        elif verdict.step - self._last_trouble >= self.checkpointer.quiet_steps:
            self.checkpointer.quiet(verdict.step)

    def resume(self, prefer: str = "newest") -> Snapshot | None:
        """Put the newest sound checkpoint into everything this guard knows; None where there is none."""
        snapshot = self.checkpointer.resume(prefer=prefer, **self._objects)
        if snapshot is not None:
            self._saved = snapshot.step
            log.info("resumed from %s", snapshot.path)
        return snapshot

    def close(self, reason: str) -> None:
        """Finish what is under way; a run that ends in an error of its own leaves a checkpoint behind."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        if self._signals is not None:
            self._signals.remove()
        if reason not in ("closed", "stopped") and self._steps() > self._saved:
            self.save(self._steps(), ended_by=reason)
        self._finish()

    def _finish(self) -> None:
        try:
            self.checkpointer.wait()
        except CheckpointError as error:
            log.warning("the last checkpoint could not be written: %s", error)


class _Between:
    """A hook for loops whose loader says nothing."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def __call__(self, module: nn.Module, args: object) -> None:
        if module.training and not only_traced():
            self._keeper.between()

    def __reduce__(self) -> Any:
        return inert()


def open_keeper(checkpoint: Any, objects: Mapping[str, Any], config: Config, steps: Callable[[], int]) -> Keeper | None:
    """The keeper of a guard that was given a path or a `Checkpointer`; None where it was given neither."""
    if checkpoint is None:
        return None
    if isinstance(checkpoint, str | os.PathLike):
        checkpoint = Checkpointer(checkpoint)
    if not isinstance(checkpoint, Checkpointer):
        raise InputError(f"checkpoint is a {type(checkpoint).__name__}; expected a path or a trimtab.Checkpointer")
    return Keeper(checkpoint, objects, config=config, steps=steps)
