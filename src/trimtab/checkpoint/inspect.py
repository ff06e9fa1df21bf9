"""What lies at a path, without changing it: the checkpoints of a folder, one checkpoint and what is in it, how two of
them differ, or why there is none."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trimtab.checkpoint.directory import QUARANTINE, entries, explaining, size_of, step_of
from trimtab.checkpoint.format import container, tree
from trimtab.checkpoint.format.foreign import SAFE_SUFFIX, TORCH_SUFFIXES, load_foreign
from trimtab.checkpoint.format.manifest import MANIFEST, MARKER, Manifest, Section, rank_folder
from trimtab.checkpoint.format.tensors import SAFE_NAMES, Json, identity, items, table
from trimtab.checkpoint.parts import joined, kind_of, listed
from trimtab.checkpoint.state import WATCHED, named, nonfinite
from trimtab.core.errors import CheckpointError
from trimtab.core.printable import brief, printable
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
    return sorted((see(entry.path) for entry in entries(folder)), key=_by_sequence)


@explaining("the checkpoint could not be found")
def find(path: Path, step: int | None = None, run: str | None = None) -> Path:
    """The one checkpoint meant by a path: itself, `folder/500`, or the one of `step`, or what resume would take."""
    path = Path(path)
    here = next(container.candidates(path), path)  # a killed save may have left it under another name
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


def look(path: Path, *, quarantined: bool = False) -> tuple[Seen, Manifest | None]:
    """A checkpoint, and its manifest where that can be read."""
    manifest, damages = container.look_at(path)
    status = container.get_status(path)
    size = size_of(path)
    damage = "; ".join(map(str, damages))
    if manifest is None:
        try:
            step, branch = step_of(path.name)
        except CheckpointError:  # it has a name of its own
            step, branch = 0, 0
        lost = Snapshot(step=step, branch=branch, path=path, state="bad", digest="", reason=damage)
        return Seen(snapshot=lost, created=None, num_bytes=size, quarantined=quarantined, damaged=True), None
    snapshot = Snapshot(
        step=manifest.step,
        branch=manifest.branch,
        path=path,
        state="bad" if damages else status.state,
        reason=damage or status.reason,
        digest=manifest.digest,
        run=manifest.run,
        sequence=manifest.sequence,
        metrics={printable(name, one_line=True): value for name, value in manifest.meta.get("metrics", {}).items()},
        repaired=bool(manifest.meta.get("repaired", False)),
        parts=parts_of(manifest),
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


def parts_of(manifest: Manifest) -> tuple[str, ...]:
    """The parts of the state that a checkpoint holds, by their names; one of several processes says it in its notes."""
    told = manifest.meta.get("parts")
    return tuple(map(str, told)) if manifest.ranks and isinstance(told, list) else tuple(manifest.sections)


def snapshot_of(path: Path) -> Snapshot:
    """What a checkpoint says of itself; one that is too damaged for that counts as bad."""
    return see(path).snapshot


def _by_sequence(one: Seen) -> tuple[bool, int, float, int, int, str]:
    """The order of saving, which is in the manifests: a later run may count its steps from 0 again.

    Those whose manifest is lost come first: nobody knows when they were saved, and none may pass for the newest.
    Then come those of trimtab 0.1.0, which have no such number, by branch and step.
    """
    saved = one.snapshot
    written = (one.created or 0.0) if saved.sequence else 0.0  # two writers where locks do not work count alike
    return bool(saved.digest), saved.sequence, written, saved.branch, saved.step, saved.path.name


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
        return bool(entries(folder))
    except CheckpointError:
        return False


def _checkpoints_in(folder: Path) -> list[Path]:
    """Those that are named by their step in its order, then those with a name of their own."""
    if not os.path.isdir(folder):
        return []
    numbered = [entry.path for entry in entries(folder)]
    others = sorted(Path(folder) / name for name in os.listdir(folder) if not name.startswith("."))
    return numbered + [one for one in others if one not in numbered and is_checkpoint(one)]


_DTYPES = {name: str(dtype).removeprefix("torch.") for dtype, name in SAFE_NAMES.items()}
_MOMENT = re.compile(r"(.*)\.state\.state\.(\d+)\.(.+)")


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
    meta: Mapping[str, object] = field(default_factory=dict)
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
        sections=_rows_of_ranks(path, manifest) if manifest.ranks else _rows(manifest),
        meta={name: value for name, value in manifest.meta.items() if name != "parts"},
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
        nonfinite=tuple(name.removeprefix("model.") for name in nonfinite({"model": loaded})),
    )


def tensor_names(section: Section) -> dict[str, str]:
    """Names for people: `exp_avg.layer.weight` instead of `0.state.state.3.exp_avg`."""
    return _names(section, section.tensors)


def _names(section: Section, keys: Iterable[str]) -> dict[str, str]:
    parameters: dict[str, dict[str, str]] = {}
    tree = section.tree if isinstance(section.tree, Mapping) else {}
    return {key: _name(key, tree, parameters) for key in keys}


def _name(key: str, tree: Mapping[str, Json], parameters: dict[str, dict[str, str]]) -> str:
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


def _parameter_names(label: str, tree: Mapping[str, Json]) -> dict[str, str]:
    """The names of the parameters of one optimizer by their number."""
    names: dict[str, str] = {}
    try:
        entry = table(tree, label)
        for group, named_here in zip(items(table(entry, "state"), "param_groups"), items(entry, "names"), strict=True):
            if isinstance(group, dict) and isinstance(named_here, list):
                for number, name in zip(items(group, "params"), named_here, strict=True):
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


def _rows(manifest: Manifest) -> tuple[SectionRow, ...]:
    return tuple(_row(name, section) for name, section in manifest.sections.items())


def _rows_of_ranks(path: Path, manifest: Manifest) -> tuple[SectionRow, ...]:
    """What several processes hold together in its whole size; what each has for itself added up over all of them."""
    from trimtab.checkpoint import shards  # slow to import, and seldom needed

    own: dict[str, dict[str, TensorRow]] = {}
    names: dict[str, str] = {}
    for rank in range(len(manifest.ranks)):
        part = container.inspect(path / rank_folder(rank))
        for section, found in part.sections.items():
            if section == shards.SHARDS:
                continue
            keys = [key.removeprefix(f"{section}.") for key in shards.keys_in(found.tree)]
            names |= {f"{section}.{key}": f"{section}.{name}" for key, name in _names(found, keys).items()}
            for row in _row(section, found).tensors:
                known = own.setdefault(section, {}).get(row.name)
                size = row.num_bytes + (0 if known is None else known.num_bytes)
                own[section][row.name] = replace(row, num_bytes=size)
    rows: dict[str, list[TensorRow]] = {name: [] for name in parts_of(manifest)}
    for key, (about, _) in shards.plan_of(path, manifest).items():
        section, _, name = names.get(key, key).partition(".")
        dtype, shape = about.properties.dtype, tuple(about.size)
        size = math.prod(shape) * dtype.itemsize
        row = TensorRow(name=name, dtype=str(dtype).removeprefix("torch."), shape=shape, num_bytes=size)
        rows.setdefault(section, []).append(row)
    for section, each in own.items():
        rows.setdefault(section, []).extend(replace(row, name=f"{row.name} (of each rank)") for row in each.values())
    return tuple(
        SectionRow(name=name, num_bytes=sum(row.num_bytes for row in each), tensors=tuple(each))
        for name, each in rows.items()
    )


def _foreign_row(name: str, value: object) -> SectionRow:
    rows: list[TensorRow] = []
    _gather("", value, rows, 0)
    return SectionRow(name=name, num_bytes=sum(row.num_bytes for row in rows), tensors=tuple(rows))


def _gather(path: str, value: object, rows: list[TensorRow], depth: int) -> None:
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


OPAQUE = "rng"
"""Numbers below this name mean nothing by themselves: they are the same or not."""
_PIECE = 1 << 22  # values turned to float64 at a time
_WRAPPED = ("optimizer", "scheduler")  # by label, each with its class and its state


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """A tensor that differs: `only_a`, `only_b`, `kind` (type or shape) or `values`.

    `relative` is the norm of the difference over the norm of the first one: inf where that is zero, NaN where one of
    them holds a NaN or an Inf.
    """

    name: str
    what: str
    a: str = ""
    b: str = ""
    relative: float | None = None
    num_elements: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """A plain value that differs; None stands for one that is not there."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Everything that differs, the largest change first; empty where two states are bit-identical.

    `same` names the sections that both have and in which nothing differs.
    """

    tensors: tuple[TensorChange, ...]
    settings: tuple[SettingChange, ...]
    num_tensors: int
    same: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether nothing differs."""
        return not self.tensors and not self.settings


@explaining("the two could not be compared")
def difference(a: Mapping[str, object], b: Mapping[str, object]) -> Difference:
    """Compare the sections of two checkpoints, tensor by tensor and value by value.

    Example:
        >>> one = {"model": {"w": torch.tensor([3.0, 4.0]), "b": torch.zeros(1)}, "extra": {"epoch": 1}}
        >>> two = {"model": {"w": torch.tensor([3.0, 4.5]), "b": torch.zeros(1)}, "extra": {"epoch": 2}}
        >>> found = difference(one, two)
        >>> [(change.name, change.relative) for change in found.tensors], found.settings[0].name
        ([('model.w', 0.1)], 'extra.epoch')
    """
    tensors_a, values_a = _leaves(a)
    tensors_b, values_b = _leaves(b)
    names = list(dict.fromkeys((*tensors_a, *tensors_b)))
    done: dict[Hashable, float | None] = {}
    changes = [change for name in names if (change := _changed(name, tensors_a.get(name), tensors_b.get(name), done))]
    keys = dict.fromkeys((*values_a, *values_b))
    settings = [
        SettingChange(name=name, a=_shown(values_a, name), b=_shown(values_b, name))
        for name in keys
        if name not in values_a or name not in values_b or not _same(values_a[name], values_b[name])
    ]
    touched = {name.partition(".")[0] for name in (*(one.name for one in changes), *(one.name for one in settings))}
    return Difference(
        tensors=tuple(sorted(changes, key=_rank)),
        settings=tuple(settings),
        num_tensors=len(names),
        same=tuple(section for section in a if section in b and section not in touched),
    )


def relative_change(a: Tensor, b: Tensor) -> float:
    """The norm of `b - a` over the norm of `a`, in float64.

    Example:
        >>> relative_change(torch.ones(4), torch.full((4,), 1.5))
        0.5
    """
    found = _change(a, b)
    return 0.0 if found is None else found


def _change(a: Tensor, b: Tensor) -> float | None:
    """The relative change; None where the two are bit-identical."""
    if a.layout is not torch.strided:
        return _sparse_change(a, b)
    change, size, same = 0.0, 0.0, True
    for x, y in zip(_pieces(a), _pieces(b), strict=True):
        before = x.double()
        size += float(before.square().sum())
        if not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            same = False
            change += float((y.double() - before).square().sum())
    return None if same else _ratio(change, size)


def _ratio(change: float, size: float) -> float:
    if not (math.isfinite(change) and math.isfinite(size)):
        return math.nan
    if not change:  # a zero that changed its sign
        return 0.0
    return math.sqrt(change / size) if size else math.inf


def _sparse_change(a: Tensor, b: Tensor) -> float | None:
    one, two = (t.to_sparse(layout=torch.sparse_coo).coalesce() for t in (a, b))
    parts = ((one.indices(), two.indices()), (one.values(), two.values()))
    if all(torch.equal(x, y) for x, y in parts):
        return None
    gap = (two.double() - one.double()).coalesce().values()
    return _ratio(float(gap.square().sum()), float(one.values().double().square().sum()))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj()).contiguous()
    flat = tensor.reshape(-1)
    yield from (flat[start : start + _PIECE] for start in range(0, len(flat), _PIECE))


def _changed(name: str, a: Tensor | None, b: Tensor | None, done: dict[Hashable, float | None]) -> TensorChange | None:
    """What changed; `done` holds what was compared already, under whatever name: layers may share their weights."""
    if a is None or b is None:
        if b is not None:
            return TensorChange(name=name, what="only_b", b=kind_of(b), num_elements=b.numel())
        return None if a is None else TensorChange(name=name, what="only_a", a=kind_of(a), num_elements=a.numel())
    if kind_of(a) != kind_of(b) or a.layout is not b.layout:
        return TensorChange(name=name, what="kind", a=kind_of(a), b=kind_of(b), num_elements=b.numel())
    both = identity(a), identity(b)
    if both not in done:
        done[both] = _change(a, b)
    relative = done[both]
    if relative is None:
        return None
    shown = None if OPAQUE in name.split(".") else relative
    return TensorChange(name=name, what="values", a=kind_of(a), b=kind_of(b), relative=shown, num_elements=a.numel())


def _rank(change: TensorChange) -> tuple[int, float]:
    """What is missing or of another shape first, then the largest change, then what has no size."""
    if change.what != "values":
        return 0, 0.0
    if change.relative is None:
        return 3, 0.0
    return (1, 0.0) if math.isnan(change.relative) else (2, -change.relative)


def _leaves(sections: Mapping[str, object]) -> tuple[dict[str, Tensor], dict[str, object]]:
    """All tensors, and all plain values, by name; moments bear the names of their parameters."""
    tensors = dict(named(sections))
    values: dict[str, object] = {}
    for section, state in sections.items():
        watched = section in WATCHED
        for name, leaf in _walk_leaves(section, _unwrapped(state) if section in _WRAPPED else state):
            if not isinstance(leaf, Tensor):
                values[name] = leaf
            elif not watched:
                tensors[name] = leaf
    return tensors, values


def _unwrapped(state: object) -> object:
    """`optimizer.param_groups` and `optimizer.class` instead of `optimizer.0.state.param_groups`."""
    if not isinstance(state, Mapping) or not all(isinstance(entry, Mapping) for entry in state.values()):
        return state
    flat = {
        label: {key: one for key, one in entry.items() if key not in ("state", "names", "shapes")} | _settings(entry)
        for label, entry in state.items()
    }
    return next(iter(flat.values())) if len(flat) == 1 else flat


def _settings(entry: Mapping[str, object]) -> dict[str, object]:
    inner = entry.get("state")
    return dict(inner) if isinstance(inner, Mapping) else {"state": inner}


def _walk_leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Tensors and plain values; a list of nothing but plain values is one of them."""
    if isinstance(value, np.ndarray):
        yield path, torch.from_numpy(value) if value.dtype != object and value.dtype.kind in "biufc" else value
    elif isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _walk_leaves(joined(path, key), one)
    elif isinstance(value, list | tuple) and any(isinstance(one, Mapping | Tensor | np.ndarray) for one in value):
        for index, one in enumerate(value):
            yield from _walk_leaves(joined(path, index), one)
    else:
        yield path, value


def _same(a: object, b: object) -> bool:
    """Equal as they would be stored: a NaN is a NaN."""
    first, second = tree.flatten(a), tree.flatten(b)
    if first[1] or second[1]:  # tensors within something unusual
        return first[0] == second[0] and all(torch.equal(first[1][k], second[1][k]) for k in first[1])
    return bool(first[0] == second[0])


class _Shown:
    """A value as Python writes it, for `brief`."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return repr(self._value)


def _shown(values: Mapping[str, object], name: str) -> str | None:
    if name not in values:
        return None
    value = values[name]
    return brief(value if isinstance(value, int) and not isinstance(value, bool) else _Shown(value))
