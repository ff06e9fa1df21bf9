"""What a checkpoint directory holds, as records; the manifest that names and vouches for all of it; and the status file
that says what is thought of it."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.checkpoint.format import tree
from trimtab.checkpoint.format.tensors import SAFE_NAMES, Json, items, table, text
from trimtab.core.errors import CheckpointError, InputError
from trimtab.core.files import JSON_MEMORY, json_memory
from trimtab.core.printable import printable

FORMAT = 1
MANIFEST, MARKER, STATUS = "manifest.json", "COMMIT", "status.json"
MAX_JSON = 64 << 20
"""No manifest and no header of tensors is larger; a list of ten million numbers belongs into a tensor."""
ITEM_BYTES = {name: dtype.itemsize for dtype, name in SAFE_NAMES.items()}

MAX_STEP = 10**15
"""Steps, branches and places in the order of saving are below it; a number beyond it was never counted."""
_LEAST_BYTES = 40  # of a tensor in a file: its name, type, shape and place
_MAX_DIMS = 64  # torch has no tensors with more
_MAX_METRIC = 2**1023  # larger whole numbers are no floats
_LAST_YEAR = 253_402_300_800.0  # the end of the year 9999 in seconds since 1970
_RUN = re.compile(r"[A-Za-z0-9_.-]{0,80}")
_SECTION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_HEX = re.compile(r"[0-9a-f]{64}")
_MARK = re.compile(r"[0-9a-f]{16}")


class Stored(NamedTuple):
    """A tensor in a file: what safetensors calls its dtype, its shape, and how the file's hash begins at its end."""

    dtype: str
    shape: list[int]
    mark: str

    @property
    def num_bytes(self) -> int:
        """How many bytes its values take."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the state: its structure, and the file with its tensors (none if it has no tensors)."""

    tree: Json
    file: str | None
    num_bytes: int
    sha256: str
    header: str
    tensors: Mapping[str, Stored]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says about itself; `digest` is the SHA-256 of the manifest and stands for the whole of it.

    `sequence` counts the checkpoints of a folder in the order of saving, `run` names the run that saved it, and
    `history` holds the sequences of those that the run had come through by then, as far as they still existed. All are
    empty in checkpoints of trimtab 0.1.0.
    """

    step: int
    branch: int
    run: str
    sequence: int
    history: tuple[int, ...]
    created: float
    writer: str
    sections: Mapping[str, Section]
    meta: Mapping[str, Any]
    digest: str
    ranks: tuple[str, ...] = ()
    """The digests of what several processes wrote, each to a folder of its own (`rank_folder`) inside this one."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensor files."""
        return sum(section.num_bytes for section in self.sections.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What is thought of a checkpoint: `candidate`, `good` or `bad`, and why; not `known` where that is lost."""

    state: str = "candidate"
    reason: str = ""
    known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One file of a checkpoint that is not what it was, and what is wrong with it."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A checkpoint that is on the disk."""

    path: Path
    digest: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A checkpoint that was read: its manifest, the state by section, and what is thought of it."""

    manifest: Manifest
    sections: dict[str, Any]
    status: Status


def rank_folder(rank: int) -> str:
    """The folder of what one of several processes wrote.

    Example:
        >>> rank_folder(3)
        'rank-3'
    """
    return f"rank-{rank}"


def file_of(section: str) -> str:
    """The file of a section's tensors; CheckpointError for a name that could lead out of the directory."""
    if not _SECTION.fullmatch(section):
        raise CheckpointError(
            f"section {section[:80]!r}: a name has letters, digits, _ . - only and begins without . -"
        )
    return f"{section}.safetensors"


def encode_section(section: Section) -> dict[str, Json]:
    """A section as the manifest has it."""
    return {
        "tree": section.tree,
        "file": section.file,
        "bytes": section.num_bytes,
        "sha256": section.sha256,
        "header": section.header,
        "tensors": section.tensors,
    }


def digest_of(data: bytes) -> str:
    """SHA-256, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def is_digest(text: str) -> bool:
    """Whether `text` could have come from `digest_of`."""
    return _HEX.fullmatch(text) is not None


def dump(manifest: Mapping[str, Json], num_bytes: int = 0) -> bytes:
    """The bytes of a manifest; `num_bytes` is what its tensors take, and says how much may be said about them."""
    data = json.dumps(manifest, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MAX_JSON or json_memory(data) > memory_for(num_bytes):
        raise CheckpointError(
            f"the state without its tensors takes {len(data)} bytes and about {json_memory(data)} in memory, more than "
            f"{MAX_JSON} and {memory_for(num_bytes)}: long lists of numbers belong into tensors or arrays"
        )
    try:
        _check_counts(manifest, num_bytes)
    except ValueError as error:  # better now than when it is to be read
        raise CheckpointError(f"the state has {error}: store fewer of them") from None
    return data


def memory_for(num_bytes: int) -> int:
    """How much memory the description of a checkpoint may take that has this many bytes."""
    return JSON_MEMORY + num_bytes // 20


def parse_json(data: bytes, name: str, num_bytes: int = 0) -> dict[str, Json]:
    """JSON that must be an object; CheckpointError names the file if it is not, or would take too much memory.

    `num_bytes` is the size of what it describes.
    """
    if json_memory(data) > memory_for(num_bytes):
        raise CheckpointError(
            f"{name} holds too many values: they would take about {json_memory(data)} bytes of memory, more than "
            f"{memory_for(num_bytes)}"
        )
    try:
        value = json.loads(data)
    except RecursionError:
        raise CheckpointError(f"{name} is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{name} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} holds a {type(value).__name__}; an object was expected")
    return value


def parse(data: bytes, digest: str, num_bytes: int = 0) -> Manifest:
    """Read a manifest and distrust every field of it; `num_bytes` is the size of all files it speaks of."""
    raw = parse_json(data, MANIFEST, num_bytes)
    version = raw.get("format")
    if version != FORMAT:
        raise CheckpointError(f"{MANIFEST} has format {str(version)[:40]!r}; this version of trimtab reads {FORMAT}")
    try:
        _check_counts(raw, num_bytes)
        bodies = table(raw, "sections")
        sections = {name: _section(name, table(bodies, name)) for name in bodies}
        meta = tree.unflatten(raw["meta"], {})
        if not isinstance(meta, dict):
            raise TypeError(f"meta is a {type(meta).__name__}; expected an object")
        return Manifest(
            step=_count(raw["step"]),
            branch=_count(raw["branch"]),
            run=_run(raw.get("run", "")),
            sequence=_count(raw.get("sequence", 0)),
            history=tuple(map(_count, items(raw, "history") if "history" in raw else ())),
            created=_time(raw["created"]),
            writer=printable(text(raw, "writer"), one_line=True)[:200],
            sections=sections,
            meta=_checked_meta(meta),
            digest=digest,
            ranks=tuple(_digest(one) for one in (items(raw, "ranks") if "ranks" in raw else ())),
        )
    except CheckpointError as error:
        raise CheckpointError(f"{MANIFEST}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST} makes no sense ({type(error).__name__}: {str(error)[:200]})") from None


def _check_counts(raw: Mapping[str, Json], num_bytes: int) -> None:
    """Refuse numbers of things that no checkpoint of this size has, before each of them is looked at."""
    bodies = table(raw, "sections")
    counts = {name: len(table(table(bodies, name), "tensors")) for name in bodies}
    meta = table(raw, "meta")
    found = {
        "sections": (len(bodies), 1000),
        "tensors": (sum(counts.values()), 200_000 + num_bytes // 1000),
        "metrics": (len(table(meta, "metrics")) if "metrics" in meta else 0, 10_000),
        "processes": (len(items(raw, "ranks")) if "ranks" in raw else 0, 1_000_000),
        "earlier checkpoints": (len(items(raw, "history")) if "history" in raw else 0, 100_000),
    }
    for name, count in counts.items():
        found[f"tensors in section {name[:80]!r}"] = (count, _count(table(bodies, name)["bytes"]) // _LEAST_BYTES)
    for what, (number, most) in found.items():
        if number > most:
            raise ValueError(f"{number} {what}; at most {most} were expected")


def _section(name: str, body: Mapping[str, Json]) -> Section:
    filed = body["file"] is not None
    if filed and body["file"] != file_of(name):
        file = str(body["file"])[:80]
        raise CheckpointError(f"section {name!r} names the file {file!r}; it can only be {file_of(name)!r}")
    tensors = {key: _stored(key, item) for key, item in table(body, "tensors").items()}
    num_bytes, sha256, header = _count(body["bytes"]), text(body, "sha256"), text(body, "header")
    if filed and (not _HEX.fullmatch(sha256) or not _MARK.fullmatch(header)):
        raise ValueError(f"section {name!r} has no SHA-256")
    if sum(item.num_bytes for item in tensors.values()) > num_bytes:
        raise CheckpointError(f"section {name!r} declares more values than its {num_bytes} bytes can hold")
    return Section(
        tree=body["tree"],
        file=file_of(name) if filed else None,
        num_bytes=num_bytes,
        sha256=sha256,
        header=header,
        tensors=tensors,
    )


def _stored(key: str, item: Json) -> Stored:
    dtype, shape, mark = item if isinstance(item, list) and len(item) == 3 else (None, None, None)
    if isinstance(dtype, str) and dtype in ITEM_BYTES and isinstance(mark, str) and _MARK.fullmatch(mark):
        sizes = [n for n in shape if type(n) is int and 0 <= n < 2**63] if isinstance(shape, list) else None
        if sizes is not None and sizes == shape and len(sizes) <= _MAX_DIMS:
            return Stored(dtype, sizes, mark)
    raise CheckpointError(f"tensor {key[:80]!r} has dtype {str(dtype)[:40]} and shape {str(shape)[:80]}")


def _count(value: Json) -> int:
    if type(value) is not int or not 0 <= value < MAX_STEP:
        raise ValueError(f"{_shown(value)} is no count")
    return value


def _run(value: Json) -> str:
    if not isinstance(value, str) or not _RUN.fullmatch(value):
        raise ValueError(f"{_shown(value)} is no name of a run")
    return value


def _digest(value: Json) -> str:
    if not isinstance(value, str) or not is_digest(value):
        raise ValueError(f"{_shown(value)} is no SHA-256")
    return value


def _time(value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LAST_YEAR:
        raise ValueError(f"{_shown(value)} is no time of writing; expected seconds since 1970")
    return float(value)


def _checked_meta(meta: dict[str, object]) -> dict[str, object]:
    """The notes beside the state: what every reader formats as a number must be one."""
    metrics = meta.get("metrics", {})
    if not isinstance(metrics, dict):
        raise TypeError(f"metrics is {_shown(metrics)}; expected names with a number each")
    for name, value in metrics.items():
        if not isinstance(name, str) or not _is_number(value):
            raise ValueError(f"the metric {_shown(name)} is {_shown(value)}; expected a number")
    if not isinstance(meta.get("repaired", False), bool):
        raise ValueError(f"repaired is {_shown(meta['repaired'])}; expected true or false")
    return meta


def _is_number(value: object) -> bool:
    """Whether a reader can format it as a float: NaN and Inf are, truth values and numbers beyond floats are not."""
    return type(value) is float or (type(value) is int and abs(value) < _MAX_METRIC)


def _shown(value: object) -> str:
    """A value from a file for a message, however long it is there."""
    if isinstance(value, int) and abs(value) >= MAX_STEP:
        return "a number beyond all counts"
    return repr(str(value)[:40]) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


STATES = ("candidate", "good", "bad")
_BY_TRUST = ("bad", "candidate", "good")
_MAX_REASON = 10_000


def encode_status(state: str, reason: str) -> bytes:
    """The bytes of a status file: two sealed lines that say the same."""
    if state not in STATES:
        raise InputError(f"a checkpoint is one of {', '.join(STATES)}; {state!r} was given")
    return _sealed({"state": state, "reason": str(reason)[:_MAX_REASON], "changed": time.time()}) * 2


def decode_status(data: bytes) -> Status:
    """Read a status file; CheckpointError where neither of its copies is what was written.

    Copies that are both sealed and differ were not written by us: the one that trusts the checkpoint least counts.
    """
    found = [one for line in _copies(data) if (one := _opened(line)) is not None]
    if not found:
        raise CheckpointError(f"{STATUS} is not what was written")
    return min(found, key=lambda one: _BY_TRUST.index(one.state))


def damage_of_status(data: bytes) -> str:
    """What is wrong with a status file that may still be readable; empty where nothing is."""
    status, half = decode_status(data), len(data) // 2
    lines = [data] if _opened(data) is not None else [data[:half], data[half:]]  # one line: written by 0.1.0
    if all(_opened(line) == status for line in lines):
        return ""
    return f"one of its two copies is not what was written; the other says {status.state}"


def _copies(data: bytes) -> Iterator[bytes]:
    """Where a copy can be: a half of the file, even if the line break in its middle is gone, or a line."""
    half = len(data) // 2
    yield from (data[:half], data[half:])
    yield from data.splitlines(keepends=True)


def _opened(line: bytes) -> Status | None:
    """What a sealed line says; None where it is not exactly as it was written."""
    try:
        body = parse_json(line, STATUS)
    except CheckpointError:
        return None
    body.pop("sum", None)
    state, reason = body.get("state"), body.get("reason")
    if line != _sealed(body) or not isinstance(state, str) or state not in STATES or not isinstance(reason, str):
        return None
    return Status(state=state, reason=printable(reason))


def _sealed(body: Mapping[str, Json]) -> bytes:
    check = hashlib.sha256(json.dumps(body).encode()).hexdigest()[:16]
    return json.dumps({**body, "sum": check}).encode() + b"\n"
