"""Every file-system operation that checkpoints are made of, through one gate.

A test gives `Disk` a gate and with it kills, fails, shortens or slows the Nth operation of a save, for every N.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from trimtab.core.errors import CheckpointError

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
        """Put a file in the place of another one, at once."""
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
