"""What lies at a path, without changing it: the checkpoints of a folder, one checkpoint and what is in it, or why there
is none."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab.checkpoint import health
from trimtab.checkpoint import single as swap
from trimtab.checkpoint.compare import joined, listed
from trimtab.checkpoint.directory import QUARANTINE, explaining
from trimtab.checkpoint.format import container
from trimtab.checkpoint.format.foreign import SAFE_SUFFIX, TORCH_SUFFIXES, load_foreign
from trimtab.checkpoint.format.manifest import MANIFEST, MARKER, Section
from trimtab.checkpoint.format.tensors import SAFE_NAMES
from trimtab.core.errors import CheckpointError
from trimtab.core.printable import printable
from trimtab.core.types import Snapshot

RECORD = "run.jsonl"  # a folder with it is the record of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A checkpoint as it lies on the disk; `created` is in seconds since 1970, None where it cannot be read.

    A `doubtful` one is whole, but what was thought of it is lost: it is not resumed from unless asked for.
    """

    snapshot: Snapshot
    created: float | None
    num_bytes: int
    quarantined: bool = False
    damaged: bool = False
    doubtful: bool = False


@explaining("the folder could not be looked through")
def survey(folder: Path) -> list[Seen]:
    """Every checkpoint in a folder, the one saved last at the end, then those in quarantine; an error without any.

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
    found = seen_in(folder) if os.path.isdir(folder) else []
    found += [see(path, quarantined=True) for path in _checkpoints_in(apart)]
    if not found:
        raise missing(folder)
    return found


def seen_in(folder: Path) -> list[Seen]:
    """The checkpoints of a folder in the order of saving, the newest last; those in quarantine are not among them."""
    return _in_order([see(entry.path) for entry in container.entries(folder)])


@explaining("the checkpoint could not be found")
def find(path: Path, step: int | None = None, run: str | None = None) -> Path:
    """The one checkpoint meant by a path: itself, `folder/500`, or the one of `step`, or what resume would take."""
    path = Path(path)
    here = next(swap.candidates(path), path)  # a killed save may have left it under another name
    if is_checkpoint(here):
        return here
    if step is None and _is_number(path.name) and not os.path.lexists(path) and os.path.isdir(path.parent):
        path, step = path.parent, int(path.name)
    seen = of_run(run, survey(path), path)
    if step is None:
        chosen = to_resume([one.snapshot for one in seen if not one.quarantined])
        return chosen.path if chosen is not None else seen[-1].snapshot.path
    found = [one.snapshot.path for one in seen if one.snapshot.step == step and not one.quarantined]
    found = found or [one.snapshot.path for one in seen if one.snapshot.step == step]
    if not found:
        known = listed([str(one.snapshot.step) for one in seen], 20)
        raise CheckpointError(f"there is no checkpoint of step {step} in {path}; there are: {known}")
    return found[-1]


def to_resume(snapshots: Sequence[Snapshot], prefer: str = "newest") -> Snapshot | None:
    """The one that `Checkpointer.resume` tries first: of the newest run only, whatever the others hold."""
    usable = [s for s in of_newest_run(snapshots) if is_eligible(s)]
    if prefer == "good":
        usable = [s for s in usable if s.state == "good"] or usable
    return usable[-1] if usable else None


def is_eligible(snapshot: Snapshot) -> bool:
    """Whether `resume` takes it without being asked for its step."""
    return snapshot.state != "bad" and not snapshot.repaired


def runs_in(snapshots: Sequence[Snapshot]) -> list[str]:
    """The runs that saved these, the newest last: the order of the newest checkpoint of each."""
    newest = [s.run for s in reversed(snapshots) if s.digest]
    return list(dict.fromkeys(newest))[::-1]


def of_newest_run(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Those that the run has saved which saved last."""
    runs = runs_in(snapshots)
    return [s for s in snapshots if s.digest and s.run == runs[-1]] if runs else []


def of_run(run: str | None, seen: Sequence[Seen], folder: Path) -> list[Seen]:
    """Those of a run by its name; all of them without one."""
    if run is None:
        return list(seen)
    named = run_named(run, [one.snapshot for one in seen], folder)
    return [one for one in seen if one.snapshot.digest and one.snapshot.run == named]


def run_named(name: str, snapshots: Sequence[Snapshot], folder: Path) -> str:
    """The run that a name, or the beginning of one, stands for; CheckpointError where that is none or several."""
    runs = runs_in(snapshots)
    if name in runs:
        return name
    found = [run for run in runs if name and run.startswith(name)]
    if len(found) == 1:
        return found[0]
    what = "several runs begin with" if found else "there is no run"
    known = listed([run or "'' (before runs had names)" for run in found or runs], 20) or "none"
    raise CheckpointError(f"{what} {name!r} in {folder}; there are: {known}")


def see(path: Path, *, quarantined: bool = False) -> Seen:
    """Look at one checkpoint: its manifest, its marker, the sizes of its files, and what is thought of it."""
    return look(path, quarantined=quarantined)[0]


def look(path: Path, *, quarantined: bool = False) -> tuple[Seen, container.Manifest | None]:
    """A checkpoint, and its manifest where that can be read."""
    manifest, damages = container.look_at(path)
    status = container.get_status(path)
    size = container.size_of(path)
    told = "; ".join(map(str, damages))
    if manifest is None:
        try:
            step, branch = container.step_of(path.name)
        except CheckpointError:  # it has a name of its own
            step, branch = 0, 0
        lost = Snapshot(step=step, branch=branch, path=path, state="bad", digest="", reason=told)
        return Seen(snapshot=lost, created=None, num_bytes=size, quarantined=quarantined, damaged=True), None
    snapshot = Snapshot(
        step=manifest.step,
        branch=manifest.branch,
        path=path,
        state="bad" if damages else status.state,
        reason=told or status.reason,
        digest=manifest.digest,
        run=manifest.run,
        sequence=manifest.sequence,
        metrics={printable(name, one_line=True): value for name, value in manifest.meta.get("metrics", {}).items()},
        repaired=bool(manifest.meta.get("repaired", False)),
        parts=tuple(manifest.sections),
    )
    seen = Seen(
        snapshot=snapshot,
        created=manifest.created,
        num_bytes=size,
        quarantined=quarantined,
        damaged=bool(damages),
        doubtful=not status.known,
    )
    return seen, manifest


def snapshot_of(path: Path) -> Snapshot:
    """What a checkpoint says of itself; one that is too damaged for that counts as bad."""
    return see(path).snapshot


def _in_order(seen: Sequence[Seen]) -> list[Seen]:
    """In the order of saving, which is in the manifests: a later run may count its steps from 0 again.

    Those whose manifest is lost come first: nobody can tell when they were saved, and none may pass for the newest.
    Then come those of trimtab 0.1.0, which have no such number, by branch and step.
    """
    return sorted(seen, key=_by_sequence)


def _by_sequence(one: Seen) -> tuple[bool, int, float, int, int, str]:
    told = one.snapshot
    written = (one.created or 0.0) if told.sequence else 0.0  # two writers where locks do not work count alike
    return bool(told.digest), told.sequence, written, told.branch, told.step, told.path.name


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) <= 15


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is one checkpoint, sound or not."""
    return any(os.path.isfile(Path(path) / name) for name in (MANIFEST, MARKER))


def is_foreign(path: Path) -> bool:
    """Whether a path is a file that `load_foreign` can be asked to read."""
    return os.path.isfile(path) and Path(path).suffix.lower() in (*TORCH_SUFFIXES, SAFE_SUFFIX)


def missing(path: Path) -> CheckpointError:
    """The error for a path without a checkpoint; it says what is there instead, and where to look."""
    if is_foreign(path):
        return CheckpointError(
            f"{path} is a file that trimtab did not write, and has no checksums; see what is in it: "
            f"trimtab checkpoint show {path}"
        )
    if not os.path.lexists(path):
        what = f"there is no folder {path}"
    elif not os.path.isdir(path):
        what = f"{path} is a file; checkpoints are folders"
    elif os.path.isfile(path / RECORD):
        what = f"{path} is the record of a run, not a folder of checkpoints (its report: trimtab report {path})"
    else:
        foreign = sorted(name for name in os.listdir(path) if is_foreign(path / name))
        held = f"; it holds {foreign[0]}: trimtab checkpoint show {path / foreign[0]}" if foreign else ""
        what = f"{path} holds no checkpoints{held}"
    near = _nearby(path)
    hint = f"; folders with checkpoints nearby: {', '.join(map(str, near))}" if near else ""
    return CheckpointError(f"{what}; expected a folder that a trimtab.Checkpointer saved to{hint}")


def _nearby(path: Path) -> list[Path]:
    around = [path, path.parent, path.parent.parent] if os.path.isdir(path) else [path.parent]
    found = []
    for parent in around:
        with contextlib.suppress(OSError):  # a neighbour that nobody may look into is none
            children = sorted(parent / name for name in os.listdir(parent) if os.path.isdir(parent / name))
            found += [child for child in (parent, *children) if child != path and _has_entries(child)]
    return list(dict.fromkeys(found))[:5]


def _has_entries(folder: Path) -> bool:
    try:
        return bool(container.entries(folder))
    except CheckpointError:
        return False


def _checkpoints_in(folder: Path) -> list[Path]:
    """Those that are named by their step in its order, then those with a name of their own."""
    if not os.path.isdir(folder):
        return []
    numbered = [entry.path for entry in container.entries(folder)]
    others = sorted(Path(folder) / name for name in os.listdir(folder) if not name.startswith("."))
    return numbered + [one for one in others if one not in numbered and is_checkpoint(one)]


_DTYPES = {name: str(dtype).removeprefix("torch.") for dtype, name in SAFE_NAMES.items()}
_MOMENT = re.compile(r"(.+)\.state\.state\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionRow:
    """One part of the state, and its tensors."""

    name: str
    num_bytes: int
    tensors: tuple[TensorRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """The contents of one checkpoint; of a foreign file there is no snapshot."""

    path: Path
    snapshot: Snapshot | None
    created: float | None
    writer: str
    num_bytes: int
    sections: tuple[SectionRow, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    nonfinite: tuple[str, ...] = ()
    """Tensors of a foreign file that hold a NaN or an Inf; ours are looked at when they are saved."""


@explaining("the checkpoint could not be shown")
def sheet_of(path: Path) -> Sheet:
    """The contents of a checkpoint of ours; CheckpointError where its manifest cannot be read."""
    seen, manifest = look(path)
    if manifest is None or seen.damaged:
        raise CheckpointError(f"{path} cannot be used: {seen.snapshot.reason}")
    return Sheet(
        path=path,
        snapshot=seen.snapshot,
        created=manifest.created,
        writer=manifest.writer,
        num_bytes=seen.num_bytes,
        sections=tuple(_row(name, section) for name, section in manifest.sections.items()),
        meta=manifest.meta,
    )


@explaining("the file could not be shown")
def sheet_of_foreign(path: Path) -> Sheet:
    """The contents of a `.pt`, `.pth` or `.safetensors` file; nothing in it is executed."""
    loaded = load_foreign(path)
    rows = [_foreign_row("", loaded)]
    if isinstance(loaded, Mapping) and not any(isinstance(one, Tensor) for one in loaded.values()):
        rows = [_foreign_row(str(name), one) for name, one in loaded.items()]
    return Sheet(
        path=path,
        snapshot=None,
        created=None,
        writer="",
        num_bytes=path.stat().st_size,
        sections=tuple(rows),
        nonfinite=tuple(name.removeprefix("model.") for name in health.nonfinite({"model": loaded})),
    )


def tensor_names(section: Section) -> dict[str, str]:
    """Names for people: `exp_avg.layer.weight` instead of `0.state.state.3.exp_avg`."""
    parameters: dict[str, dict[str, str]] = {}
    return {key: _name(key, section.tree, parameters) for key in section.tensors}


def _name(key: str, tree: Any, parameters: dict[str, dict[str, str]]) -> str:
    found = _MOMENT.fullmatch(key)
    if found is None:
        return key
    label, index, moment = found.groups()
    if label not in parameters:
        parameters[label] = _parameter_names(label, tree)
    name = parameters[label].get(index)
    if name is None:  # not an optimizer of torch
        return key
    return f"{moment}.{name}" if len(tree) == 1 else f"{label}.{moment}.{name}"


def _parameter_names(label: str, tree: Any) -> dict[str, str]:
    """The names of the parameters of one optimizer by their number."""
    names: dict[str, str] = {}
    try:
        entry = tree[label]
        for group, told in zip(entry["state"]["param_groups"], entry["names"], strict=True):
            for number, name in zip(group["params"], told, strict=True):
                names[str(number)] = str(name) or str(number)
    except (KeyError, TypeError, ValueError):
        return {}
    return names


def _row(name: str, section: Section) -> SectionRow:
    names = tensor_names(section)
    rows = tuple(
        TensorRow(name=names[key], dtype=_DTYPES[one.dtype], shape=tuple(one.shape), num_bytes=one.num_bytes)
        for key, one in section.tensors.items()
    )
    return SectionRow(name=name, num_bytes=section.num_bytes, tensors=rows)


def _foreign_row(name: str, value: Any) -> SectionRow:
    rows: list[TensorRow] = []
    _gather("", value, rows, 0)
    return SectionRow(name=name, num_bytes=sum(row.num_bytes for row in rows), tensors=tuple(rows))


def _gather(path: str, value: Any, rows: list[TensorRow], depth: int) -> None:
    if depth > 50:
        raise CheckpointError("it is nested more than 50 deep: whatever it is, it is no checkpoint")
    if isinstance(value, Tensor):
        dtype, size = str(value.dtype).removeprefix("torch."), value.numel() * value.element_size()
        rows.append(TensorRow(name=path or "(the whole)", dtype=dtype, shape=tuple(value.shape), num_bytes=size))
    elif isinstance(value, Mapping):
        for key, one in value.items():
            _gather(joined(path, key), one, rows, depth + 1)
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            _gather(joined(path, index), one, rows, depth + 1)
