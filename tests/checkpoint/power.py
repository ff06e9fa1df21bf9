"""What a disk may hold after a power failure: a journal, replayed under several models of what survives."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.checkpoint.directory import Disk

Note = tuple[str, Path, object]

# do names survive that were not synced, and what becomes of contents that were not
MODELS = {
    "nothing unsynced": (False, "lost"),
    "names, empty files": (True, "lost"),
    "names, zeroed files": (True, "zeroed"),
    "contents, no names": (False, "kept"),
    "everything": (True, "kept"),
}


class Journal(Disk):
    """Does everything, and notes what a power failure could undo: operation, path, and the source or the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Note] = []

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self.notes.append(("mkdir", path, None))

    def create(self, path: Path) -> int:
        self.notes.append(("create", path, None))
        return super().create(path)

    def write(self, fd: int, pieces: Sequence[memoryview], path: Path) -> None:
        super().write(fd, pieces, path)
        self.notes.append(("write", path, b"".join(pieces)))

    def fsync(self, fd: int, path: Path) -> None:
        super().fsync(fd, path)
        self.notes.append(("fsync", path, None))

    def sync_dir(self, path: Path) -> None:
        super().sync_dir(path)
        self.notes.append(("sync_dir", path, None))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.notes.append(("rename", target, source))

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        self.notes.append(("rename", target, source))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.notes.append(("unlink", path, None))

    def rmdir(self, path: Path) -> None:
        super().rmdir(path)
        self.notes.append(("unlink", path, None))


@dataclass(eq=False)
class Node:
    """A file (what was written, and how much of it was synced) or a directory (what is in it now, and on the disk)."""

    is_dir: bool
    written: bytes = b""
    synced: bytes = b""
    now: dict[str, Node] = field(default_factory=dict)
    kept: dict[str, Node] = field(default_factory=dict)
    waiting: list[tuple[tuple[Node, str, Node | None], ...]] = field(default_factory=list)


def replay(start: Path, notes: list[Note], target: Path, model: str) -> None:
    """Make `target` what may be left of `start` when the power fails right after the last of `notes`."""
    names, contents = MODELS[model]
    root = _load(start)

    def at(path: Path) -> Node:
        node = root
        for part in path.relative_to(target).parts:
            node = node.now[part]
        return node

    def change(*links: tuple[Node, str, Node | None]) -> None:
        for folder, name, node in links:
            folder.now.pop(name, None)
            if node is not None:
                folder.now[name] = node
        for folder in {id(link[0]): link[0] for link in links}.values():
            folder.waiting.append(links)

    for operation, path, about in notes:
        if operation in ("mkdir", "create"):
            change((at(path.parent), path.name, Node(operation == "mkdir")))
        elif operation == "write":
            assert isinstance(about, bytes)
            at(path).written += about
        elif operation == "fsync":
            at(path).synced = at(path).written
        elif operation == "unlink":
            change((at(path.parent), path.name, None))
        elif operation == "rename":
            assert isinstance(about, Path)
            change((at(about.parent), about.name, None), (at(path.parent), path.name, at(about)))
        elif operation == "sync_dir":
            _settle(at(path))
    shutil.rmtree(target)
    _store(root, target, names, contents)


def _settle(folder: Node) -> None:
    """A synced directory has its changes on the disk; one that concerns two directories is there in both."""
    for links in folder.waiting:
        for where, name, node in links:
            where.kept.pop(name, None)
            if node is not None:
                where.kept[name] = node
            if where is not folder and links in where.waiting:
                where.waiting.remove(links)
    folder.waiting.clear()


def _load(path: Path) -> Node:
    if not path.is_dir():
        return Node(False, path.read_bytes(), path.read_bytes())
    inside = {child.name: _load(child) for child in path.iterdir()}
    return Node(True, now=dict(inside), kept=dict(inside))


def _store(node: Node, path: Path, names: bool, contents: str) -> None:
    if node.is_dir:
        path.mkdir()
        for name, child in (node.now if names else node.kept).items():
            _store(child, path / name, names, contents)
        return
    zeroed = node.synced + bytes(len(node.written) - len(node.synced))
    path.write_bytes({"lost": node.synced, "zeroed": zeroed, "kept": node.written}[contents])
