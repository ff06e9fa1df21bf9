"""What is thought of a checkpoint: the one file in it that changes, and whose loss costs nothing but the opinion."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from secrets import token_hex

from trimtab.core.errors import CheckpointError, InputError
from trimtab.recover.disk import DISK, Disk
from trimtab.recover.manifest import STATUS, Status, parse_json

STATES = ("candidate", "good", "bad")
_MAX_BYTES = 1 << 20


def get_status(path: Path, *, disk: Disk = DISK) -> Status:
    """What is thought of the checkpoint at `path`; `candidate` where that cannot be read."""
    try:
        return decode_status(disk.read(Path(path) / STATUS, _MAX_BYTES))
    except OSError:
        return Status()


def set_status(path: Path, state: str, reason: str = "", *, disk: Disk = DISK) -> None:
    """Change what is thought of the checkpoint at `path`: at once, and on the disk when this returns.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     set_status(Path(folder), "bad", "loss is NaN")
        ...     get_status(Path(folder))
        Status(state='bad', reason='loss is NaN')
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
    """The bytes of a status file."""
    if state not in STATES:
        raise InputError(f"a checkpoint is one of {', '.join(STATES)}; {state!r} was given")
    return _sealed({"state": state, "reason": reason[:10_000], "changed": time.time()})


def decode_status(data: bytes) -> Status:
    """Read a status file; CheckpointError says what is wrong with it."""
    body = parse_json(data, STATUS)
    body.pop("sum", None)
    if data != _sealed(body) or body.get("state") not in STATES or not isinstance(body.get("reason"), str):
        raise CheckpointError(f"{STATUS} is not what was written")
    return Status(state=body["state"], reason=body["reason"])


def _sealed(body: dict[str, object]) -> bytes:
    check = hashlib.sha256(json.dumps(body).encode()).hexdigest()[:16]
    return json.dumps({**body, "sum": check}).encode() + b"\n"
