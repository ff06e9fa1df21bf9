"""Which checkpoints to delete: pure, and never the last one that is good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from trimtab.core.types import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What to keep: the last few, the best by a metric (`"-name"` where less is better), every nth, within a budget."""

    keep_last: int = 3
    best: str | None = None
    keep_every: int | None = None
    max_bytes: int | None = None


def doomed(snapshots: Sequence[Snapshot], sizes: Mapping[Path, int], keep: Retention) -> list[Snapshot]:
    """The ones of one run to delete, the oldest first. Order is that of saving, never by name or time of writing.

    Neither the newest that `resume` takes goes, nor the newest that is good, nor the one that was saved last.

    Example:
        >>> from pathlib import Path
        >>> def snap(step, state="good"):
        ...     return Snapshot(step=step, path=Path(f"step-{step}"), state=state, digest="")
        >>> [s.step for s in doomed([snap(s) for s in (98, 99, 100, 101)], {}, Retention(keep_last=3))]
        [98]
        >>> [s.step for s in doomed([snap(1), snap(2, "candidate"), snap(3, "candidate")], {}, Retention(keep_last=1))]
        [2]
    """
    usable = sorted((s for s in snapshots if s.state != "bad"), key=_by_sequence)
    sacred = never_deleted(usable)
    wanted = sacred | {s.path for s in usable[-keep.keep_last :]} | {s.path for s in _best(usable, keep.best)}
    if keep.keep_every:
        wanted |= {s.path for s in usable if s.step % keep.keep_every == 0}
    out = [s for s in usable if s.path not in wanted]
    if keep.max_bytes is None:
        return out
    out += beyond(keep.max_bytes, [s for s in usable if s.path in wanted], sizes, sacred)
    return sorted(out, key=_by_sequence)


def never_deleted(snapshots: Sequence[Snapshot]) -> set[Path]:
    """Of those of one run, in the order of saving: the newest, the newest to resume from, the newest good one."""
    usable = [s for s in snapshots if s.state != "bad"]
    eligible = [s for s in usable if not s.repaired]
    good = [s for s in eligible if s.state == "good"]
    return {s.path for s in (*good[-1:], *eligible[-1:], *usable[-1:])}


def beyond(budget: int, left: Sequence[Snapshot], sizes: Mapping[Path, int], sacred: Set[Path]) -> list[Snapshot]:
    """The oldest that have to go until the rest fits; where what must be kept does not fit, keeping it matters more."""
    total, out = sum(sizes.get(s.path, 0) for s in left), []
    for oldest in left:
        if total > budget and oldest.path not in sacred:
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
