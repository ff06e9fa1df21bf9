"""What is thought of a checkpoint: the one file in it that changes, sealed and stored twice.

A condemned checkpoint must not become eligible because a bit of its status changed on the disk. Each of the two copies
is sealed by a checksum, so either of them proves what was written; without any the checkpoint is not trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

from trimtab.core.errors import CheckpointError, InputError
from trimtab.core.printable import printable
from trimtab.recover.disk import DISK, Disk
from trimtab.recover.manifest import STATUS, Status, parse_json
from trimtab.recover.verify import reason_of

STATES = ("candidate", "good", "bad")
_BY_TRUST = ("bad", "candidate", "good")
_MAX_BYTES = 1 << 20
_MAX_REASON = 10_000


def get_status(path: Path, *, disk: Disk = DISK) -> Status:
    """What is thought of the checkpoint at `path`; `bad`, and not `known`, where that cannot be read."""
    file = Path(path) / STATUS
    try:
        return decode_status(disk.read(file, _MAX_BYTES))
    except OSError as error:
        told = reason_of(error, file).removeprefix(f"{STATUS} ")
        return Status(state="bad", reason=f"{STATUS} {told}: whether it was condemned is not known", known=False)


def set_status(path: Path, state: str, reason: str = "", *, disk: Disk = DISK) -> None:
    """Change what is thought of the checkpoint at `path`: at once, and on the disk when this returns.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     set_status(Path(folder), "bad", "loss is NaN")
        ...     get_status(Path(folder))
        Status(state='bad', reason='loss is NaN', known=True)
    """
    path = Path(path)
    data = encode_status(state, reason)
    fresh = path / f".{STATUS}-{os.getpid()}-{token_hex(4)}"
    try:
        try:
            disk.write_file(fresh, data)
            disk.replace(fresh, path / STATUS)
        except BaseException:
            with contextlib.suppress(OSError):
                disk.unlink(fresh)
            raise
        disk.sync_dir(path)
    except CheckpointError:
        raise
    except OSError as error:
        told = CheckpointError(f"{path} could not be marked {state}: {error.strerror or error}; it is as it was")
        told.errno = error.errno
        raise told from error


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
    if line != _sealed(body) or state not in STATES or not isinstance(reason, str):
        return None
    return Status(state=state, reason=printable(reason))


def _sealed(body: dict[str, object]) -> bytes:
    check = hashlib.sha256(json.dumps(body).encode()).hexdigest()[:16]
    return json.dumps({**body, "sum": check}).encode() + b"\n"
