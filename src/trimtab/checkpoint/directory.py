"""The directory that holds the checkpoints: what is in it, how to move and delete it without harm from a crash, and
every file-system operation on the way.

A test gives `Disk` a gate and with it kills, fails, shortens or slows the Nth operation of a save, for every N.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from trimtab.core.errors import CheckpointError, TrimtabError

Gate = Callable[[str, Path], int | None]
"""Called with the name of an operation and its path before it happens; an int is the most bytes a write may take."""

_NO_DIR_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # some network file systems have no such thing
_FOLLOW_NOTHING = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a FIFO must not make anybody wait
_MAX_BYTES = 64 << 20
_WORTH_A_HINT = 1 << 20
_MAX_PIECES = 1024  # what POSIX promises


def _batch(pieces: Sequence[memoryview]) -> list[memoryview]:
    """As much as one call should take: whole tensors, so that the interpreter is let go of seldom and for long."""
    batch, num_bytes = [], 0
    for piece in pieces[:_MAX_PIECES]:
        batch.append(piece[: _MAX_BYTES - num_bytes])
        num_bytes += batch[-1].nbytes
        if num_bytes >= _MAX_BYTES:
            break
    return batch


def _start_storing(fd: int, num_bytes: int) -> None:
    """Let the disk begin with the last `num_bytes`, so that less is left to wait for; a hint that nothing depends on.

    Pages that are stored already would be dropped from memory, hence the last ones only: they cannot be.
    """
    if num_bytes >= _WORTH_A_HINT and hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, os.lseek(fd, 0, os.SEEK_CUR) - num_bytes, num_bytes, os.POSIX_FADV_DONTNEED)


class Disk:
    """The operations on files and directories; each passes the gate first."""

    def __init__(self, gate: Gate | None = None) -> None:
        self._gate = gate

    def _passes(self, operation: str, path: Path) -> int | None:
        return self._gate(operation, path) if self._gate is not None else None

    def mkdir(self, path: Path) -> None:
        """Make a directory that must not exist yet."""
        self._passes("mkdir", path)
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """Open a new file for writing; it must not exist yet."""
        self._passes("create", path)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)

    def write(self, fd: int, pieces: Sequence[memoryview], path: Path) -> None:
        """Write all of `pieces` one after the other, however little the system takes at a time."""
        rest = [piece for piece in pieces if piece.nbytes]
        while rest:
            limit = self._passes("write", path)
            now = [rest[0][:limit]] if limit is not None else _batch(rest)
            taken = os.writev(fd, now) if hasattr(os, "writev") else os.write(fd, now[0])
            _start_storing(fd, taken)
            while rest and taken >= rest[0].nbytes:
                taken -= rest.pop(0).nbytes
            if taken:
                rest[0] = rest[0][taken:]

    def fsync(self, fd: int, path: Path) -> None:
        """Wait until the file is on the disk."""
        self._passes("fsync", path)
        os.fsync(fd)

    def sync_dir(self, path: Path) -> None:
        """Wait until the names in a directory are on the disk."""
        self._passes("sync_dir", path)
        if os.name == "nt":
            return
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_DIR_SYNC:
                raise
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Give a directory another name; fails where a directory that is not empty has it."""
        self._passes("rename", target)
        os.rename(source, target)

    def replace(self, source: Path, target: Path) -> None:
        """Replace a file by another one, at once."""
        self._passes("replace", target)
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Delete a file."""
        self._passes("unlink", path)
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        """Delete an empty directory."""
        self._passes("rmdir", path)
        os.rmdir(path)

    def names(self, path: Path) -> list[str]:
        """The names in a directory, sorted."""
        self._passes("names", path)
        return sorted(os.listdir(path))

    def open(self, path: Path) -> io.FileIO:
        """Open an existing regular file for reading; links, pipes and devices are refused."""
        self._passes("open", path)
        try:
            fd = os.open(path, os.O_RDONLY | _FOLLOW_NOTHING | getattr(os, "O_BINARY", 0))
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise CheckpointError(f"{path} is a symbolic link, which no checkpoint holds") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise CheckpointError(f"{path} is not a regular file")
        return io.FileIO(fd, "rb")

    def read_into(self, file: io.FileIO, buffer: bytearray, path: Path) -> int:
        """Read the next bytes of an open file; how many, 0 at its end."""
        self._passes("read", path)
        return file.readinto(buffer) or 0

    def read(self, path: Path, limit: int) -> bytes:
        """A whole file of at most `limit` bytes; a larger one is refused before it is read."""
        with self.open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise CheckpointError(f"{path} has {size} bytes; at most {limit} were expected")
            self._passes("read", path)
            return file.readall()

    def lock(self, path: Path) -> int | None:
        """Hold a directory until the returned descriptor is closed; None if it is held, or locks do not work here."""
        self._passes("lock", path)
        try:
            import fcntl
        except ImportError:  # Windows
            return None
        fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        return fd

    def write_file(self, path: Path, data: bytes) -> None:
        """A small new file, complete and on the disk on return."""
        fd = self.create(path)
        try:
            self.write(fd, [memoryview(data)], path)
            self.fsync(fd, path)
        finally:
            os.close(fd)

    def rmtree(self, path: Path) -> None:
        """Delete a directory and what is in it; links are deleted, not followed."""
        if os.path.islink(path):
            self.unlink(path)
            return
        for name in self.names(path):
            child = path / name
            if stat.S_ISDIR(os.lstat(child).st_mode):
                self.rmtree(child)
            else:
                self.unlink(child)
        self.rmdir(path)


DISK = Disk()
"""The disk as it is."""


log = logging.getLogger("trimtab")

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
    """Bytes of all files of a checkpoint, damaged or not; those in the folders of several processes included."""
    try:
        found = {Path(path) / name: os.lstat(Path(path) / name) for name in os.listdir(path)}
        inner = [one for one, info in found.items() if stat.S_ISDIR(info.st_mode)]
        files = [info.st_size for info in found.values()]
        return sum(files) + sum(os.lstat(one / name).st_size for one in inner for name in os.listdir(one))
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
    with in_use(folder), could_not_be("deleted", path):
        disk.rename(path, folder)
        disk.sync_dir(path.parent)
        disk.rmtree(folder)


def quarantine(path: Path, *, disk: Disk = DISK) -> Path:
    """Move a checkpoint to `quarantine/` beside it, where `entries` does not see it; returns where it is now."""
    path = Path(path)
    folder = path.parent / QUARANTINE
    with could_not_be("moved to quarantine", path):
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
    return not is_running(pid)


def is_running(pid: int) -> bool:
    """Whether there is such a process; True where that cannot be known."""
    if os.name == "nt":
        return True  # to ask would be to interrupt it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # somebody else's, or it cannot be known
    return True


def refused(message: str, error: OSError) -> CheckpointError:
    """What the system refused, in words of ours and with its number."""
    ours = CheckpointError(message)
    ours.errno = error.errno
    return ours


@contextlib.contextmanager
def could_not_be(what: str, path: Path) -> Iterator[None]:
    """Raise what the system refuses as a CheckpointError that says what could not be done to `path`."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise refused(f"{path} could not be {what}: {error.strerror or error}", error) from error


@contextlib.contextmanager
def left_behind(path: Path) -> Iterator[None]:
    """Clean up after an error that is being raised: warn about what stays, because that error does not name it."""
    try:
        yield
    except FileNotFoundError:  # nothing stays
        pass
    except OSError as error:
        log.warning("%s is left behind by a write that failed: %s", path, error)


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
            with left_behind(folder):
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
    where = error.filename or final.parent
    return refused(f"{final} could not be saved: {error.strerror or error} ({name}) at {where}{room}; {remedy}", error)


@contextlib.contextmanager
def explaining(what: str) -> Iterator[None]:
    """Whatever goes wrong inside leaves as an error of ours that says what was being done; a decorator, too."""
    try:
        yield
    except TrimtabError:
        raise
    except OSError as error:
        where = f" at {error.filename}" if error.filename else ""
        raise refused(f"{what}: {error.strerror or error}{where}", error) from error
    except MemoryError as error:
        raise CheckpointError(f"{what}: there is not enough memory") from error
    except Exception as error:
        raise CheckpointError(f"{what} ({type(error).__name__}: {str(error)[:500]})") from error
