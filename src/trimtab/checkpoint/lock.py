"""One writer per folder of checkpoints: a second one is refused, with the name of the first.

The lock is the operating system's (flock): it ends with the process that holds it, however that ends, so a crash leaves
nothing behind that somebody would have to clear. Who only reads needs no lock. Within one process a new writer takes
over from one that is idle and no guard's, such as the object of an earlier cell of a notebook, and that one is refused
from then on. The file says who holds the lock:

    {"pid": 4242, "host": "node7", "since": 1767225600.0, "run": "20260101-000000-3fa9", "boot": "…", "started": 123}
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import os
import stat
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from trimtab.checkpoint.directory import HOST, explained, is_running
from trimtab.core.errors import CheckpointError
from trimtab.core.printable import printable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("trimtab")

LOCK = ".writer"
_MAX_BYTES = 4096
_BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()
_guard = threading.RLock()  # held while a lock is taken: a fork in between would inherit a lock that nobody knows of


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Who writes to a folder; `boot` and `started` distinguish it from a later process of the same number."""

    pid: int
    host: str
    since: float
    run: str = ""
    boot: str = ""
    started: int = 0

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).isoformat(sep=" ", timespec="seconds")
        return f"pid {self.pid} on {self.host}, since {since}" + (f", run {self.run}" if self.run else "")


class FolderLock:
    """The right to write to a folder, once taken; it ends by `release`, with this object, or with the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)
        self._fd: int | None = None
        self._file: tuple[int, int] | None = None
        self._since = 0.0
        self._writing = 0
        self._claimed = self._displaced = False
        self._closing: weakref.finalize[[int], FolderLock] | None = None

    def __reduce__(self) -> tuple[type[FolderLock], tuple[Path]]:
        return FolderLock, (self._folder,)  # a copy, or another process, holds nothing

    @property
    def held(self) -> bool:
        """Whether this object has the lock, on the file that is there now: a folder may be deleted and made again."""
        if self._fd is None:
            return False
        try:
            return _identity(os.stat(self._folder / LOCK, follow_symlinks=False)) == self._file
        except OSError:
            return False

    def take(self, run: str, *, claim: bool = False) -> None:
        """Take the lock for a run, or raise a CheckpointError that names the writer who has it.

        With `claim`, nobody in this process takes it over either, until it is released.
        """
        try:
            with _guard:
                if not self.held:
                    self._let_go()
                    self._acquire(run)
                self._claimed = self._claimed or claim
                self._note_writer(run)
        except CheckpointError:
            raise
        except OSError as error:
            raise explained(error, self._folder) from error

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """While this lasts, nobody in this process takes it over."""
        with _guard:
            if self._fd is None:
                raise refusal(self._folder, writer_of(self._folder))
            self._writing += 1
        try:
            yield
        finally:
            with _guard:
                self._writing -= 1

    def release(self) -> None:
        """Let others write. Releasing what is not held is harmless."""
        with _guard:
            self._claimed = self._displaced = False
            self._let_go()

    def _acquire(self, run: str) -> None:
        """Take it where it is free; else from whoever in this process has no more use for it."""
        if self._try():
            return
        gc.collect()  # an object that nobody can reach any more may still hold it
        if self._try():
            return
        idle = next((one for one in list(_held) if one._is_idle(self._folder)), None)
        if idle is not None and not self._displaced:
            idle._displaced = True
            idle._let_go()
            log.info("%s is taken over from another Checkpointer of this process, by run %s", self._folder, run)
            if self._try():
                return
        raise refusal(self._folder, writer_of(self._folder))

    def _is_idle(self, folder: Path) -> bool:
        same = self._file == _identity(os.stat(folder / LOCK, follow_symlinks=False))
        return same and not self._claimed and not self._writing

    def _let_go(self) -> None:
        fd, closing = self._fd, self._closing
        self._fd = self._file = self._closing = None
        _held.discard(self)
        if fd is not None and closing is not None and closing.detach() is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
            os.close(fd)

    def forget(self) -> None:
        """In a forked child: the lock is the parent's, and stays so when this descriptor is closed."""
        fd, closing = self._fd, self._closing
        self._fd = self._file = self._closing = None
        self._writing, self._claimed, self._displaced = 0, False, False
        if fd is not None and closing is not None and closing.detach() is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _try(self) -> bool:
        for _ in range(10):  # whoever deletes the file between opening and locking it makes us begin again
            fd = _open(self._folder / LOCK)
            try:
                works = _locked(fd)
                if works is False or (works is None and self._taken_by_another(fd)):
                    os.close(fd)
                    return False
                file = _identity(os.fstat(fd))
                if _identity(os.stat(self._folder / LOCK, follow_symlinks=False)) != file:
                    os.close(fd)
                    continue
            except FileNotFoundError:
                os.close(fd)
                continue
            except BaseException:
                os.close(fd)
                raise
            self._note_former(works is not None)
            self._fd, self._file, self._since = fd, file, time.time()
            self._closing = weakref.finalize(self, os.close, fd)
            self._closing.atexit = False  # the system frees it then
            _held.add(self)
            return True
        raise CheckpointError(f"{self._folder / LOCK} is being deleted again and again: another program clears it")

    def _taken_by_another(self, fd: int) -> bool:
        """Where locks do not work: whether the writer on record is known to be alive."""
        file = _identity(os.fstat(fd))
        if any(one._file == file for one in list(_held)):
            return True
        former = writer_of(self._folder)
        return former is not None and former.pid != os.getpid() and is_alive(former) is True

    def _note_former(self, works: bool) -> None:
        former = writer_of(self._folder)
        if not works:
            last = f"; the last one on record is {former}" if former is not None else ""
            log.warning(
                "the file system of %s has no locks: make sure that no other run writes there%s", self._folder, last
            )
        elif former is not None:
            log.info("%s was left by a run that ended without closing it (%s)", self._folder, former)

    def _note_writer(self, run: str) -> None:
        """Put on record who we are; where that fails (a full disk, somebody else's file) the lock still holds."""
        if self._fd is None:
            return
        me = Writer(pid=os.getpid(), host=HOST, since=self._since, run=run, boot=_boot(), started=_started("self"))
        data = json.dumps(asdict(me)).encode() + b"\n"
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, data, 0)


def writer_of(folder: Path) -> Writer | None:
    """Who is on record as writing to a folder, or was when it ended; None where nobody is. Needs no lock."""
    try:
        fd = os.open(Path(folder) / LOCK, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        try:
            data = os.read(fd, _MAX_BYTES)
        finally:
            os.close(fd)
        found = json.loads(data)
        return Writer(
            pid=int(found["pid"]),
            host=printable(found["host"], one_line=True)[:100],
            since=min(max(float(found["since"]), 0.0), 253_402_300_799.0),
            run=printable(found["run"], one_line=True)[:100],
            boot=str(found["boot"])[:100],
            started=int(found["started"]),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def refusal(folder: Path, writer: Writer | None) -> CheckpointError:
    """The error for a second writer."""
    if writer is None:
        owner = "another run, which does not say who it is"
    elif writer.pid == os.getpid() and writer.host == HOST:
        owner = f"another Checkpointer or Guard of this process ({writer}): use that one, or close() it first"
    else:
        owner = f"another run ({writer})"
    several = (
        f"; of several processes each needs a folder of its own, such as {folder / ('rank' + os.environ['RANK'])}"
        if os.environ.get("RANK", "").isdigit()
        else ""
    )
    return CheckpointError(
        f"checkpoints cannot be saved to {folder}: it is in use by {owner}. Two writers in one folder would mix up "
        f"their checkpoints; wait until it ends, or give this run another folder{several}"
    )


def is_alive(writer: Writer) -> bool | None:
    """Whether a writer's process runs; None where that cannot be known, as on another machine."""
    if writer.host != HOST or os.name == "nt":
        return None
    if writer.boot and _boot() and writer.boot != _boot():
        return False  # the machine was started again since
    if not is_running(writer.pid):
        return False
    started = _started(str(writer.pid))
    return not (started and writer.started and started != writer.started)


def _open(path: Path) -> int:
    """The lock file, for writing where that is allowed: to lock it, reading is enough on most file systems."""
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is a symbolic link; it should be a file of trimtab's: remove it") from error
        if error.errno not in _DENIED or not os.path.lexists(path):
            raise
        fd = os.open(path, os.O_RDONLY | flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{path} is not a regular file; it should be one of trimtab's: remove it")
    return fd


def _locked(fd: int) -> bool | None:
    """Whether the lock was free, and is ours now; None where the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _BUSY else None
    return True


def _identity(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


def _boot() -> str:
    """An id of this start of the machine; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: str) -> int:
    """When a process was started, in ticks since the machine was; 0 where that cannot be known."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _after_fork() -> None:
    for lock in list(_held):
        lock.forget()
    _held.clear()
    _guard.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_after_fork)
