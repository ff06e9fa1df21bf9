"""Which checkpoints to delete, by themselves or by hand: never the last one that is good."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab.checkpoint.directory import remove
from trimtab.checkpoint.format import container
from trimtab.checkpoint.inspect import Seen, runs_in, to_resume
from trimtab.core.errors import CheckpointError, InputError
from trimtab.core.types import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What to keep: the last few, the best by a metric (`"-name"` where less is better), every nth, within a budget."""

    keep_last: int = 3
    best: str | None = None
    keep_every: int | None = None
    max_bytes: int | None = None


def to_delete(snapshots: Sequence[Snapshot], sizes: Mapping[Path, int], keep: Retention) -> list[Snapshot]:
    """The ones of one run to delete, the oldest first. Order is that of saving, never by name or time of writing.

    Neither the newest that `resume` takes goes, nor the newest that is good, nor the one that was saved last.

    Example:
        >>> from pathlib import Path
        >>> def snap(step, state="good"):
        ...     return Snapshot(step=step, path=Path(f"step-{step}"), state=state, digest="")
        >>> [s.step for s in to_delete([snap(s) for s in (98, 99, 100, 101)], {}, Retention(keep_last=3))]
        [98]
        >>> saved = [snap(1), snap(2, "candidate"), snap(3, "candidate")]
        >>> [s.step for s in to_delete(saved, {}, Retention(keep_last=1))]
        [2]
    """
    usable = sorted((s for s in snapshots if s.state != "bad"), key=_by_sequence)
    protected = never_deleted(usable)
    wanted = protected | {s.path for s in usable[-keep.keep_last :]} | {s.path for s in _best(usable, keep.best)}
    if keep.keep_every:
        wanted |= {s.path for s in usable if s.step % keep.keep_every == 0}
    out = [s for s in usable if s.path not in wanted]
    if keep.max_bytes is None:
        return out
    out += over_budget(keep.max_bytes, [s for s in usable if s.path in wanted], sizes, protected)
    return sorted(out, key=_by_sequence)


def never_deleted(snapshots: Sequence[Snapshot]) -> set[Path]:
    """Of those of one run, in the order of saving: the newest, the newest to resume from, the newest good one."""
    usable = [s for s in snapshots if s.state != "bad"]
    eligible = [s for s in usable if not s.repaired]
    good = [s for s in eligible if s.state == "good"]
    return {s.path for s in (*good[-1:], *eligible[-1:], *usable[-1:])}


def over_budget(
    budget: int, left: Sequence[Snapshot], sizes: Mapping[Path, int], protected: Set[Path]
) -> list[Snapshot]:
    """The oldest that have to go until the rest fits; where what must be kept does not fit, keeping it matters more."""
    total, out = sum(sizes.get(s.path, 0) for s in left), []
    for oldest in left:
        if total > budget and oldest.path not in protected:
            total -= sizes.get(oldest.path, 0)
            out.append(oldest)
    return out


def _by_sequence(snapshot: Snapshot) -> tuple[int, int, int]:
    """Those of trimtab 0.1.0 are not numbered, and ordered by branch and step."""
    return snapshot.sequence, snapshot.branch, snapshot.step


def _best(usable: Sequence[Snapshot], metric: str | None) -> list[Snapshot]:
    if not metric:
        return []
    sign, name = (1.0, metric[1:]) if metric.startswith("-") else (-1.0, metric)
    rated = [s for s in usable if s.metrics.get(name, float("nan")) == s.metrics.get(name)]
    return sorted(rated, key=lambda s: sign * s.metrics[name])[:1]


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to delete and what stays; `damaged` are those that were found so on the way, and stay as evidence."""

    delete: tuple[Seen, ...]
    keep: tuple[Seen, ...]
    damaged: tuple[Seen, ...]


def plan(
    seen: Sequence[Seen], keep: Retention, *, bad: bool = False, run: str | None = None, old_runs: bool = False
) -> Plan:
    """Choose what to delete, run by run, or of one `run`.

    Of each, the newest and the newest good one are read first: if damaged, an earlier one stays. `bad` chooses those
    that were marked as bad too, and what is in quarantine; never one that merely cannot be read. `old_runs` chooses all
    of the runs before the newest, if that has one to resume from.
    """
    damaged: set[Path] = set()
    gone: set[Path] = set()
    protected: set[Path] = set()
    chosen = [one.snapshot for one in seen if not one.quarantined and one.snapshot.digest]
    runs = runs_in(chosen)
    for name in runs:
        trusted = _read([s for s in chosen if s.run == name], damaged)
        if run is not None and name != run:
            protected |= {s.path for s in trusted}
        elif old_runs and name != runs[-1]:
            gone |= {s.path for s in trusted if s.state != "bad"}
        else:
            gone |= {s.path for s in to_delete(trusted, {}, replace(keep, max_bytes=None))}
            protected |= never_deleted(trusted)
            if old_runs and to_resume(trusted) is None:
                raise CheckpointError(
                    f"the newest run ({name}) has no sound checkpoint to resume from: those of earlier runs stay"
                )
    if keep.max_bytes is not None:
        sizes = {one.snapshot.path: one.num_bytes for one in seen}
        left = [s for s in chosen if s.path not in gone | damaged and s.state != "bad"]
        gone |= {s.path for s in over_budget(keep.max_bytes, left, sizes, protected)}
    if bad:
        marked = (one for one in seen if one.snapshot.state == "bad" and not (one.damaged or one.doubtful))
        gone |= {one.snapshot.path for one in marked if run is None or one.snapshot.run == run}
    return Plan(
        delete=tuple(one for one in seen if one.snapshot.path in gone),
        keep=tuple(one for one in seen if one.snapshot.path not in gone),
        damaged=tuple(one for one in seen if one.snapshot.path in damaged or (one.damaged and not one.quarantined)),
    )


def _read(snapshots: Sequence[Snapshot], damaged: set[Path]) -> list[Snapshot]:
    """Read in full what everything will rest on; what is damaged counts as bad, and the next one is read."""
    trusted, sound = list(snapshots), set[Path]()
    while relied_on := [s for s in _relied_on(trusted) if s.path not in sound]:
        for one in relied_on:
            (damaged if container.unusable(one.path) else sound).add(one.path)
        trusted = [replace(s, state="bad") if s.path in damaged else s for s in trusted]
    return trusted


def carry_out(chosen: Plan) -> list[tuple[Seen, str]]:
    """Delete; returns those that could not be deleted, with the reason."""
    failed = []
    for one in chosen.delete:
        try:
            remove(one.snapshot.path)
        except OSError as error:
            if os.path.lexists(one.snapshot.path):  # else a run that saves here was faster
                said = error.__cause__ if isinstance(error.__cause__, OSError) else error
                failed.append((one, said.strerror or str(error)))
    return failed


def retention(keep_last: int, keep_best: str | None, keep_every: int | None, max_bytes: str | None) -> Retention:
    """What to keep, as given on a command line."""
    if keep_last < 1:
        raise CheckpointError(f"keep_last is {keep_last}; expected at least 1: the newest one is always kept")
    if keep_every is not None and keep_every < 1:
        raise CheckpointError(f"keep_every is {keep_every}; expected at least 1 step")
    budget = None if max_bytes is None else parse_size(max_bytes)
    return Retention(keep_last=keep_last, best=keep_best, keep_every=keep_every, max_bytes=budget)


def parse_size(text: str) -> int:
    """A number of bytes as people write it.

    Example:
        >>> parse_size("10GB"), parse_size("1.5 KiB"), parse_size("100")
        (10000000000, 1536, 100)
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise InputError(f"{text!r} is no size; expected something like 10GB, 500MB or 2GiB")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def _relied_on(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Those that everything rests on once the others are gone."""
    chosen = (to_resume(snapshots), to_resume(snapshots, prefer="good"))
    return [s for s in chosen if s is not None]
