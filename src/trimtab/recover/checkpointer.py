"""Checkpoints in one folder: saved durably, certified by quiet steps, resumed from the newest that is sound."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from trimtab.core.errors import CheckpointError
from trimtab.core.types import Snapshot
from trimtab.core.versions import versions
from trimtab.recover import container, health, state
from trimtab.recover.background import Background
from trimtab.recover.cleaning import cleaned
from trimtab.recover.house import QUARANTINE
from trimtab.recover.masks import masks_of
from trimtab.recover.retention import Retention, doomed
from trimtab.recover.survey import snapshot_of

log = logging.getLogger("trimtab")
_versions = cache(versions)  # training waits while it looks into the metadata of every package
PREFERENCES = ("newest", "good")
Snapshots = list[Snapshot]  # a method of this name hides the type inside the class


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a check of one checkpoint found: true where it is sound."""

    snapshot: Snapshot
    damage: tuple[container.Damage, ...]

    def __bool__(self) -> bool:
        return not self.damage


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What is to be saved beside the state itself."""

    step: int
    branch: int
    meta: Mapping[str, Any]
    masks: set[str]
    clean: bool


class Checkpointer:
    """Saves and resumes training; the last checkpoint that is good is never lost.

    Example:
        >>> import tempfile, torch
        >>> from trimtab import Checkpointer
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ckpt = Checkpointer(folder, keep_last=3)
        ...     saved = ckpt.save(10, model=model, extra={"epoch": 1})
        ...     wanted = model.weight.clone()
        ...     _ = torch.nn.init.zeros_(model.weight)
        ...     back = ckpt.resume(model=model)
        >>> saved.state, back.step, back.extra["epoch"], bool((model.weight == wanted).all())
        ('candidate', 10, 1, True)

    It keeps the last `keep_last`, the best by the metric `keep_best` (`"-loss"`: less is better), and every
    `keep_every`th step, within `max_bytes`. A candidate is good after `quiet_steps` further steps without trouble.
    `asynchronous` copies the state to host memory, and looks at it and writes it on a thread.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        keep_best: str | None = None,
        keep_every: int | None = None,
        max_bytes: int | None = None,
        quiet_steps: int = 20,
        asynchronous: bool = False,
    ) -> None:
        if keep_last < 1:
            raise CheckpointError(f"keep_last is {keep_last}; expected at least 1: the newest one is always kept")
        self.directory = Path(directory)
        self.quiet_steps = quiet_steps
        self._keep = Retention(keep_last=keep_last, best=keep_best, keep_every=keep_every, max_bytes=max_bytes)
        self._background = Background() if asynchronous else None
        self._trouble = -quiet_steps  # the last step at which there was any
        self._pending: dict[Path, int] | None = None  # candidates by path, with their step; None until looked up
        container.prepare(self.directory)  # a folder that cannot be written is found out now, not at step 10,000

    # -- saving --------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        branch: int = 0,
        clean: bool = False,
        verdict: Mapping[str, Any] | None = None,
        **objects: Any,
    ) -> Snapshot:
        """Write the state of `model`, `optimizer`, `scheduler`, `scaler`, `ema`, `loader`, `extra`; durable on return.

        A non-finite state gives a `bad` snapshot in quarantine, never one to resume from. `clean=True` replaces its
        non-finite values by zeros and marks it as repaired: it is then resumed from only if asked for by step.
        Gradients that are there are saved too; `gradients=False` leaves them out where they are not needed.
        """
        objects.setdefault("gradients", True)  # else a save in the midst of an accumulation would not be exact
        sections = state.capture(**objects)
        numbers = {k: float(v) for k, v in (metrics or {}).items()}
        meta = {"versions": _versions(), "metrics": numbers, "verdict": dict(verdict or {})}
        masks = masks_of("model", objects.get("model")) | masks_of("ema", objects.get("ema"))
        branch = self._free_branch(step, branch, self.directory)
        job = _Job(step=step, branch=branch, meta=meta, masks=masks, clean=clean)
        if self._background is None:
            return self._store(job, sections)
        self._background.submit(self._store, job, self._background.copied(sections))
        path = self.directory / container.name_of(step, branch)
        return Snapshot(step=step, branch=branch, path=path, state="candidate", digest="", metrics=numbers)

    def _store(self, job: _Job, sections: Mapping[str, Any]) -> Snapshot:
        """Look whether the state is sound, and put it where it belongs."""
        bad = health.nonfinite(sections, allowed=job.masks)
        if bad and not job.clean:
            return self._quarantine(job, sections, bad)
        if bad:
            told = "step %d: non-finite values were replaced by zeros, as asked; the checkpoint is repaired"
            log.warning(told, job.step)
            sections = cleaned(sections, job.masks)
        return self._write(job, sections, repaired=bool(bad))

    def _write(self, job: _Job, sections: Mapping[str, Any], *, repaired: bool) -> Snapshot:
        name = container.name_of(job.step, job.branch)
        meta = {**job.meta, "repaired": repaired}
        container.write(self.directory, name, sections, step=job.step, branch=job.branch, meta=meta)
        if self._pending is not None and not repaired:
            self._pending[self.directory / name] = job.step
        self.quiet(job.step)  # this state is finite: so are those that it came from
        self.prune()
        return snapshot_of(self.directory / name)

    def _quarantine(self, job: _Job, sections: Mapping[str, Any], bad: tuple[str, ...]) -> Snapshot:
        named = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        reason = f"{len(bad)} tensor{' holds' if len(bad) == 1 else 's hold'} NaN or Inf: {named}"
        log.warning("step %d: this state is not one to come back to (%s); it goes to quarantine", job.step, reason)
        home = self.directory / QUARANTINE
        container.prepare(home)
        branch = self._free_branch(job.step, job.branch, home)
        name, meta = container.name_of(job.step, branch), {**job.meta, "repaired": False}
        container.write(home, name, sections, step=job.step, branch=branch, meta=meta, status="bad", reason=reason)
        for old in [path for _, _, path in container.entries(home)][:-1]:
            container.remove(old)  # one is evidence; more are only disk space
        return snapshot_of(home / name)

    def _free_branch(self, step: int, branch: int, home: Path) -> int:
        """The branch, or the next one of which this step was not saved before (by an earlier run, say)."""
        while (home / container.name_of(step, branch)).exists():
            branch += 1
        return branch

    # -- certifying ----------------------------------------------------------------------------------------------

    def quiet(self, step: int) -> None:
        """All was well up to `step`: candidates that have seen enough of it since the last trouble are good."""
        for path, since in list(self._candidates().items()):
            if step - max(since, self._trouble) >= self.quiet_steps:
                self._candidates().pop(path, None)
                self._tell(path, "good", "")

    def condemn(self, since: int, reason: str, at: int | None = None) -> None:
        """Trouble began at `since`: candidates from then on are bad. Quiet counts from `at`, where it was last seen."""
        self._trouble = self._trouble if at is None else max(self._trouble, at)
        for path, step in list(self._candidates().items()):
            if step >= since:
                self._candidates().pop(path, None)
                self._tell(path, "bad", reason)

    def condemn_these(self, paths: Iterable[Path], reason: str) -> None:
        """Trouble had begun when these were written, as is known by now: they are bad, certified or not."""
        for path in paths:
            self._candidates().pop(path, None)
            if path.exists():
                self._tell(path, "bad", reason)

    def _tell(self, path: Path, verdict: str, reason: str) -> None:
        try:
            container.set_status(path, verdict, reason)
        except CheckpointError as error:  # a folder that somebody removed, a full disk: the rest goes on
            log.warning("%s could not be marked as %s: %s", path.name, verdict, error)

    def _candidates(self) -> dict[Path, int]:
        if self._pending is None:
            found = [s for s in self.list() if s.state == "candidate" and not s.repaired]
            self._pending = {s.path: s.step for s in found}
        return self._pending

    # -- resuming ------------------------------------------------------------------------------------------------

    def resume(self, *, prefer: str = "newest", step: int | None = None, **objects: Any) -> Snapshot | None:
        """Put the newest sound checkpoint into these objects, all of it or nothing; None where there is none.

        A damaged one is reported by name and the one before it is used. `prefer="good"` takes a certified one where
        there is any, as after an incident; `step` asks for one and no other.
        """
        if prefer not in PREFERENCES:
            raise CheckpointError(f"prefer is {prefer!r}; expected one of {', '.join(PREFERENCES)}")
        self.wait()
        for snapshot in self._by_preference(prefer, step):
            try:
                contents = container.read(snapshot.path)
            except CheckpointError as error:
                log.warning("%s is not used: %s", snapshot.path.name, error)
                continue
            state.restore(contents.sections, **objects)
            return replace(snapshot, extra=contents.sections.get("extra", {}))
        if step is not None:
            known = ", ".join(str(s.step) for s in self.list()) or "none"
            raise CheckpointError(
                f"there is no sound checkpoint of step {step} in {self.directory}; known are: {known}"
            )
        return None

    def _by_preference(self, prefer: str, step: int | None) -> Snapshots:
        newest = self.list()[::-1]
        if step is not None:
            return [s for s in newest if s.step == step]
        usable = [s for s in newest if s.state != "bad" and not s.repaired]
        if prefer == "good":
            usable.sort(key=lambda s: s.state != "good")  # stable: the newest good one first
        return usable

    # -- looking after -------------------------------------------------------------------------------------------

    def list(self) -> Snapshots:
        """All checkpoints by branch and step; one that is too damaged to say what it is counts as bad."""
        return [snapshot_of(path) for _, _, path in container.entries(self.directory)]

    def verify(self, step: int) -> Verified:
        """Read every byte of the newest checkpoint of a step and compare it with its checksums."""
        self.wait()
        found = [s for s in self.list() if s.step == step]
        if not found:
            known = ", ".join(str(s.step) for s in self.list()) or "none"
            raise CheckpointError(f"there is no checkpoint of step {step} in {self.directory}; there are: {known}")
        return Verified(snapshot=found[-1], damage=container.damage_of(found[-1].path))

    def prune(self) -> Snapshots:
        """Delete what need not be kept; returns what was deleted."""
        snapshots = self.list()
        sizes = {} if self._keep.max_bytes is None else {s.path: container.size_of(s.path) for s in snapshots}
        gone = doomed(snapshots, sizes, self._keep)
        self._delete(gone)
        return gone

    def discard_bad(self) -> None:
        """Delete what is bad: for states that nobody will look at again."""
        self._delete([s for s in self.list() if s.state == "bad"])

    def _delete(self, gone: Snapshots) -> None:
        for snapshot in gone:
            try:
                container.remove(snapshot.path)
            except CheckpointError as error:
                log.warning("%s could not be deleted: %s", snapshot.path.name, error)
            self._candidates().pop(snapshot.path, None)

    def wait(self) -> None:
        """Wait until everything is on disk; what went wrong there is raised here."""
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """Wait for what is under way."""
        self.wait()
