"""Checkpoints in one folder: saved durably, certified by quiet steps, resumed from the newest that is sound."""

from __future__ import annotations

import contextlib
import errno
import logging
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, SupportsIndex, Unpack

from trimtab.checkpoint import state
from trimtab.checkpoint.directory import QUARANTINE, entries, explaining, name_of, prepare, remove, size_of
from trimtab.checkpoint.format import container
from trimtab.checkpoint.format.manifest import MAX_STEP, Contents, Damage
from trimtab.checkpoint.inspect import Seen, is_eligible, of_newest_run, run_named, runs_in, see, seen_in, snapshot_of
from trimtab.checkpoint.lock import FolderLock
from trimtab.checkpoint.parts import listed, masks_of, whole_model
from trimtab.checkpoint.retention import Retention, to_delete
from trimtab.checkpoint.state import cleaned, nonfinite, to_host
from trimtab.checkpoint.together import Ranks
from trimtab.core.errors import CheckpointError
from trimtab.core.suggest_name import did_you_mean
from trimtab.core.types import Snapshot
from trimtab.core.versions import versions
from trimtab.torchutil.sharded import has_replicas, is_first, refusal, shares_parameters

log = logging.getLogger("trimtab")
_versions = cache(versions)  # training waits while it looks into the metadata of every package
PREFERENCES = ("newest", "good")
PARTS = ("model", "optimizer", "scheduler", "scaler", "ema", "loader", "guard", "extra", "gradients")
"""What can be saved and resumed, by the names of the keywords."""
READABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Reasons not to be able to write that do not keep anybody from reading."""
Snapshots = list[Snapshot]  # a method of this name hides the type inside the class


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a check of one checkpoint found: true where it is sound."""

    snapshot: Snapshot
    damage: tuple[Damage, ...]

    def __bool__(self) -> bool:
        return not self.damage


@dataclass(slots=True, kw_only=True)
class _Line:
    """The run that is being saved: its name, the checkpoints it came through, and the newest of them."""

    run: str
    step: int = -1
    newest: int = 0
    """The sequence of the newest one; 0 before the first."""
    history: list[int] = field(default_factory=list)
    unnumbered: list[Path] = field(default_factory=list)
    """Those of trimtab 0.1.0 that it came through: they have no sequence."""
    saved: bool = False
    pid: int = field(default_factory=os.getpid)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What is to be saved beside the state itself."""

    step: int
    branch: int
    run: str
    sequence: int
    history: tuple[int, ...]
    meta: Mapping[str, object]
    masks: set[str]
    clean: bool

    def about(self) -> dict[str, Any]:
        """What its manifest says of it beside the state."""
        head = {"step": self.step, "branch": self.branch, "run": self.run, "sequence": self.sequence}
        return {**head, "history": self.history}


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What was captured; where other processes hold parts of it, with the places of those that are here."""

    sections: Mapping[str, Any]
    places: Mapping[tuple[Any, ...], Any]
    ranks: Ranks


_lines: dict[Path, _Line] = {}
"""The run that this process saved last to a folder: an object built for each save goes on with it."""


class Checkpointer:
    """Saves and resumes training; the last checkpoint that is good is never lost.

    Args:
        directory: The folder of the checkpoints; made when something is saved.
        keep_last: How many of the newest to keep.
        keep_best: A metric whose best checkpoint is kept; `"-loss"`: less is better.
        keep_every: Also keep every checkpoint whose step is a multiple of this.
        max_bytes: The most that all of them may take; the last good one is kept all the same.
        quiet_steps: How many further steps without trouble make a candidate good.
        asynchronous: Copy the state to host memory, then check and write it on a thread.

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

    All checkpoints that a process saves belong to one run; `resume` goes on with the run it takes one from, and without
    it a new run begins. The newest is what was saved last, whatever its step. Limits hold for the run that saves:
    checkpoints of other runs in the folder stay until you delete them (`trimtab checkpoint prune`).

    The first save takes the folder for writing, until `close()`, the end of this object or of the process: meanwhile
    another process is refused. In the same process a new object takes over, and this one is refused from then on.
    Reading needs no such thing, and works in a folder that cannot be written to.
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
        if keep_last is None or _count("keep_last", keep_last) < 1:
            raise CheckpointError(f"keep_last is {keep_last}; expected at least 1: the newest one is always kept")
        for name, limit in (("keep_every", keep_every), ("max_bytes", max_bytes)):
            if limit is not None and _count(name, limit) < 1:
                raise CheckpointError(f"{name} is {limit}; expected at least 1, or None for no such limit")
        self.directory = _folder(directory)
        self.quiet_steps = quiet_steps
        self._keep = Retention(keep_last=keep_last, best=keep_best, keep_every=keep_every, max_bytes=max_bytes)
        self._background = Background() if asynchronous else None
        self._trouble = -quiet_steps  # the last step at which there was any
        self._line: _Line | None = None
        self._next_run = _new_run()
        self._lock, self._open = FolderLock(self.directory), False
        self._fresh = False  # a guard's: what this process saved before was another run
        self._last = 0  # the sequence given to the last one of the folder
        self._own: dict[Path, int] = {}  # the checkpoints of this run, with their sequence
        self._pending: dict[Path, int] | None = None  # candidates by path, with their step; None until looked up
        self._warned: set[Path] = set()
        self._save_lock, self._lists_lock = threading.RLock(), threading.RLock()
        self._together: Ranks | None = None  # the processes that save with this one, once they have met
        self._as_one = False
        self._follows = False  # another process of them writes what there is once
        self._unwritable = _prepared(self.directory)  # found out now, not at step 10,000

    def __getstate__(self) -> dict[str, object]:
        return {name: one for name, one in vars(self).items() if name not in ("_save_lock", "_lists_lock")} | {
            "_open": False,
            "_together": None,
            "_as_one": False,
        }

    def __setstate__(self, kept: dict[str, object]) -> None:
        self.__dict__.update(kept)
        self._save_lock, self._lists_lock = threading.RLock(), threading.RLock()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- saving --------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        branch: int = 0,
        clean: bool = False,
        verdict: Mapping[str, object] | None = None,
        **objects: Unpack[state.SavedObjects],
    ) -> Snapshot:
        """Save a checkpoint; it is on the disk when this returns.

        A non-finite state gives a `bad` snapshot in quarantine, never one to resume from. What was saved is the newest
        of its run, even if its step was saved before or is lower. Old checkpoints that cannot be deleted are warned
        about. With `asynchronous`, the snapshot says what will be written if nothing fails.

        Args:
            step: The training step that this state belongs to.
            metrics: Numbers to keep with it, such as the one that `keep_best` names.
            branch: Counts the attempts at the same steps after a rollback.
            clean: Replace non-finite values by zeros and mark the checkpoint as repaired; `resume` then takes it only
                if you ask for its step.
            verdict: What a guard found, kept as it is.
            **objects: What to save: `model`, `optimizer`, `scheduler`, `scaler`, `ema`, `loader`, `guard`, and in
                `extra` a dict of your own values. Gradients are saved too, unless `gradients=False`.
        """
        _check_parts("save", objects)
        step, branch = _count("step", step), _count("branch", branch)
        objects.setdefault("gradients", True)  # else a save between two micro-batches would not resume exactly
        with self._save_lock, explaining(f"step {step} could not be saved"):
            ranks = self._ranks(objects)
            ranks.all(self.wait)
            captured = ranks.all(lambda: _captured(ranks, objects))
            numbers = {str(k): float(v) for k, v in (metrics or {}).items()}
            masks = masks_of("model", whole_model(objects.get("model"))) | masks_of("ema", objects.get("ema"))
            meta = {"versions": _versions(), "metrics": numbers, "verdict": dict(verdict or {})}
            job = ranks.from_first(lambda: self._job(step, branch, meta, masks, clean))
            with contextlib.ExitStack() as stack:
                if ranks.leads:
                    stack.enter_context(self._lock.writing())
                if self._background is None:
                    return self._store(job, captured)
                copied = replace(captured, sections=self._background.copied(captured.sections))
                self._background.submit(partial(self._store_there, job, copied, stack.pop_all()))
        path = self.directory / name_of(step, job.branch)
        return Snapshot(
            step=step,
            branch=job.branch,
            path=path,
            state="candidate",
            digest="",
            run=job.run,
            sequence=job.sequence,
            metrics=numbers,
            parts=tuple(captured.sections),
        )

    def _ranks(self, objects: Mapping[str, Any]) -> Ranks:
        """The processes that must save and resume these objects together; this one alone where it holds all of them."""
        if self._as_one and self._together is not None:
            return self._together
        if not shares_parameters(*_modules(objects)):
            return Ranks()
        if self._together is None:
            self._together = Ranks.meet()
        self._follows = not self._together.leads
        return self._together

    @property
    def as_one(self) -> bool:
        """Whether several processes save one checkpoint together, each its part; known once the folder is claimed."""
        return self._as_one

    def agreed(self, wish: bool, **objects: Unpack[state.SavedObjects]) -> bool:
        """Whether all processes that save these objects together wish it; each must ask at the same time."""
        return all(self._ranks(objects).gathered(lambda: wish))

    def claim(self, **objects: Unpack[state.SavedObjects]) -> None:
        """Take the folder for writing now, as a guard does when it is built; CheckpointError names who has it.

        What is saved from now on is a new run, unless `resume` goes on with an earlier one. Of processes that save
        `objects` together the first takes it for all: those that hold parts of them, and those that hold copies and
        were all given this folder.
        """
        modules = _modules(objects)
        parts = shares_parameters(*modules)
        if not parts and has_replicas(*modules):
            self._together = Ranks.with_same(self.directory)
        self._as_one = parts or (self._together is not None and self._together.several)
        self._follows = self._as_one and not is_first()
        if parts:
            self._together = None  # they meet when they first save or resume
        if self._follows:
            return
        with self._save_lock:
            if self._line is not None and self._line.saved:
                self._line, self._pending, self._open, self._next_run = None, None, False, _new_run()
            self._be_writer(claim=True)
            self._fresh = True

    def _be_writer(self, *, claim: bool = False) -> None:
        if self._unwritable is not None:
            prepare(self.directory)  # raises again, unless somebody has put it right
            self._unwritable = None
        if not self._lock.held:
            self._open = False
            if not os.path.isdir(self.directory):  # deleted since
                prepare(self.directory)
        self._lock.take(self._next_run if self._line is None else self._line.run, claim=claim)

    def _job(self, step: int, branch: int, meta: Mapping[str, object], masks: set[str], clean: bool) -> _Job:
        """Give the next checkpoint its run, its place in the order, and a name that nobody has."""
        self._be_writer()
        line = self._begun(step)
        self._last += 1
        branch = self._free_branch(step, branch, self.directory)
        with self._lists_lock:
            there = set(self._own.values())
            line.history = [sequence for sequence in line.history if sequence in there]
            return _Job(
                step=step,
                branch=branch,
                run=line.run,
                sequence=self._last,
                history=tuple(line.history),
                meta=meta,
                masks=masks,
                clean=clean,
            )

    def _begun(self, step: int) -> _Line:
        """The run that this object saves; at its first save it looks what the folder holds."""
        if self._open and self._line is not None:
            return self._line
        known = self.list()
        apart = [one.snapshot for one in seen_in(self.directory / QUARANTINE)]
        with self._lists_lock:
            self._last = max((s.sequence for s in (*known, *apart)), default=0)
            line = self._line = self._line or self._same_run(step, known) or _Line(run=self._next_run)
            self._own = {s.path: s.sequence for s in known if s.digest and s.run == line.run}
            self._open, self._pending = True, None
        others = [s for s in known if s.digest and s.run != line.run]
        if others and not line.history and not line.unnumbered:
            log.warning(
                "a new run (%s) begins in %s, which holds %d checkpoints of earlier runs, the newest of step %d: they "
                "stay, and resume takes those of the new run from now on; to go on with an earlier one, call resume() "
                "before the first save",
                line.run,
                self.directory,
                len(others),
                others[-1].step,
            )
        self._lock.take(line.run)
        return line

    def _same_run(self, step: int, known: Snapshots) -> _Line | None:
        """The run that this process saved to the folder before, if this is a later step of it."""
        line = _lines.get(_key(self.directory))
        if self._fresh or line is None or line.pid != os.getpid() or step <= line.step:
            return None
        there = any(s.run == line.run and s.sequence == line.newest for s in known)
        return replace(line, history=list(line.history), saved=False) if there else None

    def _store_there(self, job: _Job, captured: _State, held: contextlib.ExitStack) -> None:
        """On the thread: the folder is in use until it is done."""
        with held:
            self._store(job, captured)

    def _store(self, job: _Job, captured: _State) -> Snapshot:
        """Look whether the state is sound, and put it where it belongs. In all processes that hold parts of it."""
        ranks, sections = captured.ranks, captured.sections
        with explaining(f"step {job.step} could not be saved"):
            found = ranks.gathered(lambda: nonfinite(sections, allowed=job.masks))
            bad = tuple(dict.fromkeys(name for each in found for name in each))
            if bad and not job.clean:
                reason = f"{len(bad)} tensor{' holds' if len(bad) == 1 else 's hold'} NaN or Inf: {listed(bad, 3)}"
                job = ranks.from_first(lambda: self._for_quarantine(job, reason))
                path = self.directory / QUARANTINE / name_of(job.step, job.branch)
                _put(path, job, captured, repaired=False, status="bad", reason=reason)
                return ranks.from_first(lambda: self._in_quarantine(job, path))
            if bad:
                message = "step %d: non-finite values were replaced by zeros, as asked; the checkpoint is repaired"
                log.warning(message, job.step)
                captured = replace(captured, sections=cleaned(sections, job.masks))
            return self._write(job, captured, repaired=bool(bad))

    def _write(self, job: _Job, captured: _State, *, repaired: bool) -> Snapshot:
        path = self.directory / name_of(job.step, job.branch)
        _put(path, job, captured, repaired=repaired)
        return captured.ranks.from_first(lambda: self._saved(job, path, repaired=repaired))

    def _saved(self, job: _Job, path: Path, *, repaired: bool) -> Snapshot:
        with self._lists_lock:
            self._own[path] = job.sequence
            if self._line is not None:
                line = self._line
                line.step, line.newest, line.saved = job.step, job.sequence, True
                line.history = [*line.history, job.sequence]
                _lines[_key(self.directory)] = line
            if self._pending is not None and not repaired:
                self._pending[path] = job.step
        # It is durable: nothing that goes wrong from here on makes it less so.
        with _only_warned("%s is saved, but looking after older ones failed: %s", path.name):
            self.quiet(job.step)  # this state is finite: so are those that it came from
            self._delete(self._outlived())
        return snapshot_of(path)

    def _for_quarantine(self, job: _Job, reason: str) -> _Job:
        log.warning("step %d: this state is not one to come back to (%s); it goes to quarantine", job.step, reason)
        home = self.directory / QUARANTINE
        prepare(home)
        return replace(job, branch=self._free_branch(job.step, job.branch, home))

    def _in_quarantine(self, job: _Job, path: Path) -> Snapshot:
        with _only_warned("%s is in quarantine, but an older one could not be deleted: %s", path.name):
            for old in (snapshot_of(entry.path) for entry in entries(path.parent)):
                if old.digest and old.run == job.run and old.sequence < job.sequence:
                    remove(old.path)  # one is evidence; more are only disk space
        return snapshot_of(path)

    def _free_branch(self, step: int, branch: int, home: Path) -> int:
        """The branch, or the next one of which this step was not saved before (by an earlier run, say)."""
        while os.path.lexists(home / name_of(step, branch)):
            branch += 1
        return branch

    # -- certifying ----------------------------------------------------------------------------------------------

    def quiet(self, step: int) -> None:
        """All was well up to `step`: candidates that have seen enough of it since the last trouble are good."""
        if self._follows:
            return
        with self._lists_lock:
            waiting = self._candidates()
            proven = [p for p, since in waiting.items() if step - max(since, self._trouble) >= self.quiet_steps]
            for path in proven:
                del waiting[path]
        for path in proven:
            self._mark(path, "good", "")

    def condemn(self, since: int, reason: str, at: int | None = None) -> None:
        """Trouble began at `since`: candidates from then on are bad. Quiet counts from `at`, where it was last seen."""
        with self._lists_lock:
            self._trouble = self._trouble if at is None else max(self._trouble, at)
            paths = [path for path, step in self._candidates().items() if step >= since]
        self.condemn_these(paths, reason)

    def condemn_these(self, paths: Iterable[Path], reason: str) -> None:
        """Trouble had begun when these were written, as is known by now: they are bad, certified or not."""
        if self._follows:
            return
        for path in paths:
            with self._lists_lock:
                self._candidates().pop(path, None)
            if os.path.lexists(path):
                self._mark(path, "bad", reason)

    def _mark(self, path: Path, verdict: str, reason: str) -> None:
        try:
            container.set_status(path, verdict, reason)
        except OSError as error:  # a folder that somebody removed, a full disk: the rest goes on
            log.warning("%s could not be marked as %s: %s", path.name, verdict, error)

    def _candidates(self) -> dict[Path, int]:
        """What this run came through and nobody has judged yet; of other runs nothing is known here."""
        if self._line is None:
            return {}
        if self._pending is None:
            found = [s for s in self.history() if s.state == "candidate" and not s.repaired]
            self._pending = {s.path: s.step for s in found}
        return self._pending

    def history(self) -> Snapshots:
        """The checkpoints that this run has come through, the newest last; empty before `resume` and the first save."""
        with self._lists_lock:
            line = self._line
            if line is None:
                return []
            numbers, paths = set(line.history), set(line.unnumbered)
        return [s for s in self.list() if (s.run == line.run and s.sequence in numbers) or s.path in paths]

    # -- resuming ------------------------------------------------------------------------------------------------

    def resume(
        self,
        *,
        prefer: str = "newest",
        step: int | None = None,
        run: str | None = None,
        strict: bool = True,
        **objects: Unpack[state.LoadedObjects],
    ) -> Snapshot | None:
        """Put the newest sound checkpoint of the newest run into these objects, all of it or nothing; None without one.

        A damaged one is reported by name and the one before it is used. What is saved from now on continues the run of
        the checkpoint. Nothing is written.

        Args:
            prefer: `"newest"`, or `"good"`: the newest certified one if there is any, as after an incident.
            step: Take the checkpoint of this step and no other.
            run: Take one of this run, by its name or the beginning of it (`ckpt.list()` has the names).
            strict: Raise an error for a part that was not saved; otherwise it stays as it is.
            **objects: What to load into, by the names of `save`.
        """
        _check_parts("resume", objects)
        if prefer not in PREFERENCES:
            raise CheckpointError(f"prefer is {prefer!r}; expected one of {', '.join(PREFERENCES)}")
        wanted = None if step is None else _count("step", step)
        with explaining(f"{self.directory} could not be resumed from"):
            ranks = self._ranks(objects)
            ranks.all(self.wait)
            tried: set[Path] = set()
            for _ in range(5):  # a run that saves there may delete what was just listed, and have newer ones by then
                seen = ranks.from_first(lambda: seen_in(self.directory))
                known = [one.snapshot for one in seen]
                chosen = self._by_preference(known, prefer, wanted, run)
                for snapshot in (s for s in chosen if s.path not in tried):
                    tried.add(snapshot.path)
                    try:
                        contents = ranks.all(partial(_read, snapshot.path, objects, ranks))
                    except CheckpointError as error:
                        log.warning("%s is not used: %s", snapshot.path.name, error)
                        continue
                    _warn_of_passed_over(snapshot, seen)
                    ranks.all(partial(state.restore, contents.sections, strict=strict, **objects))
                    self._go_on_from(snapshot, contents.manifest.history, known)
                    return replace(snapshot, extra=contents.sections.get("extra", {}))
                if {s.path for s in ranks.from_first(self.list)} <= {s.path for s in known}:
                    break
        self._explain_none(seen, wanted, run)
        return None

    def _go_on_from(self, snapshot: Snapshot, history: tuple[int, ...], known: Snapshots) -> None:
        """What is saved from now on belongs to the run of this checkpoint."""
        before: list[Path] = []
        if not snapshot.sequence:
            unnumbered = [s.path for s in known if s.digest and not s.sequence]
            before = unnumbered[: unnumbered.index(snapshot.path) + 1]
        numbers = [*history, snapshot.sequence] if snapshot.sequence else []
        with self._lists_lock:
            self._line = _Line(
                run=snapshot.run,
                step=snapshot.step,
                newest=snapshot.sequence,
                history=numbers,
                unnumbered=before,
            )
            self._open, self._pending = False, None
            _lines[_key(self.directory)] = self._line
        if self._lock.held:
            self._lock.take(snapshot.run)

    def _by_preference(self, known: Snapshots, prefer: str, step: int | None, run: str | None) -> Snapshots:
        """What to try, the best first."""
        if run is not None:
            named = run_named(run, known, self.directory)
            known = [s for s in known if s.digest and s.run == named]
        if step is not None:
            return [s for s in reversed(known) if s.step == step]
        usable = [s for s in reversed(of_newest_run(known)) if is_eligible(s)]
        if prefer == "good":
            usable.sort(key=lambda s: s.state != "good")  # stable: the newest good one first
        return usable

    def _explain_none(self, seen: Sequence[Seen], step: int | None, run: str | None) -> None:
        """Where there was nothing to resume from: an error if one was asked for, else what there is instead."""
        known = [one.snapshot for one in seen]
        if step is not None or run is not None:
            asked = ("" if step is None else f" of step {step}") + ("" if run is None else f" of run {run!r}")
            there = listed([str(s.step) for s in known], 20) or "none"
            raise CheckpointError(f"there is no sound checkpoint{asked} in {self.directory}; known are: {there}")
        newest = of_newest_run(known)
        for one in seen:
            unused = one.snapshot
            if unused.state == "bad" and (unused in newest or not unused.digest):
                hint = "" if one.damaged else f"; resume(step={unused.step}) takes it anyway"
                log.warning("%s is not used: %s%s", unused.path.name, unused.reason, hint)
        others = [s for s in known if s not in newest and is_eligible(s)]
        if others:
            log.warning(
                "the newest run in %s (%s) has nothing to resume from; earlier runs have %d checkpoints, the newest of "
                "step %d: resume(run=%r) takes it",
                self.directory,
                runs_in(known)[-1],
                len(others),
                others[-1].step,
                others[-1].run,
            )

    # -- looking after -------------------------------------------------------------------------------------------

    def list(self) -> Snapshots:
        """All checkpoints in the order of saving, the newest last; one that is too damaged to be read counts as bad."""
        with explaining(f"{self.directory} could not be listed"):
            return [one.snapshot for one in seen_in(self.directory)]

    def verify(self, step: int, *, run: str | None = None) -> Verified:
        """Read every byte of the newest checkpoint of a step and compare it with its checksums."""
        self.wait()
        known = self.list()
        if run is not None:
            named = run_named(run, known, self.directory)
            known = [s for s in known if s.digest and s.run == named]
        found = [s for s in known if s.step == step]
        if not found:
            there = listed([str(s.step) for s in known], 20) or "none"
            raise CheckpointError(f"there is no checkpoint of step {step} in {self.directory}; there are: {there}")
        with explaining(f"{found[-1].path} could not be read"):
            return Verified(snapshot=found[-1], damage=container.damage_of(found[-1].path))

    def prune(self) -> Snapshots:
        """Delete what need not be kept of this run (before the first save: of the newest); returns what was deleted."""
        with self._save_lock:
            self.wait()
            held = self._lock.held
            self._be_writer()
            try:
                with self._lock.writing():
                    if self._line is not None and self._open:
                        return self._delete(self._outlived())
                    return self._delete(self._outlived(of_newest_run(self.list())))
            finally:
                if not held:
                    self._lock.release()

    def discard_bad(self) -> None:
        """Delete what was condemned of this run: for states that nobody will look at again.

        What merely cannot be read stays: the disk may have failed for a moment only.
        """
        if self._follows:
            return
        self._delete(
            [s.snapshot for s in self._of_this_run() if s.snapshot.state == "bad" and not (s.damaged or s.doubtful)]
        )

    def _of_this_run(self) -> Sequence[Seen]:
        """Read only those: other runs may have left many."""
        with self._lists_lock:
            paths = [path for path, _ in sorted(self._own.items(), key=lambda item: item[1]) if os.path.isdir(path)]
        return [see(path) for path in paths]

    def _outlived(self, snapshots: Snapshots | None = None) -> Snapshots:
        snapshots = [one.snapshot for one in self._of_this_run()] if snapshots is None else snapshots
        sizes = {} if self._keep.max_bytes is None else {s.path: size_of(s.path) for s in snapshots}
        return to_delete(snapshots, sizes, self._keep)

    def _delete(self, gone: Snapshots) -> Snapshots:
        """Delete these, and return those that are gone; one that cannot be deleted is warned about once."""
        done = []
        for snapshot in gone:
            try:
                remove(snapshot.path)
            except OSError as error:
                if os.path.lexists(snapshot.path):
                    if snapshot.path not in self._warned:
                        log.warning("an old checkpoint could not be deleted, and stays: %s", error)
                    self._warned.add(snapshot.path)
                    continue
            done.append(snapshot)
            with self._lists_lock:
                self._own.pop(snapshot.path, None)
                self._candidates().pop(snapshot.path, None)
        return done

    def wait(self) -> None:
        """Wait until everything is on disk; what went wrong there is raised here."""
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """Wait for what is under way, and let other runs write to the folder."""
        try:
            self.wait()
        finally:
            self._lock.release()


def _captured(ranks: Ranks, objects: state.SavedObjects) -> _State:
    sections = state.capture(**objects)
    if not ranks.several:
        return _State(sections=sections, places={}, ranks=ranks)
    from trimtab.checkpoint import shards  # slow to import, and seldom needed

    local, places = shards.split(sections)
    return _State(sections=local, places=places, ranks=ranks)


def _put(
    path: Path, job: _Job, captured: _State, *, repaired: bool, status: str = "candidate", reason: str = ""
) -> None:
    about = {**job.about(), "meta": {**job.meta, "repaired": repaired}, "status": status, "reason": reason}
    if not captured.ranks.several:
        container.write(path.parent, path.name, captured.sections, **about)
        return
    from trimtab.checkpoint import shards

    shards.write(captured.ranks, path, captured.sections, dict(captured.places), **about)


def _read(path: Path, objects: Mapping[str, Any], ranks: Ranks) -> Contents:
    """A checkpoint as the state of these objects in this process, every file checked."""
    if not ranks.several and not container.inspect(path).ranks:
        return container.read(path)
    from trimtab.checkpoint import shards

    return shards.read(path, objects, ranks)


def _warn_of_passed_over(chosen: Snapshot, seen: Iterable[Seen]) -> None:
    """Newer ones of the same run that are damaged: whoever resumes should know what is lost."""
    for one in seen:
        newer = one.snapshot.digest and one.snapshot.run == chosen.run and one.snapshot.sequence > chosen.sequence
        if newer and (one.damaged or one.doubtful):
            log.warning("%s is not used: %s", one.snapshot.path.name, one.snapshot.reason)


def _folder(directory: str | os.PathLike[str]) -> Path:
    try:
        folder = Path(directory)
    except TypeError:
        raise CheckpointError(f"the folder for checkpoints is {directory!r}; expected a path") from None
    if "\0" in str(folder):
        raise CheckpointError(f"the folder for checkpoints is {str(folder)!r}; a path has no NUL in it")
    return folder


def _prepared(folder: Path) -> CheckpointError | None:
    """Why a folder with checkpoints can only be read; one that holds none, and cannot be written to, is an error."""
    try:
        prepare(folder)
    except CheckpointError as error:
        try:
            there = entries(folder)
        except CheckpointError:
            there = []
        if error.errno not in READABLE or not there:
            raise
        log.warning("the checkpoints in %s can be read, but none can be saved there: %s", folder, error)
        return error
    return None


def _new_run() -> str:
    """A name that no run had before, and that begins with the time."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.urandom(3).hex()}"


def _key(folder: Path) -> Path:
    return Path(os.path.realpath(folder))


def _count(name: str, value: SupportsIndex) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not 0 <= number < MAX_STEP:
        raise CheckpointError(f"{name} is {value!r}; expected a whole number from 0 to {MAX_STEP - 1}")
    return number


def _check_parts(method: str, objects: Mapping[str, object]) -> None:
    for name in objects:
        if name not in PARTS:
            hint = did_you_mean(name, PARTS, otherwise=f"it takes {', '.join(PARTS)}; your own goes into extra")
            raise CheckpointError(f"{method} was given {name!r}, which is no part of a checkpoint; {hint}")
    # Before anything is read: a process that reads a sharded model alone waits for the others, or changes what it has.
    if why := refusal(*_modules(objects)):
        raise CheckpointError(why)


def _modules(objects: Mapping[str, Any]) -> list[Any]:
    given = [objects.get(name) for name in ("model", "ema")]
    return [one for part in given for one in (part.values() if isinstance(part, Mapping) else [part])]


@contextlib.contextmanager
def _only_warned(message: str, *about: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.warning(message, *about, error)


class Background:
    """Runs one job; the next one waits for it, so that copies never pile up."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._copy: dict[str, object] | None = None

    def copied(self, sections: Mapping[str, object]) -> Mapping[str, object]:
        """The sections in host memory, in the memory of the last ones once those are written."""
        self.wait()
        self._copy = to_host(sections, into=self._copy)
        return self._copy

    def submit(self, job: Callable[[], object]) -> None:
        """Start a job once the last one is done."""
        self.wait()

        def run() -> None:
            try:
                job()
            except BaseException as error:
                self._error = error

        # Not a daemon: the interpreter waits for it at exit, so what was saved is on disk.
        self._thread = threading.Thread(target=run, name="trimtab-checkpoint", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the job, and raise what it raised."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
