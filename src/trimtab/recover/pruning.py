"""Deleting checkpoints by hand: what may go, once those that are to stay were read and found sound."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.core.errors import CheckpointError, InputError
from trimtab.core.types import Snapshot
from trimtab.recover import container
from trimtab.recover.retention import Retention, doomed
from trimtab.recover.survey import Seen, to_resume

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to delete and what stays; `damaged` are those that were found so on the way, and stay as evidence."""

    delete: tuple[Seen, ...]
    keep: tuple[Seen, ...]
    damaged: tuple[Seen, ...]


def plan(seen: Sequence[Seen], keep: Retention, *, bad: bool = False) -> Plan:
    """Choose what to delete. The newest and the newest good one are read first: if damaged, an earlier one stays.

    `bad` chooses those that were marked as bad too, and what is in quarantine; never one that merely cannot be read.
    """
    trusted = [one.snapshot for one in seen if not one.quarantined]
    damaged: set[object] = set()
    sound: set[object] = set()
    while pillars := [s for s in _pillars(trusted) if s.path not in sound | damaged]:
        for one in pillars:
            (damaged if container.damage_of(one.path) else sound).add(one.path)
        trusted = [replace(s, state="bad") if s.path in damaged else s for s in trusted]
    gone = {s.path for s in doomed(trusted, {one.snapshot.path: one.num_bytes for one in seen}, keep)}
    if bad:
        gone |= {one.snapshot.path for one in seen if one.snapshot.state == "bad" and not one.damaged}
    return Plan(
        delete=tuple(one for one in seen if one.snapshot.path in gone),
        keep=tuple(one for one in seen if one.snapshot.path not in gone),
        damaged=tuple(one for one in seen if one.snapshot.path in damaged or (one.damaged and not one.quarantined)),
    )


def carry_out(chosen: Plan) -> list[tuple[Seen, str]]:
    """Delete; returns those that could not be deleted, with the reason."""
    failed = []
    for one in chosen.delete:
        try:
            container.remove(one.snapshot.path)
        except OSError as error:
            failed.append((one, error.strerror or str(error)))
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
