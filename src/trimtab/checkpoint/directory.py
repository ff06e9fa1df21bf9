"""The directory that holds the checkpoints: whether it can be saved to, what is in it, and how to move and delete it
without harm from a crash."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from trimtab.checkpoint.format.filesystem import DISK, Disk
from trimtab.core.errors import CheckpointError, TrimtabError

HOST = re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())
QUARANTINE = "quarantine"

_NAME = re.compile(r"step-([0-9]{1,15})(?:-b([0-9]{1,9}))?(?:~[0-9]{1,9})?")
_TEMPORARY = re.compile(r"\.tmp-([A-Za-z0-9_.]*)-([0-9]{1,10})-([0-9a-f]{8})-.+", re.DOTALL)
_active: set[Path] = set()
_lock = threading.Lock()


class Entry(NamedTuple):
    """A checkpoint by its name; whether it is readable is another question."""

    step: int
    branch: int
    path: Path


def name_of(step: int, branch: int = 0) -> str:
    """The name of a checkpoint's directory.

    Example:
        >>> name_of(500), name_of(500, branch=2)
        ('step-00000500', 'step-00000500-b2')
    """
    return f"step-{step:08d}" + (f"-b{branch}" if branch else "")


def step_of(name: str) -> tuple[int, int]:
    """Step and branch by the name of a checkpoint's directory.

    Example:
        >>> step_of("step-00000500-b2")
        (500, 2)
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(f"{name[:80]!r} is no name of a checkpoint; they are named like {name_of(500)!r}")
    return int(match[1]), int(match[2] or 0)


def size_of(path: Path) -> int:
    """Bytes of all files of a checkpoint, damaged or not."""
    try:
        return sum(os.lstat(Path(path) / name).st_size for name in os.listdir(path))
    except OSError:  # it went away meanwhile
        return 0


def entries(parent: Path, *, disk: Disk = DISK) -> list[Entry]:
    """Every checkpoint in `parent` by its name: by branch, then by step, as numbers.

    Names say nothing of the order in which they were saved: that is in their manifests (`survey.in_order`).
    """
    try:
        names = disk.names(Path(parent))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{parent} cannot be listed: {error.strerror or error}") from error
    found = [(match, Path(parent) / name) for name in names if (match := _NAME.fullmatch(name))]
    listed = [Entry(int(match[1]), int(match[2] or 0), path) for match, path in found if os.path.isdir(path)]
    return sorted(listed, key=lambda entry: (entry.branch, entry.step, entry.path.name))


def remove(path: Path, *, disk: Disk = DISK) -> None:
    """Delete a checkpoint: it loses its name first, so that no half of it is ever taken for a whole one."""
    path = Path(path)
    folder = _temporary_name(path.parent, path.name)
    with in_use(folder), _told(path, "deleted"):
        disk.rename(path, folder)
        disk.sync_dir(path.parent)
        disk.rmtree(folder)


def quarantine(path: Path, *, disk: Disk = DISK) -> Path:
    """Move a checkpoint to `quarantine/` beside it, where `entries` does not see it; returns where it is now."""
    path = Path(path)
    folder = path.parent / QUARANTINE
    with _told(path, "moved to quarantine"):
        if not os.path.isdir(folder):
            with contextlib.suppress(FileExistsError):
                disk.mkdir(folder)
        target, number = folder / path.name, 2
        while os.path.lexists(target):
            target, number = folder / f"{path.name}~{number}", number + 1
        disk.rename(path, target)
        disk.sync_dir(folder)
        disk.sync_dir(path.parent)
    return target


def clean(parent: Path, *, disk: Disk = DISK) -> list[Path]:
    """Delete what killed processes of this machine left half written; returns what was deleted.

    What another machine wrote, or a process that lives, or anybody who holds the lock, is left alone.
    """
    gone = []
    for folder in (Path(parent), Path(parent) / QUARANTINE):
        try:
            names = disk.names(folder)
        except OSError:  # none there, or none of ours
            continue
        for path in (folder / name for name in names):
            with contextlib.suppress(OSError):  # what cannot be deleted now stays for the next time
                if _is_stale(path) and (fd := disk.lock(path)) is not None:
                    try:
                        disk.rmtree(path)
                        gone.append(path)
                    finally:
                        os.close(fd)
    return gone


def _is_stale(path: Path) -> bool:
    match = _TEMPORARY.fullmatch(path.name)
    if match is None or match[1] != HOST or os.path.islink(path) or not os.path.isdir(path):
        return False
    pid = int(match[2])
    if pid == os.getpid():
        with _lock:
            return path.absolute() not in _active
    return not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    if os.name == "nt":
        return True  # to ask would be to interrupt it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # somebody else's, or no way to tell
    return True


@contextlib.contextmanager
def _told(path: Path, what: str) -> Iterator[None]:
    """What the system refuses is told as what it is about."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        told = CheckpointError(f"{path} could not be {what}: {error.strerror or error}")
        told.errno = error.errno
        raise told from error


@contextlib.contextmanager
def temporary(parent: Path, name: str, disk: Disk) -> Iterator[Path]:
    """A new directory that no `clean` touches while it is in use; deleted if an error leaves it behind."""
    folder = _temporary_name(parent, name)
    with in_use(folder):
        disk.mkdir(folder)
        fd = None
        try:
            fd = disk.lock(folder)
            yield folder
        except BaseException:
            with contextlib.suppress(OSError):
                disk.rmtree(folder)
            raise
        finally:
            if fd is not None:
                os.close(fd)


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """While this lasts, `clean` in this process leaves `folder` alone."""
    with _lock:
        _active.add(folder.absolute())
    try:
        yield
    finally:
        with _lock:
            _active.discard(folder.absolute())


def move_away(path: Path, folder: Path, disk: Disk) -> None:
    """Take back the name `path`; a failure is not told, because another one is being told already."""
    with contextlib.suppress(OSError):
        disk.rename(path, folder)


def _temporary_name(parent: Path, name: str) -> Path:
    return parent / f".tmp-{HOST}-{os.getpid()}-{token_hex(4)}-{name}"


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
