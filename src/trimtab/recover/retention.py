"""Which checkpoints to delete: pure, and never the last one that is good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """The ones to delete, the oldest first. Order is by branch and step, never by name or time of writing.

    Example:
        >>> from pathlib import Path
        >>> def snap(step, state="good"):
        ...     return Snapshot(step=step, path=Path(f"step-{step}"), state=state, digest="")
        >>> [s.step for s in doomed([snap(s) for s in (98, 99, 100, 101)], {}, Retention(keep_last=3))]
        [98]
        >>> [s.step for s in doomed([snap(1), snap(2, "candidate"), snap(3, "candidate")], {}, Retention(keep_last=1))]
        [2]
    """
    usable = sorted((s for s in snapshots if s.state != "bad"), key=lambda s: (s.branch, s.step))
    good = [s for s in usable if s.state == "good" and not s.repaired]
    sacred = {s.path for s in (*good[-1:], *usable[-1:])}
    wanted = sacred | {s.path for s in usable[-keep.keep_last :]} | {s.path for s in _best(usable, keep.best)}
    if keep.keep_every:
        wanted |= {s.path for s in usable if s.step % keep.keep_every == 0}
    out = [s for s in usable if s.path not in wanted]
    if keep.max_bytes is None:
        return out
    left = [s for s in usable if s.path in wanted]
    while sum(sizes.get(s.path, 0) for s in left) > keep.max_bytes:
        oldest = next((s for s in left if s.path not in sacred), None)
        if oldest is None:
            break  # what must be kept does not fit: keeping it matters more
        left.remove(oldest)
        out.append(oldest)
    return sorted(out, key=lambda s: (s.branch, s.step))


def _best(usable: Sequence[Snapshot], metric: str | None) -> list[Snapshot]:
    if not metric:
        return []
    sign, name = (1.0, metric[1:]) if metric.startswith("-") else (-1.0, metric)
    rated = [s for s in usable if s.metrics.get(name, float("nan")) == s.metrics.get(name)]
    return sorted(rated, key=lambda s: sign * s.metrics[name])[:1]
