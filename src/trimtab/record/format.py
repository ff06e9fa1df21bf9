"""The lines of `run.jsonl`: one strictly valid JSON object each, `t` (type) and `seq` first.

JSON has no NaN and no infinity. A non-finite number is written as `null`, so that a numeric column stays numeric for
DuckDB, polars and `JSON.parse`, and is named in the line's `nf` map: by scalar name in a sample line
(`"nf":{"loss":"nan"}`), by JSON pointer in every other (`"nf":{"/findings/0/evidence/z":"-inf"}`).

Keys of nested data become strings and tuples become lists, as JSON has it; numpy scalars become Python's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from trimtab.core.types import (
    Action,
    BrainState,
    Closing,
    Decision,
    Finding,
    Layout,
    Outcome,
    RunInfo,
    Sample,
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


def _native(value: Any) -> Any:
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


def _flagged(value: Any, path: str, flags: dict[str, str]) -> Any:
    """A copy of nested data with every non-finite number replaced by None and named in `flags`."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        flags[path] = repr(float(value))
        return None
    if isinstance(value, Mapping):
        return {
            str(k): _flagged(v, f"{path}/{str(k).replace('~', '~0').replace('/', '~1')}", flags)
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_flagged(v, f"{path}/{i}", flags) for i, v in enumerate(value)]
    return _flagged(_native(value), path, flags)


def _line(kind: str, seq: int, body: Mapping[str, Any]) -> bytes:
    head = {"t": kind, "seq": seq}
    try:
        text = _encode({**head, **body})
    except (ValueError, TypeError):  # a non-finite number or a key that is no string: rare, so worth a second try
        flags: dict[str, str] = {}
        text = _encode({**head, **_flagged(body, "", flags), "nf": flags})
    return text.encode() + b"\n"


def _finding(f: Finding) -> dict[str, Any]:
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


def _action(a: Action) -> dict[str, Any]:
    return {"kind": a.kind, "args": a.args}


def run_line(info: RunInfo | None, seq: int) -> bytes:
    """The line that opens a record; without `info` it only states the format."""
    body: dict[str, Any] = {"format": FORMAT, "version": [MAJOR, MINOR]}
    if info is not None:
        body |= {name: getattr(info, name) for name in RunInfo.__slots__}
    return _line("run", seq, body)


def layout_line(layout: Layout, seq: int) -> bytes:
    """A layout; its id is the `seq` of its line, which is never used again, even after damage."""
    return _line("layout", seq, {name: getattr(layout, name) for name in Layout.__slots__ if name[0] != "_"})


def sample_line(sample: Sample, seq: int, layout: int) -> bytes:
    """A sample's scalars, and how many floats its entry in the tables file holds."""
    scalars: dict[str, float | None] = {}
    flags: dict[str, str] = {}
    for name, value in sample.scalars.items():
        number = float(value)
        if math.isfinite(number):
            scalars[name] = number
        else:
            scalars[name], flags[name] = None, repr(number)
    body = {
        "step": sample.step,
        "branch": sample.branch,
        "layout": layout,
        "phase": sample.phase,
        "tab": int(sample.table.size),
        "scalars": scalars,
    }
    if flags:
        body["nf"] = flags
    if sample.notes:
        body["notes"] = {name: list(texts) for name, texts in sample.notes.items()}
    return _encode({"t": "sample", "seq": seq, **body}).encode() + b"\n"


def thinned_line(body: Mapping[str, Any], seq: int) -> bytes:
    """What was dropped so far to keep the record within its bound."""
    return _line("thinned", seq, body)


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
