"""The lines of `run.jsonl` and the entries of `tables.f32`: how they are written, and read back without trust.

A line is one strictly valid JSON object. A table entry is a header of ten 32-bit words and the float32 rows it
announces. The entry itself says which sample it belongs to (`seq`, and layout, branch and step for whoever reads the
file alone), so thinning never rewrites a line of `run.jsonl` because a table moved. The header has its own check word:
a damaged payload costs one table, and a damaged header is skipped by looking for the next good one.

    magic · layout · branch · step (2) · seq (2) · number of floats · CRC of the floats · CRC of the nine words before
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from trimtab.core.errors import RecordError
from trimtab.core.files import JSON_MEMORY, is_hollow, json_memory, open_regular
from trimtab.core.types import (
    F32,
    Action,
    BrainState,
    Closing,
    Column,
    Decision,
    Finding,
    Kind,
    Layout,
    Outcome,
    RunInfo,
    Sample,
    Severity,
    Verdict,
)

LINES_NAME = "run.jsonl"
TABLES_NAME = "tables.f32"
FORMAT = "trimtab"
MAJOR, MINOR = 1, 1
KINDS = ("run", "layout", "sample", "verdict", "decision", "outcome", "state", "close", "thinned", "lost")
FIRST_BYTES = b'{"t":"run","seq":'
"""How every record begins; a torn first line is recognised by it."""

Event = Verdict | Decision | Outcome | BrainState | Closing


class Lost(NamedTuple):
    """What is missing from a record, and why: how many samples between which steps, and how many other lines."""

    samples: int
    others: int
    first: int | None
    last: int | None
    why: str

    def __str__(self) -> str:
        what = []
        if self.samples:
            when = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
            what.append(f"{self.samples:,} samples of {when}")
        if self.others or not what:
            what.append(f"{self.others:,} other lines")
        return f"{' and '.join(what)} are lost: {self.why}"


class Thinned(NamedTuple):
    """What a record lost to its bound; `complete` holds per optimizer the (seq, step) from which nothing is missing."""

    samples: int
    tables: int
    complete: dict[str, tuple[int, int]]


def _native(value: object) -> object:
    """What json cannot write by itself; a path or any other stranger in a config is better as text than lost."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.floating):
        return float(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    return str(value)


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_native).encode


def _flagged(value: object, path: str, flags: dict[str, str]) -> object:
    """A copy of nested data with every non-finite number replaced by None and named in `flags`."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        flags[path] = repr(float(value))
        return None
    if isinstance(value, Mapping):
        return _flagged_items(value, path, flags)
    if isinstance(value, (list, tuple)):
        return [_flagged(v, f"{path}/{i}", flags) for i, v in enumerate(value)]
    return _flagged(_native(value), path, flags)


def _flagged_items(value: Mapping[str, object], path: str, flags: dict[str, str]) -> dict[str, object]:
    return {
        str(k): _flagged(v, f"{path}/{str(k).replace('~', '~0').replace('/', '~1')}", flags) for k, v in value.items()
    }


def _line(kind: str, seq: int, body: Mapping[str, object]) -> bytes:
    head = {"t": kind, "seq": seq}
    try:
        text = _encode({**head, **body})
    except (ValueError, TypeError):  # a non-finite number or a key that is no string: rare, so worth a second try
        flags: dict[str, str] = {}
        text = _encode({**head, **_flagged_items(body, "", flags), "nf": flags})
    return text.encode() + b"\n"


def _finding(f: Finding) -> dict[str, object]:
    return {
        "code": f.code,
        "name": f.name,
        "step": f.step,
        "severity": int(f.severity),
        "message": f.message,
        "subject": f.subject,
        "evidence": f.evidence,
        "streak": f.streak,
        "advice": f.advice,
        "optimizer": f.optimizer,
    }


def _action(a: Action) -> dict[str, object]:
    return {"kind": a.kind, "args": a.args}


def run_line(info: RunInfo | None, seq: int) -> bytes:
    """The line that opens a record; without `info` it only states the format."""
    body: dict[str, object] = {"format": FORMAT, "version": [MAJOR, MINOR]}
    if info is not None:
        body |= {name: getattr(info, name) for name in RunInfo.__slots__}
    return _line("run", seq, body)


def layout_line(layout: Layout, seq: int) -> bytes:
    """A layout; its id is the `seq` of its line, which is never used again, even after damage."""
    return _line("layout", seq, {name: getattr(layout, name) for name in Layout.__slots__ if name[0] != "_"})


def sample_line(sample: Sample, seq: int, layout: int) -> bytes:
    """A sample's scalars, and how many floats its entry in the tables file holds."""
    # By hand, because most of a record is this: what `json` makes of it, in a third of the time.
    parts, flags = [], {}
    for name, value in sample.scalars.items():
        number = float(value)
        if math.isfinite(number):
            parts.append(f"{_key(name)}{number!r}")
        else:
            parts.append(f"{_key(name)}null")
            flags[name] = repr(number)
    more = f',"nf":{_encode(flags)}' if flags else ""
    if sample.notes:
        notes = {name: list(texts) for name, texts in sample.notes.items()}
        more += f',"notes":{_encode(notes)}'
    return (
        f'{{"t":"sample","seq":{seq},"step":{sample.step},"branch":{sample.branch},"layout":{layout},'
        f'"phase":{_key(sample.phase)[:-1]},"tab":{sample.table.size},"scalars":{{{",".join(parts)}}}{more}}}\n'
    ).encode()


@lru_cache(maxsize=512)
def _key(name: str) -> str:
    return _encode(name) + ":"


def thinned_line(total: Thinned, seq: int) -> bytes:
    """What was dropped so far to keep the record within its bound."""
    complete = {name: {"seq": seq, "step": step} for name, (seq, step) in total.complete.items()}
    return _line("thinned", seq, {"samples": total.samples, "tables": total.tables, "complete": complete})


def lost_line(lost: Lost, seq: int) -> bytes:
    """What could not be kept."""
    return _line("lost", seq, lost._asdict())


def event_line(record: Event, seq: int) -> bytes:
    """A verdict, decision, outcome, state or closing."""
    if isinstance(record, BrainState):
        return _line("state", seq, {"step": record.step, "optimizer": record.optimizer, "state": record.state})
    if isinstance(record, Closing):
        body = {name: getattr(record, name) for name in ("steps", "rejected", "reason", "dropped")}
        return _line("close", seq, body | {"num_findings": record.findings})
    if isinstance(record, Verdict):
        body = {name: getattr(record, name) for name in ("step", "seen_at", "optimizer", "phase")}
        return _line("verdict", seq, body | {"findings": [_finding(f) for f in record.findings]})
    if isinstance(record, Decision):
        body = {name: getattr(record, name) for name in ("about", "at", "because", "optimizer")}
        return _line("decision", seq, body | {"actions": [_action(a) for a in record.actions]})
    body = {name: getattr(record, name) for name in ("at", "applied", "detail", "optimizer")}
    return _line("outcome", seq, body | {"action": _action(record.action)})


DAMAGE = (ValueError, KeyError, TypeError, IndexError, OverflowError, AttributeError, RecursionError)
MAX_LINE = 32_000_000
"""Bytes; the longest lines are states of the detectors, of a few thousand."""
_LONG = 100_000
_INT64 = 2**63


class SampleLine(NamedTuple):
    """A sample without its table: what one `sample` line holds."""

    seq: int
    step: int
    branch: int
    layout: int
    phase: str
    num_floats: int
    scalars: dict[str, float]
    notes: dict[str, tuple[str, ...]]


def _restore(data: dict[str, object]) -> None:
    """Put the non-finite numbers back that `_flagged` took out."""
    flags = _dict(data, "nf") if "nf" in data else {}
    data.pop("nf", None)
    for pointer, text in flags.items():
        at: Any = data
        *parents, last = [key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:]]
        for key in parents:
            at = at[int(key)] if isinstance(at, list) else at[key]
        at[int(last) if isinstance(at, list) else last] = _number(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)  # built once: json.loads would build one for every line


def parse_line(line: bytes) -> dict[str, object]:
    """One line as a dict with `t` and `seq`; ValueError for anything that is not a line of ours."""
    if len(line) > _LONG and (len(line) > MAX_LINE or json_memory(line) > JSON_MEMORY):
        raise ValueError(f"{len(line)} bytes with more values than any line of ours")
    try:
        data = _DECODER.decode(line.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(data, dict) or not isinstance(data.get("t"), str):
        raise ValueError("no record of trimtab")
    _int(data, "seq")
    return data


def seq_of(data: Mapping[str, object]) -> int:
    """The number of a line, which no other line of the record has."""
    return _int(data, "seq")


def check_version(data: Mapping[str, object], where: object) -> None:
    """Raise RecordError where a run line was written by a newer, incompatible trimtab."""
    version = data.get("version")
    major = version[0] if isinstance(version, list) and version else 0
    if isinstance(major, int) and major > MAJOR:
        raise RecordError(
            f"{where} has record format {major}, this trimtab reads formats up to {MAJOR}: "
            "upgrade trimtab (pip install -U trimtab) to read it"
        )


def _int(data: Mapping[str, object], name: str) -> int:
    value = data.get(name)
    if type(value) is not int or not -_INT64 <= value < _INT64:
        raise ValueError(f"{name} is {value!r}, expected a whole number")
    return value


def _numbers(data: Mapping[str, object], name: str) -> dict[str, float]:
    """A mapping of names to numbers; whoever shows them formats them as such."""
    numbers: dict[str, float] = {}
    for key, value in _dict(data, name).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}.{key} is {value!r}, expected a number")
        float(value)  # OverflowError for one beyond all floats
        numbers[key] = value
    return numbers


def _counts(data: Mapping[str, object], name: str) -> dict[str, int]:
    found = _dict(data, name)
    return {key: _int(found, key) for key in found}


def _text(data: Mapping[str, object], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}, expected text")
    return value


def _dict(data: Mapping[str, object], name: str) -> dict[str, object]:
    value = data.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}, expected a mapping")
    return value


def _texts(data: Mapping[str, object], name: str) -> tuple[str, ...]:
    value = data.get(name)
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{name} is {value!r}, expected texts")
    return tuple(value)


def _dicts(data: Mapping[str, object], name: str) -> list[dict[str, object]]:
    value = data.get(name)
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise ValueError(f"{name} is {value!r}, expected a list of mappings")
    return value


def _ints(data: Mapping[str, object], name: str) -> tuple[int, ...]:
    value = data.get(name)
    if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
        raise ValueError(f"{name} is {value!r}, expected whole numbers")
    return tuple(value)


def _number(value: object) -> float:
    """A number, or what `repr` writes for one that JSON lacks."""
    if not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} where a number was expected")
    return float(value)


def to_info(data: dict[str, object]) -> RunInfo | None:
    """What a run line says about the run; None where it only states the format."""
    if "run_id" not in data:
        return None
    _restore(data)
    return RunInfo(
        run_id=_text(data, "run_id"),
        started=_text(data, "started"),
        config=_dict(data, "config"),
        versions={name: str(value) for name, value in _dict(data, "versions").items()},
        model=_text(data, "model"),
        num_parameters=_int(data, "num_parameters"),
        optimizers=_texts(data, "optimizers"),
        rules=_texts(data, "rules"),
        script=_text(data, "script") if "script" in data else "",
        host=_text(data, "host") if "host" in data else "",
        pid=_int(data, "pid") if "pid" in data else 0,
    )


def to_layout(data: dict[str, object]) -> Layout:
    """The layout of a layout line."""
    layout = Layout(
        names=_texts(data, "names"),
        kinds=tuple(Kind(k) for k in _texts(data, "kinds")),
        numel=_ints(data, "numel"),
        columns=tuple(Column(c) for c in _texts(data, "columns")),
        optimizer=_text(data, "optimizer"),
    )
    if not len(layout.names) == len(layout.kinds) == len(layout.numel):
        raise ValueError("a layout needs as many kinds and sizes as names")
    return layout


def to_sample_line(data: dict[str, object]) -> SampleLine:
    """The scalars and keys of a sample line."""
    flags = _dict(data, "nf") if "nf" in data else {}
    scalars = _dict(data, "scalars") | flags
    notes = _dict(data, "notes") if "notes" in data else {}
    return SampleLine(
        _int(data, "seq"),
        _int(data, "step"),
        _int(data, "branch"),
        _int(data, "layout"),
        _text(data, "phase"),
        _int(data, "tab"),
        {name: _number(value) for name, value in scalars.items()},
        {name: _texts(notes, name) for name in notes},
    )


def to_lost(data: dict[str, object]) -> Lost:
    """What a record says is missing from it."""
    first, last = (None if data.get(name) is None else _int(data, name) for name in ("first", "last"))
    return Lost(_int(data, "samples"), _int(data, "others"), first, last, _text(data, "why"))


def to_thinned(data: Mapping[str, object]) -> Thinned:
    """What a record says it dropped to stay within its bound."""
    whole = _dict(data, "complete")
    complete = {name: (_int(at, "seq"), _int(at, "step")) for name in whole for at in (_dict(whole, name),)}
    return Thinned(_int(data, "samples"), _int(data, "tables"), complete)


def to_event(data: dict[str, object]) -> Event:
    """The verdict, decision, outcome, state or closing of a line."""
    _restore(data)
    kind = data["t"]
    if kind == "state":
        return BrainState(step=_int(data, "step"), state=_dict(data, "state"), optimizer=_text(data, "optimizer"))
    if kind == "close":
        return Closing(
            steps=_counts(data, "steps"),
            rejected=_int(data, "rejected"),
            findings=_int(data, "num_findings"),
            reason=_text(data, "reason"),
            dropped=_counts(data, "dropped"),
        )
    if kind == "verdict":
        return Verdict(
            step=_int(data, "step"),
            seen_at=_int(data, "seen_at"),
            findings=tuple(_to_finding(f) for f in _dicts(data, "findings")),
            optimizer=_text(data, "optimizer"),
            phase=_text(data, "phase"),
        )
    if kind == "decision":
        return Decision(
            about=_int(data, "about"),
            at=_int(data, "at"),
            actions=tuple(_to_action(a) for a in _dicts(data, "actions")),
            because=_texts(data, "because"),
            optimizer=_text(data, "optimizer"),
        )
    return Outcome(
        at=_int(data, "at"),
        action=_to_action(_dict(data, "action")),
        applied=bool(data["applied"]),
        detail=_text(data, "detail"),
        optimizer=_text(data, "optimizer"),
    )


def _to_finding(data: Mapping[str, object]) -> Finding:
    return Finding(
        code=_text(data, "code"),
        name=_text(data, "name"),
        step=_int(data, "step"),
        severity=Severity(_int(data, "severity")),
        message=_text(data, "message"),
        subject=_texts(data, "subject"),
        evidence=_numbers(data, "evidence"),
        streak=_int(data, "streak"),
        advice=_texts(data, "advice"),
        optimizer=_text(data, "optimizer"),
    )


def _to_action(data: Mapping[str, object]) -> Action:
    return Action(kind=_text(data, "kind"), args=_numbers(data, "args"))


MAGIC = b"TTb1"
GIVE_BACK = 64 << 20
"""Bytes of a mapped file after which the memory of what was read is given back."""
_HEADER = struct.Struct("<4sIIqQIII")
_MAX_MISSES = 100_000  # places that look like the beginning of a table and are none
_CHECKED = _HEADER.size - 4  # every word but the last, which checks them

Buffer = bytes | mmap.mmap


class TableEntry(NamedTuple):
    """Where one table lies, and what it belongs to."""

    offset: int
    layout: int
    branch: int
    step: int
    seq: int
    num_floats: int
    crc: int

    @property
    def size(self) -> int:
        """Bytes on disk, header included."""
        return _HEADER.size + 4 * self.num_floats


def encode_table(sample: Sample, layout: int, seq: int) -> bytes:
    """The bytes of one entry; ValueError where the table does not fit its layout."""
    shape = (len(sample.layout.names), len(sample.layout.columns))
    if sample.table.shape != shape:
        raise ValueError(f"the table of step {sample.step} has shape {sample.table.shape}, its layout says {shape}")
    rows = np.ascontiguousarray(sample.table, dtype="<f4").tobytes()
    head = _HEADER.pack(MAGIC, layout, sample.branch, sample.step, seq, len(rows) // 4, zlib.crc32(rows), 0)[:_CHECKED]
    return head + struct.pack("<I", zlib.crc32(head)) + rows


def map_tables(path: Path) -> Buffer:
    """The file, memory-mapped; empty bytes where it is empty, FileNotFoundError where there is none."""
    with open_regular(path) as file:
        if is_hollow(os.fstat(file.fileno())):
            raise OSError("hardly any of it was ever written")
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            return b""


def _entry(buffer: Buffer, offset: int) -> TableEntry | None:
    if offset + _HEADER.size > len(buffer):
        return None
    magic, layout, branch, step, seq, num_floats, crc, check = _HEADER.unpack_from(buffer, offset)
    if magic != MAGIC or zlib.crc32(buffer[offset : offset + _CHECKED]) != check:
        return None
    entry = TableEntry(offset, layout, branch, step, seq, num_floats, crc)
    return entry if offset + entry.size <= len(buffer) else None


_FIELDS = np.dtype(
    {
        "names": ["magic", "layout", "branch", "step", "seq", "num_floats", "crc", "check"],
        "formats": ["S4", "<u4", "<u4", "<i8", "<u8", "<u4", "<u4", "<u4"],
    }
)
_MAX_ALIKE = 4096  # entries looked at together; their arrays stay in the cache of the processor


def _crc_table() -> NDArray[np.uint32]:
    crcs = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crcs = np.where(crcs & 1, (crcs >> 1) ^ np.uint32(0xEDB88320), crcs >> 1)
    return crcs


_CRCS = _crc_table()


def _crc32(rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """What `zlib.crc32` gives for every row, all at once."""
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for i in range(rows.shape[1]):
        crc = _CRCS[(crc ^ rows[:, i]) & 0xFF] ^ (crc >> 8)
    return ~crc


def _entries_alike(buffer: Buffer, first: TableEntry) -> list[TableEntry]:
    """`first`, and entries of the same size that follow it without a gap: a record mostly consists of them."""
    found, num = [first], 32
    while True:
        at = first.offset + len(found) * first.size
        num = min(2 * num, _MAX_ALIKE, (len(buffer) - at) // first.size)
        if num < 1 or at - first.offset > GIVE_BACK:
            return found
        heads = np.ndarray((num,), _FIELDS, buffer, at, (first.size,)).copy()
        raw = heads.view(np.uint8).reshape(num, _HEADER.size)[:, :_CHECKED]
        good = (heads["magic"] == MAGIC) & (heads["num_floats"] == first.num_floats) & (_crc32(raw) == heads["check"])
        num_good = num if good.all() else int(good.argmin())
        offsets = range(at, at + num_good * first.size, first.size)
        fields = [heads[name][:num_good].tolist() for name in ("layout", "branch", "step", "seq", "num_floats", "crc")]
        found += map(TableEntry, offsets, *fields)
        if num_good < num:
            return found


def scan_tables(buffer: Buffer, start: int = 0) -> tuple[list[TableEntry], list[str], int]:
    """Every complete entry from `start` on, what was wrong between them, and where the last one ends.

    Payloads are not looked at.
    """
    entries: list[TableEntry] = []
    problems: list[str] = []
    at, misses, given_back = start, 0, start
    while at < len(buffer):
        entry = _entry(buffer, at)
        if entry is not None:
            alike = _entries_alike(buffer, entry)
            entries += alike
            at += len(alike) * entry.size
            if at - given_back > GIVE_BACK:
                given_back = at
                release(buffer)
            continue
        found = buffer.find(MAGIC, at + 1)
        while found >= 0 and misses < _MAX_MISSES and _entry(buffer, found) is None:
            found, misses = buffer.find(MAGIC, found + 1), misses + 1
        if found < 0 or misses >= _MAX_MISSES:
            problems.append(f"the last {len(buffer) - at} bytes are an incomplete or damaged table")
            break
        problems.append(f"{found - at} damaged bytes at {at} skipped")
        at = found
    return entries, problems, entries[-1].offset + entries[-1].size if entries else start


def table_values(buffer: Buffer, entry: TableEntry) -> F32:
    """A copy of the entry's numbers, in one dimension."""
    return np.frombuffer(buffer, dtype="<f4", count=entry.num_floats, offset=entry.offset + _HEADER.size).astype(
        np.float32
    )


def view_tables(buffer: Buffer, first: TableEntry, num: int) -> F32:
    """The numbers of `num` entries of the same size that follow each other, where they lie, one row for each."""
    return np.ndarray((num, first.num_floats), "<f4", buffer, first.offset + _HEADER.size, (first.size, 4))


def release(buffer: Buffer) -> None:
    """Give back the memory of what was read of a mapped file; it is read again where it is needed."""
    if isinstance(buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        buffer.madvise(mmap.MADV_DONTNEED)


def intact(buffer: Buffer, entries: Iterable[TableEntry]) -> Iterator[bool]:
    """Of each of these entries whether its numbers are the ones that were written."""
    with memoryview(buffer) as view:
        for offset, _, _, _, _, num_floats, crc in entries:
            start = offset + _HEADER.size
            with view[start : start + 4 * num_floats] as rows:
                yield zlib.crc32(rows) == crc
