"""A guard's checkpoints: when to save, which to certify or condemn, and where to go on from or back to."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from trimtab.checkpoint.checkpointer import Checkpointer
from trimtab.checkpoint.signals import SignalWatch
from trimtab.checkpoint.together import Ranks
from trimtab.core.config import Config
from trimtab.core.contain import Contained
from trimtab.core.errors import CheckpointError, InputError
from trimtab.core.types import Severity, Snapshot, Verdict
from trimtab.guard.lane import Lane
from trimtab.guard.rollback import DiskStates, Rollback, nothing_instead
from trimtab.sample.probes.forward import inert, only_traced
from trimtab.sample.rows import roots_of
from trimtab.torchutil.patch import own_hook, plain_python
from trimtab.torchutil.sharded import has_replicas, shares_parameters

log = logging.getLogger("trimtab")
OWN_FOLDER = "states"
OWN_KEPT = 2
OWN_BYTES = 16_000_000_000
"""States that nobody asked for take no more than this, and no more than half of what is free on the disk."""
OWN_FIRST = 50
"""The first of them; then at twice as many steps, until they are as far apart as checkpoints are."""


class Keeper:
    """Saves between two iterations: then schedulers, averages and gradients are as the next step will find them.

    A resumable loader says when that is, just before it fetches the next batch; without one, the first call of the
    model after a step is used, when the next batch is already fetched. With `own`, they are not the user's but the
    guard's, for going back only: no signal is waited for, and none is left behind.

    Where several processes hold parts of the parameters, or copies and were given the same folder, they save together,
    at steps that all of them agree on. One that is asked to end, or fails, cannot save alone, and going back to what is
    on disk is not offered.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        objects: Mapping[str, Any],
        *,
        config: Config,
        lanes: Mapping[str, Lane],
        rollback: Rollback | None = None,
        own: bool = False,
    ) -> None:
        self.checkpointer, self.own = checkpointer, own
        self._objects = {name: one for name, one in objects.items() if one is not None}
        if not isinstance(ema := objects.get("ema"), nn.Module) and not hasattr(ema, "state_dict") and ema is not None:
            log.warning("the average (%s) has no state_dict: it is not part of checkpoints", type(ema).__name__)
            del self._objects["ema"]
        if not own and objects.get("loader") is None:
            log.warning(
                "checkpoints will not hold the place in the data: a resumed run begins its epoch again, in another "
                "order; to go on with the very next batch, give the guard loader=ResumableLoader(...)"
            )
        self._every, self._lanes = config.checkpoint_every, lanes
        self._together = checkpointer.as_one
        self._disk = DiskStates(checkpointer, self._objects, lanes)
        if rollback is not None and not self._together:
            rollback.use_disk(self._disk)
        self._saved = self._steps() if own else 0
        self._last_trouble = -1
        self._failed = False
        self._contained = Contained()
        self._signals = SignalWatch() if config.checkpoint_on_signal and not own and not self._together else None
        self._undo: list[Callable[[], None]] = []
        loader: Any = objects.get("loader")
        if hasattr(loader, "before_next"):
            loader.before_next = self.between
            self._undo.append(lambda: setattr(loader, "before_next", None))
        else:
            for root in roots_of(objects["model"]):  # a dict of models is never called itself
                # Before all others: those of FSDP gather the parameters that are about to be saved.
                hook = root.register_forward_pre_hook(_Between(self), prepend=self._together)
                self._undo.append(own_hook(hook, listed=False).remove)

    def between(self) -> None:
        """Between two iterations: save if it is time to, or if the process is asked to end."""
        self._contained.call("saving a checkpoint", self._between)  # it runs inside the user's own calls

    def _between(self) -> None:
        if any(lane.under_way for lane in self._lanes.values()):
            return  # a closure called the model again: the state is that of half a step
        step = self._steps()
        ending = self._signals is not None and self._signals.pending is not None
        every = min(self._every, max(self._saved, OWN_FIRST)) if self.own else self._every
        due = self._every > 0 and step - self._saved >= every
        quiet = step - self._last_trouble > 1
        if ending or (due and (self._all_wish(quiet) if self._together else quiet)):
            self.save(step)
        if ending and self._signals is not None:
            self._finish()
            self._signals.answer()

    def _all_wish(self, wish: bool) -> bool:
        """Whether all processes would save now: what one has found, another need not know of."""
        try:
            return self.checkpointer.agreed(wish, model=self._objects["model"])
        except CheckpointError as error:
            log.warning("step %d is not saved: %s", self._steps(), error)
            return False

    def _steps(self) -> int:
        return max(int(lane.attempts) for lane in self._lanes.values())

    def save(self, step: int, **verdict: Any) -> Snapshot | None:
        """Save now; a failure is reported and costs the checkpoint, not the run."""
        if self.own:
            self.checkpointer.discard_bad()
        try:
            snapshot = self.checkpointer.save(step, verdict=verdict, **self._objects)
        except CheckpointError as error:
            if not self._failed:
                log.warning("step %d could not be saved: %s; training goes on", step, error)
            self._failed = True
            return None
        self._saved, self._failed = step, False
        self._disk.saved(snapshot.path)
        return snapshot

    def heard(self, verdict: Verdict) -> None:
        """Trouble condemns what was saved since; quiet certifies what came before it."""
        worst = verdict.worst
        if worst is not None and worst.severity >= Severity.ERROR:
            self._last_trouble = verdict.step
            began = min(int(worst.evidence.get("onset", verdict.step)), verdict.step)
            self._finish()  # one that is still being written is meant, too
            self.checkpointer.condemn(began, f"{worst.code} {worst.name} at step {verdict.step}", verdict.step)
        elif verdict.step - self._last_trouble >= self.checkpointer.quiet_steps:
            self.checkpointer.quiet(verdict.step)

    def resume(self, **which: Any) -> Snapshot | None:
        """Put the newest sound checkpoint into everything this guard knows; None where there is none."""
        snapshot = self.checkpointer.resume(**which, **self._objects)
        if snapshot is not None:
            if "guard" not in snapshot.parts:  # saved without a guard: go on counting where it was saved
                for lane in self._lanes.values():
                    lane.go_on_counting(snapshot.step)
            self._saved = self._steps()
            self._disk.resumed(snapshot)
            log.info("resumed from %s", snapshot.path)
        return snapshot

    def close(self, reason: str) -> None:
        """Finish what is under way; a run that ends in an error of its own leaves a checkpoint behind."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        if self.own:
            self._finish(self.checkpointer.close)
            shutil.rmtree(self.checkpointer.directory, ignore_errors=True)
            return
        asked = self._signals is not None and self._signals.pending is not None
        if not self._together and (asked or reason not in ("closed", "stopped")) and self._steps() > self._saved:
            self.save(self._steps(), **({"ended_by": reason} if reason not in ("closed", "stopped") else {}))
        self._finish(self.checkpointer.close)

    def abandon(self) -> None:
        """In a forked child: what is saved is the parent's to save."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        if self._signals is not None:
            self._signals.remove()

    def release_signals(self) -> None:
        """Watch for signals no longer. One that came since the last step does now what it would have done."""
        if self._signals is not None:
            self._signals.answer()
            self._signals.remove()

    def _finish(self, end: Callable[[], None] | None = None) -> None:
        try:
            (end or self.checkpointer.wait)()
        except CheckpointError as error:
            log.warning("the last checkpoint could not be written: %s", error)


class _Between:
    """A hook for loops whose loader says nothing."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    @plain_python
    def __call__(self, module: nn.Module, args: object) -> None:
        if module.training and not only_traced():
            self._keeper.between()

    def __reduce__(self) -> Any:
        return inert()


def claimed(checkpoint: object, model: Any) -> Checkpointer | None:
    """The `Checkpointer` of a guard that was given a path or one, with its folder taken for writing; None without.

    A folder that another run writes to, or that nobody can write to, is found out before training begins.
    """
    if checkpoint is None:
        if has_replicas(model):
            Ranks.with_same(None)  # the others need not wait to hear of it
        return None
    if isinstance(checkpoint, str | os.PathLike):
        checkpoint = Checkpointer(checkpoint)
    if not isinstance(checkpoint, Checkpointer):
        raise InputError(f"checkpoint is a {type(checkpoint).__name__}; expected a path or a trimtab.Checkpointer")
    checkpoint.claim(model=model)
    return checkpoint


def epochs_of(loader: object) -> int | None:
    """How many epochs a loader has counted; None where it does not count them, or does not keep the count."""
    counted = getattr(loader, "epoch", None) if hasattr(loader, "load_state_dict") else None
    return counted if isinstance(counted, int) and not isinstance(counted, bool) else None


class CheckpointKeepers:
    """The keepers of one guard: the user's, or one of its own where memory has no room for states to go back to."""

    def __init__(self, config: Config, run_dir: Path | None) -> None:
        self._config, self._run_dir = config, run_dir
        self._all: list[Keeper] = []
        self._objects: Mapping[str, Any] = {}
        self._lanes: Mapping[str, Lane] = {}
        self._rollback: Rollback | None = None

    def __iter__(self) -> Iterator[Keeper]:
        return iter(self._all)

    def begin(
        self,
        checkpoint: Checkpointer | None,
        objects: Mapping[str, object],
        lanes: Mapping[str, Lane],
        rollback: Rollback | None,
    ) -> None:
        """Hooks and lanes are in place: save what is asked for."""
        self._objects, self._lanes, self._rollback = objects, lanes, rollback
        if checkpoint is not None:
            self._add(checkpoint, objects)

    def _add(self, checkpoint: Checkpointer, objects: Mapping[str, object], *, own: bool = False) -> None:
        one = Keeper(checkpoint, objects, config=self._config, lanes=self._lanes, rollback=self._rollback, own=own)
        self._all.append(one)

    def instead_of_memory(self, num_bytes: int) -> str:
        """Memory has no room for states of so many bytes: choose what is gone back to then, and say so."""
        if self._all:
            return f"the checkpoints in {self._all[0].checkpointer.directory} are what it goes back to"
        if self._run_dir is None or self._config.checkpoint_every == 0 or self._in_parts():
            return nothing_instead(num_bytes)
        needed = (OWN_KEPT + 1) * num_bytes  # one more while it is written
        try:
            free = shutil.disk_usage(self._run_dir).free
            if needed > min(OWN_BYTES, free // 2):
                room = f"{OWN_KEPT} of them on disk take up to {needed / 1e9:.1f} GB ({free / 1e9:.1f} GB are free)"
                return f"{room}: {nothing_instead(num_bytes)}"
            ckpt = Checkpointer(self._run_dir / OWN_FOLDER, keep_last=OWN_KEPT)
        except (OSError, CheckpointError) as error:
            return f"they cannot be kept on disk ({error}): {nothing_instead(num_bytes)}"
        kept = {name: self._objects[name] for name in ("model", "optimizer", "ema")} | {"gradients": False}
        self._add(ckpt, kept, own=True)
        return f"{OWN_KEPT} are kept in {ckpt.directory} until the guard is closed; checkpoint=PATH keeps them for good"

    def _in_parts(self) -> bool:
        return shares_parameters(self._objects.get("model"))

    def resume(self, **which: object) -> Snapshot | None:
        """Go on from the newest sound checkpoint the user asked for; None where there is none yet."""
        keeper = next((k for k in self._all if not k.own), None)
        if keeper is None:
            raise InputError("resume() needs checkpoints; build the guard with checkpoint=PATH or a Checkpointer")
        return keeper.resume(**which)
