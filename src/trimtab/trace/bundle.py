"""An incident as one folder that can be sent to somebody: the verdict, the tensors, and a script that reproduces it.

    <run directory>/incidents/<id>/
        incident.json   the verdict, step, versions, settings, what was left out
        repro.py        runs the op again, and the step where it can be imported; needs torch and safetensors alone
        data/           operands, batch, rng and model, in the format of checkpoints: safetensors and JSON, with SHA-256

A bundle is there as a whole or not at all. Reading one executes nothing.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trimtab.checkpoint.directory import DISK, Disk, clean, make_parents, size_of, temporary
from trimtab.checkpoint.format import container, tree
from trimtab.checkpoint.format.manifest import parse_json
from trimtab.core.errors import CheckpointError, RecordError
from trimtab.core.printable import brief, printable
from trimtab.core.versions import versions
from trimtab.record.reader import find_run
from trimtab.trace.origin import Origin
from trimtab.trace.reproduce import Rerun, StepSource, rerun, script, step_source, storable

FOLDER = "incidents"
INCIDENT = "incident.json"
REPRO = "repro.py"
BAD_SECTIONS = {"input": "batch", "parameter": "model"}
"""Where the bad values of a step are stored, by cause, if no op made them."""
DATA = "data"
FORMAT = 1
MAX_BYTES = 256 << 20
"""Bytes that the tensors of one incident may take; what does not fit is named."""
MAX_TOTAL_BYTES = 512 << 20
"""Bytes that the tensors of all incidents of a run may take."""
MOST_INCIDENTS = 20
"""The first ones of a run tell most; later ones are not stored."""
_MAX_JSON = 4 << 20
_MAX_PLAIN = 16 << 20  # bytes of what is no tensor: it is stored as JSON, which is large and slow
_PLAIN_BYTES = 100


class Failing(Protocol):
    """The call that made the bad value."""

    @property
    def op(self) -> str:
        """Such as `aten.log.default`."""
        ...

    @property
    def args(self) -> tuple[Any, ...]:
        """What it was given by place."""
        ...

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """What it was given by name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known about the step beside the verdict; each may be missing."""

    failing: Failing | None = None
    batch: object = None
    rng: Mapping[str, object] = field(default_factory=dict)  # as checkpoint/rng.py takes it, or a part of that
    model: Mapping[str, object] = field(default_factory=dict)  # its state before the step
    config: Mapping[str, object] = field(default_factory=dict)
    step_fn: Callable[..., Any] | None = None
    root: object = None  # the model itself: a script may find it beside step_fn


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What a bundle says; its tensors are read when they are needed."""

    path: Path
    step: int
    created: float
    origin: Origin
    op: str = ""  # of the stored operands; empty where none are
    sections: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    source: str = ""  # module:function of the step
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its id: the name of its folder."""
        return self.path.name


# -- writing -----------------------------------------------------------------------------------------------------------


def write(
    run_dir: Path | str,
    origin: Origin,
    evidence: Evidence,
    *,
    step: int,
    max_bytes: int = MAX_BYTES,
    disk: Disk = DISK,
) -> Path | None:
    """Write an incident below a run directory; its folder, or None where the run has enough of them already.

    CheckpointError or OSError where the disk refuses; nothing is left behind then.
    """
    parent = Path(run_dir) / FOLDER
    make_parents(parent, disk)
    clean(parent, disk=disk)
    taken = [name for name in disk.names(parent) if not name.startswith(".")]
    if len(taken) >= MOST_INCIDENTS:
        return None
    name, number = f"step-{step:08d}", 2
    while name in taken:
        name, number = f"step-{step:08d}-{number}", number + 1
    left_out: list[str] = []
    used = sum(size_of(parent / one / DATA) for one in taken)
    sections = _sections(evidence, max(min(max_bytes, MAX_TOTAL_BYTES - used), 0), left_out)
    source = step_source(evidence.step_fn, evidence.root) if "batch" in sections else None
    text = _script(name, origin, evidence, sections, source)
    body = {
        "format": FORMAT,
        "step": step,
        "created": time.time(),
        "origin": origin.to_json(),
        "op": evidence.failing.op if evidence.failing is not None and "operands" in sections else "",
        "sections": sorted(sections),
        "left_out": left_out,
        "source": "" if source is None else str(source),
        "versions": versions(),
        "config": _plain(evidence.config),
    }
    with temporary(parent, name, disk) as folder:
        if sections:
            container.write(folder, DATA, sections, step=step, disk=disk)
        disk.write_file(folder / REPRO, text.encode())
        disk.write_file(folder / INCIDENT, json.dumps(_finite(body), indent=1).encode())
        disk.sync_dir(folder)
        disk.rename(folder, parent / name)
        disk.sync_dir(parent)
    return parent / name


def _sections(evidence: Evidence, max_bytes: int, left_out: list[str]) -> dict[str, object]:
    """What is stored, the most telling first, as long as it fits."""
    wanted: dict[str, object] = {}
    if evidence.failing is not None:
        wanted["operands"] = {"args": evidence.failing.args, "kwargs": dict(evidence.failing.kwargs)}
    if evidence.batch is not None:
        wanted["batch"] = {"batch": evidence.batch}
    if evidence.rng:
        wanted["rng"] = evidence.rng
    if evidence.model:
        wanted["model"] = evidence.model
    made: dict[str, object] = {}
    for name, value in wanted.items():
        needed, plain = _num_bytes(value), _num_plain(value)
        if needed > max_bytes:  # asked before anything is copied
            left_out.append(f"{name}: {_size(needed)}, and {_size(max_bytes)} are left of the limit")
            continue
        if plain > _MAX_PLAIN:
            left_out.append(f"{name}: {_size(plain)} of text and numbers outside of tensors, more than fits into JSON")
            continue
        lost: list[str] = []
        stored = storable(value, lost)
        try:
            tree.flatten(stored, name)
        except CheckpointError as error:
            left_out.append(f"{name}: {brief(error)}")
            continue
        left_out += [f"{name}: {one}" for one in lost]
        made[name] = stored
        max_bytes -= needed
    return made


def _num_bytes(value: object) -> int:
    if isinstance(value, Mapping):
        return sum(_num_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_num_bytes(item) for item in value)
    return int(getattr(value, "nbytes", 0) or 0)


def _num_plain(value: object) -> int:
    """About how many bytes of JSON everything takes that is no tensor."""
    if isinstance(value, Mapping):
        return sum(_num_plain(item) for item in value.values()) + _PLAIN_BYTES * len(value)
    if isinstance(value, list | tuple):
        return sum(_num_plain(item) for item in value)
    return _PLAIN_BYTES + (len(value) if isinstance(value, str) else 0)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 100_000 else f"{num_bytes:,} bytes"


def _script(
    name: str, origin: Origin, evidence: Evidence, sections: Mapping[str, Any], source: StepSource | None
) -> str:
    stored = sections.get("operands", {"args": (), "kwargs": {}})
    rng = sections.get("rng", {})
    op = evidence.failing.op if evidence.failing is not None and "operands" in sections else ""
    try:
        return script(
            title=f"Incident {name} of trimtab.",
            sentence=origin.sentence(),
            op=op,
            args=stored["args"],
            kwargs=stored["kwargs"],
            source=source,
            batch=sections.get("batch", {}).get("batch"),
            has_rng="torch" in rng,
            has_model="model" in sections,
            bad_section=bad if (bad := BAD_SECTIONS.get(origin.cause, "")) in sections else "",
        )
    except RecordError as error:  # an op that is not PyTorch's own
        return f'"""{name}: the op cannot be run again by a script."""\n\nraise SystemExit({str(error)!r})\n'


def _plain(value: object) -> Any:
    """What JSON can hold; everything else by its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no Inf: what is not known stands for them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- reading -----------------------------------------------------------------------------------------------------------


def read(path: Path | str) -> Incident:
    """Read what a bundle says; RecordError where it is missing, torn, or makes no sense. Executes nothing."""
    path = Path(path)
    try:
        data = parse_json(DISK.read(path / INCIDENT, _MAX_JSON), INCIDENT)
    except FileNotFoundError:
        raise RecordError(f"{path} holds no {INCIDENT}: expected the folder of an incident") from None
    except CheckpointError as error:
        raise RecordError(f"{path} cannot be read: {error}") from None
    if data.get("format") != FORMAT:
        raise RecordError(
            f"{path / INCIDENT} has format {brief(data.get('format'), 40)!r}; this version of trimtab reads {FORMAT}"
        )
    try:
        origin = data["origin"]
        _expect(origin, dict, "origin")
        found = Incident(
            path=path,
            step=_expect(data["step"], int, "step"),
            created=float(_expect(data["created"], (int, float), "created")),
            origin=_checked(Origin.from_json(origin)),  # type: ignore[arg-type]
            op=_expect(data["op"], str, "op"),
            sections=tuple(_texts(data["sections"], "sections")),
            left_out=tuple(_texts(data["left_out"], "left_out")),
            source=printable(_expect(data["source"], str, "source"), one_line=True),
            versions=_expect(data["versions"], dict, "versions"),
            config=_expect(data["config"], dict, "config"),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"{type(error).__name__}: {brief(error)}"
        raise RecordError(f"{path / INCIDENT} makes no sense ({what}): it is damaged, or not ours") from None
    return found


def _expect(value: object, kind: type | tuple[type, ...], name: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} is a {type(value).__name__}")
    return value


def _texts(value: object, name: str) -> list[str]:
    return [printable(_expect(one, str, name), one_line=True) for one in _expect(value, list, name)]


def _checked(origin: Origin) -> Origin:
    """An origin whose fields are what they should be: a file may hold anything."""
    for name in ("cause", "reason", "op", "phase", "module", "file", "code", "function", "subject", "why", "remedy"):
        _expect(getattr(origin, name), str, name)
    _expect(origin.line, int, "line")
    for name in ("samples", "dataset_indices"):
        for one in _expect(getattr(origin, name), tuple, name):
            _expect(one, int, name)
    for note in _expect(origin.notes, tuple, "notes"):
        _expect(note, str, "notes")
    for one in origin.operands:
        _expect(one.name, str, "operand")
        _expect(one.dtype, str, "dtype")
        _expect(one.value, str, "value")
        for count in (one.num_zero, one.num_nan, one.num_inf):
            _expect(count, int, "operand")
        for number in (one.smallest, one.largest):
            _expect(0 if number is None else number, (int, float), "operand")
    return origin


def run_again(incident: Incident) -> Rerun | None:
    """Run the op again from the stored operands; None where there are none. RecordError where they are damaged."""
    if not incident.op or "operands" not in incident.sections:
        return None
    try:
        stored = container.read(incident.path / DATA, sections=("operands",)).sections["operands"]
    except CheckpointError as error:
        raise RecordError(f"the tensors of {incident.path} cannot be used: {error}") from None
    if not isinstance(stored, dict) or not {"args", "kwargs"} <= stored.keys():
        raise RecordError(f"the operands of {incident.path} are not those of a call: it is damaged, or not ours")
    return rerun(incident.op, stored["args"], stored["kwargs"])


def incidents_of(run_dir: Path) -> list[Path]:
    """The incidents of a run in the order of writing."""
    folder = run_dir / FOLDER
    try:
        found = [folder / name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError:
        return []
    return sorted((one for one in found if one.is_dir()), key=_age)


def _age(path: Path) -> tuple[float, str]:
    """By its own word, because a copy has other times; one that cannot be read comes first."""
    try:
        return read(path).created, path.name
    except (RecordError, OSError):
        return float("-inf"), path.name


def find(given: Path | str | None = None) -> Path:
    """The incident that is meant: a bundle, the newest of a run directory, or one by its id in the newest run.

    Without `given` it is the newest one of the newest run. RecordError says which there are.
    """
    path = None if given is None else Path(given)
    if path is not None and path.name == INCIDENT and path.is_file():
        return path.parent
    if path is not None and (path / INCIDENT).is_file():
        return path
    if path is not None and path.name == FOLDER and path.is_dir():
        path = path.parent
    if path is not None and not path.exists():
        return _by_id(path)
    run = path if path is not None and (path / FOLDER).is_dir() else find_run(path)
    found = incidents_of(run)
    if not found:
        raise RecordError(
            f"the run {run} holds no incident: no step of it went bad while traces were on; "
            "give another run directory, or the folder of an incident"
        )
    return found[-1]


def _by_id(given: Path) -> Path:
    try:
        run = find_run()
    except RecordError:
        raise RecordError(f"there is no folder {given}, and no run here that could hold such an incident") from None
    known = incidents_of(run)
    for one in known:
        if str(given) == one.name:
            return one
    listed = ", ".join(one.name for one in known[-5:]) or "none"
    raise RecordError(f"there is no folder {given}, and the newest run, {run}, has no such incident; it has: {listed}")
