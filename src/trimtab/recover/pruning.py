"""Deleting checkpoints by hand: what may go, once those that are to stay were read and found sound."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab.core.errors import CheckpointError, InputError
from trimtab.core.types import Snapshot
from trimtab.recover import container
from trimtab.recover.manifest import STATUS
from trimtab.recover.retention import Retention, beyond, doomed, never_deleted
from trimtab.recover.survey import Seen, runs_in, to_resume

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
    sacred: set[Path] = set()
    chosen = [one.snapshot for one in seen if not one.quarantined and one.snapshot.digest]
    runs = runs_in(chosen)
    for name in runs:
        trusted = _read([s for s in chosen if s.run == name], damaged)
        if run is not None and name != run:
            sacred |= {s.path for s in trusted}
        elif old_runs and name != runs[-1]:
            gone |= {s.path for s in trusted if s.state != "bad"}
        else:
            gone |= {s.path for s in doomed(trusted, {}, replace(keep, max_bytes=None))}
            sacred |= never_deleted(trusted)
            if old_runs and to_resume(trusted) is None:
                raise CheckpointError(
                    f"the newest run ({name}) has no sound checkpoint to resume from: those of earlier runs stay"
                )
    if keep.max_bytes is not None:
        sizes = {one.snapshot.path: one.num_bytes for one in seen}
        left = [s for s in chosen if s.path not in gone | damaged and s.state != "bad"]
        gone |= {s.path for s in beyond(keep.max_bytes, left, sizes, sacred)}
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
    while pillars := [s for s in _pillars(trusted) if s.path not in sound]:
        for one in pillars:
            found = [damage for damage in container.damage_of(one.path) if damage.file != STATUS]
            (damaged if found else sound).add(one.path)
        trusted = [replace(s, state="bad") if s.path in damaged else s for s in trusted]
    return trusted


def carry_out(chosen: Plan) -> list[tuple[Seen, str]]:
    """Delete; returns those that could not be deleted, with the reason."""
    failed = []
    for one in chosen.delete:
        try:
            container.remove(one.snapshot.path)
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
        raise CheckpointError(f"keep_every is {keep_every}; expected at least 1: every so many steps one is kept")
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


def _pillars(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Those that everything rests on once the others are gone."""
    chosen = (to_resume(snapshots), to_resume(snapshots, prefer="good"))
    return [s for s in chosen if s is not None]
