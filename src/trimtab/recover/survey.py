"""What lies at a path, without changing it: the checkpoints of a folder, one checkpoint, or why there is none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.core.errors import CheckpointError
from trimtab.core.types import Snapshot
from trimtab.recover import container, swap
from trimtab.recover.foreign import SAFE_SUFFIX, TORCH_SUFFIXES
from trimtab.recover.house import QUARANTINE
from trimtab.recover.manifest import MANIFEST, MARKER

ADVICE = "; use another checkpoint (nothing was loaded)"  # of no use where nothing was to be loaded
RECORD = "run.jsonl"  # a folder with it is the record of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A checkpoint as it lies on the disk; `created` is in seconds since 1970, None where it cannot be read."""

    snapshot: Snapshot
    created: float | None
    num_bytes: int
    quarantined: bool = False
    damaged: bool = False


def survey(folder: Path) -> list[Seen]:
    """Every checkpoint in a folder, the newest last, then those in quarantine; CheckpointError where there is none.

    Only manifests, markers and sizes are read. A single checkpoint is a folder of one.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = container.write(Path(folder), "step-00000005", {}, step=5)
        ...     [(one.snapshot.step, one.snapshot.state) for one in survey(Path(folder))]
        [(5, 'candidate')]
    """
    folder = Path(folder)
    if is_checkpoint(folder):
        return [see(folder)]
    apart = folder / QUARANTINE
    found = [see(entry.path) for entry in container.entries(folder)] if folder.is_dir() else []
    found += [see(path, quarantined=True) for path in _checkpoints_in(apart)]
    if not found:
        raise missing(folder)
    return found


def find(path: Path, step: int | None = None) -> Path:
    """The one checkpoint meant by a path: itself, `folder/500`, or the one of `step`, or what resume would take."""
    path = Path(path)
    here = next(swap.candidates(path), path)  # a killed save may have left it under another name
    if is_checkpoint(here):
        return here
    if step is None and path.name.isdigit() and not path.exists() and path.parent.is_dir():
        path, step = path.parent, int(path.name)
    seen = survey(path)
    if step is None:
        chosen = to_resume([one.snapshot for one in seen if not one.quarantined])
        return chosen.path if chosen is not None else seen[-1].snapshot.path
    found = [one.snapshot.path for one in seen if one.snapshot.step == step and not one.quarantined]
    found = found or [one.snapshot.path for one in seen if one.snapshot.step == step]
    if not found:
        known = ", ".join(str(one.snapshot.step) for one in seen)
        raise CheckpointError(f"there is no checkpoint of step {step} in {path}; there are: {known}")
    return found[-1]


def to_resume(snapshots: Sequence[Snapshot], prefer: str = "newest") -> Snapshot | None:
    """The one that `Checkpointer.resume` tries first."""
    usable = [s for s in snapshots if s.state != "bad" and not s.repaired]
    if prefer == "good":
        usable = [s for s in usable if s.state == "good"] or usable
    return usable[-1] if usable else None


def see(path: Path, *, quarantined: bool = False) -> Seen:
    """Look at one checkpoint."""
    try:
        created, damaged = container.inspect(path).created, False
    except CheckpointError:
        created, damaged = None, True
    return Seen(
        snapshot=snapshot_of(path),
        created=created,
        num_bytes=container.size_of(path),
        quarantined=quarantined,
        damaged=damaged,
    )


def snapshot_of(path: Path) -> Snapshot:
    """What a checkpoint says of itself; one that is too damaged for that counts as bad."""
    try:
        manifest = container.inspect(path)
    except CheckpointError as error:
        try:
            step, branch = container.step_of(path.name)
        except CheckpointError:  # it has a name of its own
            step, branch = 0, 0
        reason = str(error).removeprefix(f"{path} cannot be used: ").removesuffix(ADVICE)
        return Snapshot(step=step, branch=branch, path=path, state="bad", digest="", reason=reason)
    told = container.get_status(path)
    return Snapshot(
        step=manifest.step,
        branch=manifest.branch,
        path=path,
        state=told.state,
        reason=told.reason,
        digest=manifest.digest,
        metrics=manifest.meta.get("metrics", {}),
        repaired=bool(manifest.meta.get("repaired", False)),
    )


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is one checkpoint, sound or not."""
    return any((Path(path) / name).is_file() for name in (MANIFEST, MARKER))


def is_foreign(path: Path) -> bool:
    """Whether a path is a file that `load_foreign` can be asked to read."""
    return Path(path).is_file() and Path(path).suffix.lower() in (*TORCH_SUFFIXES, SAFE_SUFFIX)


def missing(path: Path) -> CheckpointError:
    """The error for a path without a checkpoint; it says what is there instead, and where to look."""
    if is_foreign(path):
        return CheckpointError(
            f"{path} is a file that trimtab did not write, and has no checksums; see what is in it: "
            f"trimtab checkpoint show {path}"
        )
    if not path.exists():
        what = f"there is no folder {path}"
    elif not path.is_dir():
        what = f"{path} is a file; checkpoints are folders"
    elif (path / RECORD).is_file():
        what = f"{path} is the record of a run, not a folder of checkpoints (its report: trimtab report {path})"
    else:
        foreign = sorted(one.name for one in path.iterdir() if is_foreign(one))
        held = f"; it holds {foreign[0]}: trimtab checkpoint show {path / foreign[0]}" if foreign else ""
        what = f"{path} holds no checkpoints{held}"
    near = _nearby(path)
    hint = f"; folders with checkpoints nearby: {', '.join(map(str, near))}" if near else ""
    return CheckpointError(f"{what}; expected a folder that a trimtab.Checkpointer saved to{hint}")


def _nearby(path: Path) -> list[Path]:
    around = [path, path.parent, path.parent.parent] if path.is_dir() else [path.parent]
    found = []
    for parent in around:
        try:
            children = sorted(child for child in parent.iterdir() if child.is_dir())
        except OSError:
            continue
        found += [child for child in (parent, *children) if child != path and container.entries(child)]
    return list(dict.fromkeys(found))[:5]


def _checkpoints_in(folder: Path) -> list[Path]:
    """Those that are named by their step in its order, then those with a name of their own."""
    if not folder.is_dir():
        return []
    numbered = [entry.path for entry in container.entries(folder)]
    others = sorted(Path(folder) / name for name in os.listdir(folder) if not name.startswith("."))
    return numbered + [one for one in others if one not in numbered and is_checkpoint(one)]
