"""Finds out before training, and not at step 10,000, that checkpoints cannot be saved; and says why when one cannot."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from trimtab.core.errors import CheckpointError, TrimtabError
from trimtab.recover.disk import DISK, Disk
from trimtab.recover.house import clean, temporary

_REMEDIES = {
    errno.ENOSPC: "free some space, or keep fewer checkpoints",
    errno.EDQUOT: "free some space, or keep fewer checkpoints",
    errno.EACCES: "check who may write there, or choose another directory",
    errno.EPERM: "check who may write there, or choose another directory",
    errno.EROFS: "the file system is read-only: choose another directory",
    errno.EIO: "the disk or the network file system fails: look at the system's log, choose another directory",
}


def prepare(parent: Path, *, disk: Disk = DISK) -> None:
    """Make the directory for checkpoints, try that it can be written to, and clean up after killed processes."""
    parent = Path(parent)
    try:
        make_parents(parent, disk)
        with temporary(parent, "probe", disk) as folder:
            disk.write_file(folder / "probe", b"x")
            disk.rmtree(folder)
        clean(parent, disk=disk)
    except OSError as error:
        raise explained(error, parent) from error


def make_parents(parent: Path, disk: Disk) -> None:
    """Make a directory and those above it, on the disk on return."""
    if parent.is_dir():
        return
    make_parents(parent.parent, disk)
    with contextlib.suppress(FileExistsError):  # somebody else was faster
        disk.mkdir(parent)
    disk.sync_dir(parent.parent)


def explained(error: OSError, final: Path, needed: int = 0) -> CheckpointError:
    """What the system said about saving `final`, with the bytes it needs, where they matter, and what to do."""
    if isinstance(error, CheckpointError):
        return error
    room = ""
    with contextlib.suppress(OSError):
        room = f"; it takes about {needed} bytes and {shutil.disk_usage(final.parent).free} are free" if needed else ""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    remedy = _REMEDIES.get(error.errno or 0, "earlier checkpoints are as they were")
    told = CheckpointError(
        f"{final} could not be saved: {error.strerror or error} ({name}) at {error.filename or final.parent}{room}; "
        f"{remedy}"
    )
    told.errno = error.errno
    return told


@contextlib.contextmanager
def explaining(what: str) -> Iterator[None]:
    """Whatever goes wrong inside leaves as an error of ours that says what was being done; a decorator, too."""
    try:
        yield
    except TrimtabError:
        raise
    except OSError as error:
        where = f" at {error.filename}" if error.filename else ""
        told = CheckpointError(f"{what}: {error.strerror or error}{where}")
        told.errno = error.errno
        raise told from error
    except MemoryError as error:
        raise CheckpointError(f"{what}: there is not enough memory") from error
    except Exception as error:
        raise CheckpointError(f"{what} ({type(error).__name__}: {str(error)[:500]})") from error
