"""A checkpoint is one directory: written so that at every moment it is wholly there or not at all, read and verified so
that damage is named, and judged in the one file that changes.

The tensor files are written here and not by `safetensors.torch.save_file`, because they are hashed while they are
written: 500 MB take 0.8 s instead of 1.7 s (2,000 small tensors: 66 ms instead of 123 ms; two CPU cores, safetensors
0.8.0), and safetensors 0.5 needs 477 MB for a second copy. The library cannot stream tensors from a device one by one,
nor pass each write through the gate with which tests fail, shorten and kill every operation of a save.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple, TypedDict, Unpack

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trimtab.checkpoint.directory import (
    DISK,
    HOST,
    Disk,
    clean,
    could_not_be,
    explained,
    explaining,
    left_behind,
    make_parents,
    quarantine,
    remove,
    size_of,
    temporary,
)
from trimtab.checkpoint.format import manifest, tree
from trimtab.checkpoint.format.manifest import (
    MANIFEST,
    MARKER,
    MAX_JSON,
    STATUS,
    Contents,
    Damage,
    Manifest,
    Section,
    Status,
    Stored,
    Written,
    damage_of_status,
    decode_status,
    encode_status,
    memory_for,
    parse_json,
)
from trimtab.checkpoint.format.tensors import SAFE_NAMES, Json, flat
from trimtab.core.errors import CheckpointError
from trimtab.core.files import json_memory

_MARKER_BYTES = 65
_SIMILAR = 8


@explaining("the checkpoint could not be read")
def read(path: Path, *, verify: bool = True, sections: Collection[str] | None = None, disk: Disk = DISK) -> Contents:
    """Read a checkpoint, or only some `sections` of it; CheckpointError names every damaged file.

    With `verify`, marker, manifest, sizes and the SHA-256 of every file that is needed are checked before anything is
    handed out. Without, only what costs nothing is. Tensors are mapped from the files: they may be changed (the file is
    not), and their values are read from the disk when they are first needed.
    """
    path = Path(path)
    found = inspect(path, disk=disk)
    wanted = dict(found.sections) if sections is None else {name: _section(found, name, path) for name in sections}
    if verify:
        damages = _damages(path, wanted, disk)
        if damages:
            raise _damaged(path, damages)
    state = {name: _load(path, section) for name, section in wanted.items()}
    return Contents(manifest=found, sections=state, status=get_status(path, disk=disk))


def inspect(path: Path, *, disk: Disk = DISK) -> Manifest:
    """The manifest of a checkpoint whose marker, manifest and file sizes are right; CheckpointError otherwise."""
    path = Path(path)
    found, damages = look_at(path, disk=disk)
    if found is None or damages:
        raise _damaged(path, damages)
    return found


def look_at(path: Path, *, disk: Disk = DISK) -> tuple[Manifest | None, tuple[Damage, ...]]:
    """The manifest, if marker and manifest are right, and what is damaged by the sizes of the files."""
    found, damages = _manifest(Path(path), disk)
    if found is None:
        return None, tuple(damages)
    checked = (check_file(Path(path), section, disk, deep=False) for section in found.sections.values())
    damages = [damage for damage in checked if damage is not None]
    for rank in range(len(found.ranks)):
        damages += _damages_of_rank(Path(path), found, rank, disk, deep=False)
    return found, tuple(damages)


def damage_of(path: Path, *, disk: Disk = DISK) -> tuple[Damage, ...]:
    """Everything that is wrong with a checkpoint, after reading all of it; empty for a sound one."""
    path = Path(path)
    found, damages = _manifest(path, disk)
    if found is not None:
        damages += _damages(path, found.sections, disk)
        for rank in range(len(found.ranks)):
            damages += _damages_of_rank(path, found, rank, disk, deep=True)
    try:
        if lost := damage_of_status(disk.read(path / STATUS, MAX_JSON)):
            damages.append(Damage(file=STATUS, what=lost))
    except OSError as error:
        damages.append(Damage(file=STATUS, what=reason_of(error, path / STATUS)))
    return tuple(damages)


def damage_of_rank(path: Path, found: Manifest, rank: int, *, disk: Disk = DISK) -> list[Damage]:
    """What is wrong with what one process wrote of a checkpoint, after reading all of it."""
    return _damages_of_rank(Path(path), found, rank, disk, deep=True)


def _damages_of_rank(path: Path, found: Manifest, rank: int, disk: Disk, *, deep: bool) -> list[Damage]:
    name = manifest.rank_folder(rank)
    part, damages = _manifest(path / name, disk)
    if part is not None:
        if part.digest != found.ranks[rank]:
            damages.append(Damage(file=MANIFEST, what="is not the one that belongs to this checkpoint"))
        elif deep:
            damages += _damages(path / name, part.sections, disk)
        else:
            checked = (check_file(path / name, section, disk, deep=False) for section in part.sections.values())
            damages += [damage for damage in checked if damage is not None]
    return [Damage(file=name if one.file == "." else f"{name}/{one.file}", what=one.what) for one in damages]


def _manifest(path: Path, disk: Disk) -> tuple[Manifest | None, list[Damage]]:
    if not os.path.isdir(path):
        what = "is no directory" if os.path.lexists(path) else "does not exist"
        return None, [Damage(file=".", what=what)]
    files: dict[str, bytes] = {}
    damages = []
    for name, limit in ((MARKER, _MARKER_BYTES), (MANIFEST, MAX_JSON)):
        try:
            files[name] = disk.read(path / name, limit)
        except OSError as error:
            damages.append(Damage(file=name, what=reason_of(error, path / name)))
    if damages:
        return None, damages
    digest = manifest.digest_of(files[MANIFEST])
    blamed = _blame(files[MARKER], digest)
    if blamed is not None:
        return None, [blamed]
    try:
        return manifest.parse(files[MANIFEST], digest, size_of(path)), []
    except CheckpointError as error:
        return None, [Damage(file=MANIFEST, what=str(error))]


def _blame(marker: bytes, digest: str) -> Damage | None:
    """Which of the two is damaged, if they differ: a changed manifest has a wholly different digest."""
    if marker == f"{digest}\n".encode():
        return None
    text = marker.decode("latin-1").rstrip("\n")
    same = sum(a == b for a, b in zip(text, digest, strict=False))
    if len(marker) != _MARKER_BYTES or same >= len(digest) - _SIMILAR or not manifest.is_digest(text):
        return Damage(file=MARKER, what="is not the SHA-256 that was written")
    return Damage(file=MANIFEST, what=f"its SHA-256 is {digest[:12]}…; {MARKER} has {text[:12]}…")


def _damages(path: Path, sections: Mapping[str, Section], disk: Disk) -> list[Damage]:
    filed = [section for section in sections.values() if section.file is not None]
    if not filed:
        return []
    with ThreadPoolExecutor(min(len(filed), os.cpu_count() or 1)) as pool:
        found = pool.map(lambda section: check_file(path, section, disk, deep=True), filed)
        return [damage for damage in found if damage is not None]


def _load(path: Path, section: Section) -> object:
    tensors: dict[str, Tensor] = {}
    if section.file is not None:
        try:
            check_header(path, section)
            with torch.device("cpu"):  # older releases of safetensors follow the default device
                tensors = load_file(path / section.file)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise _damaged(path, [Damage(file=section.file, what=str(error)[:300])]) from error
    try:
        return tree.unflatten(section.tree, tensors)
    except CheckpointError as error:
        raise _damaged(path, [Damage(file=MANIFEST, what=str(error))]) from error


def _section(found: Manifest, name: str, path: Path) -> Section:
    if name not in found.sections:
        raise CheckpointError(f"{path} has no section {name!r}; it has {', '.join(found.sections) or 'none'}")
    return found.sections[name]


def _damaged(path: Path, damages: Collection[Damage]) -> CheckpointError:
    found = "; ".join(map(str, damages))
    return CheckpointError(f"{path} cannot be used: {found}; use another checkpoint (nothing was loaded)")


log = logging.getLogger("trimtab")


def write(
    parent: Path,
    name: str,
    sections: Mapping[str, object],
    *,
    step: int,
    branch: int = 0,
    run: str = "",
    sequence: int = 0,
    history: Sequence[int] = (),
    meta: Mapping[str, object] | None = None,
    status: str = "candidate",
    reason: str = "",
    disk: Disk = DISK,
) -> Written:
    """Write `sections` as the checkpoint `parent/name`; it is on the disk when this returns.

    The values must not change meanwhile. On any error CheckpointError says which file and why, and everything that was
    there before is as it was. A name that exists is refused, unless what is there is damaged: that goes to quarantine.
    `run`, `sequence` and `history` are what a `Checkpointer` orders by.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from trimtab.checkpoint.format import container
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     done = container.write(Path(folder), "step-00000005", {"model": {"w": torch.ones(2)}}, step=5)
        ...     container.read(done.path).sections["model"]
        {'w': tensor([1., 1.])}
    """
    head: dict[str, Json] = {"step": step, "branch": branch, "run": run, "sequence": sequence, "history": list(history)}
    described = _describe(sections, head, meta or {})
    state = encode_status(status, reason)
    needed = sum(num_bytes_of(each) for each in described.tensors.values())
    with unfinished(parent, name, needed=needed, disk=disk) as folder:
        digest, num_bytes = _fill(folder, described, state, disk)
    return Written(path=Path(parent) / name, digest=digest, num_bytes=num_bytes)


@contextlib.contextmanager
def unfinished(parent: Path, name: str, *, needed: int = 0, disk: Disk = DISK) -> Iterator[Path]:
    """A folder to fill that is the checkpoint `parent/name` afterwards, on the disk; gone if anything fails meanwhile.

    `needed` is how many bytes it takes, for the message where there is no room for them.
    """
    parent = Path(parent)
    final = parent / name
    if not name or Path(name).name != name or name.startswith("."):
        raise CheckpointError(f"{name!r} is no name for a checkpoint: use one such as 'step-00000500'")
    try:
        make_parents(parent, disk)
        _make_way(final, disk)
        with temporary(parent, name, disk) as folder:
            yield folder
            disk.rename(folder, final)
            try:
                disk.sync_dir(parent)
            except BaseException:  # what may be gone after a power failure must not look saved
                with left_behind(final):
                    disk.rename(final, folder)
                raise
    except CheckpointError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and os.path.lexists(final):
            raise _taken(final) from error  # somebody else was faster
        raise explained(error, final, needed) from error


def commit(
    folder: Path,
    sections: Mapping[str, object],
    ranks: Sequence[Written],
    *,
    step: int,
    branch: int = 0,
    run: str = "",
    sequence: int = 0,
    history: Sequence[int] = (),
    meta: Mapping[str, object] | None = None,
    status: str = "candidate",
    reason: str = "",
    disk: Disk = DISK,
) -> None:
    """Make one checkpoint of those that several processes wrote into `folder`: manifest, status, and last the marker.

    The manifest holds the digest of each, so that none of them can be exchanged or lost without being noticed.
    """
    head: dict[str, Json] = {"step": step, "branch": branch, "run": run, "sequence": sequence, "history": list(history)}
    head["ranks"] = [one.digest for one in ranks]
    described = _describe(sections, head, meta or {})
    _fill(folder, described, encode_status(status, reason), disk, sum(one.num_bytes for one in ranks))


class _Description(NamedTuple):
    """The manifest without what is known only when the files are written, and the tensors of each section."""

    head: dict[str, Json]
    trees: dict[str, Json]
    meta: Json
    tensors: dict[str, dict[str, Tensor]]


def _describe(sections: Mapping[str, object], head: dict[str, Json], meta: Mapping[str, object]) -> _Description:
    trees: dict[str, Json] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for section, state in sections.items():
        manifest.file_of(section)
        trees[section], found = tree.flatten(state, section)
        tensors[section] = in_file_order(found)
    notes, strangers = tree.flatten(dict(meta), "meta")
    if strangers:
        raise CheckpointError(f"meta.{next(iter(strangers))} holds a tensor or an array: those belong into a section")
    head = {"format": manifest.FORMAT, **head, "created": max(time.time(), 0.0)}
    return _Description({**head, "writer": f"pid {os.getpid()} on {HOST}"}, trees, notes, tensors)


def _fill(folder: Path, described: _Description, state: bytes, disk: Disk, more: int = 0) -> tuple[str, int]:
    """`more` are bytes that are in the folder already and belong to it."""
    files: dict[str, TensorFile] = {}
    try:
        for name, found in described.tensors.items():
            if found:
                files[name] = TensorFile(found)
        for name, file in files.items():
            file.write(folder / manifest.file_of(name), disk)
        for file in files.values():  # only now: the disk has been at work on them meanwhile
            file.sync(disk)
    except BaseException:
        for file in files.values():
            file.give_up()
        raise
    sums = {name: (file.num_bytes, *file.finish()) for name, file in files.items()}
    sections: dict[str, Json] = {}
    for name, skeleton in described.trees.items():
        num_bytes, sha256, marks = sums.get(name, (0, "", {"": ""}))
        section = Section(
            tree=skeleton,
            file=manifest.file_of(name) if name in sums else None,
            num_bytes=num_bytes,
            sha256=sha256,
            header=marks[""],
            tensors=table_of(described.tensors[name], marks),
        )
        sections[name] = manifest.encode_section(section)
    body = {**described.head, "sections": sections, "meta": described.meta}
    data = manifest.dump(body, more + sum(file.num_bytes for file in files.values()))
    digest = manifest.digest_of(data)
    disk.write_file(folder / MANIFEST, data)
    disk.write_file(folder / STATUS, state)
    disk.write_file(folder / MARKER, f"{digest}\n".encode())
    disk.sync_dir(folder)
    return digest, len(data) + sum(file.num_bytes for file in files.values())


def _make_way(final: Path, disk: Disk) -> None:
    """See to it that nobody has the name; what is damaged beyond use is moved to quarantine."""
    if not os.path.lexists(final):
        return
    damages = unusable(final, disk=disk)
    if not damages:
        raise _taken(final)
    moved = quarantine(final, disk=disk)
    log.warning("%s is damaged (%s): moved to %s, and saved again", final, damages[0], moved)


def _taken(final: Path) -> CheckpointError:
    owner = ""
    with contextlib.suppress(CheckpointError):
        owner = f", written by {inspect(final).writer}"
    return CheckpointError(
        f"{final} exists already{owner}: nothing was changed; "
        "do two runs save to one directory? Give each its own, or remove that checkpoint first"
    )


_MAX_BYTES = 1 << 20


def get_status(path: Path, *, disk: Disk = DISK) -> Status:
    """What is thought of the checkpoint at `path`; `bad`, and not `known`, where that cannot be read."""
    file = Path(path) / STATUS
    try:
        return decode_status(disk.read(file, _MAX_BYTES))
    except OSError as error:
        why = reason_of(error, file).removeprefix(f"{STATUS} ")
        return Status(state="bad", reason=f"{STATUS} {why}: whether it was condemned is not known", known=False)


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
    with could_not_be(f"marked {state}", path):
        try:
            disk.write_file(fresh, data)
            disk.replace(fresh, path / STATUS)
        except BaseException:
            with left_behind(fresh):
                disk.unlink(fresh)
            raise
        disk.sync_dir(path)


_BLOCK = 1 << 20


def check_file(path: Path, section: Section, disk: Disk, *, deep: bool) -> Damage | None:
    """What is wrong with the file of `section`; with `deep`, all of it is read."""
    if section.file is None:
        return None
    file = path / section.file
    try:
        info = os.lstat(file)
        if not stat.S_ISREG(info.st_mode):
            return Damage(file=section.file, what="is not a regular file")
        if info.st_size != section.num_bytes:
            what = f"has {info.st_size} bytes instead of {section.num_bytes}"
            return Damage(file=section.file, what=what + _cut(section, info.st_size))
        if deep and _sha256(file, disk) != section.sha256:
            return Damage(file=section.file, what=_first_difference(file, section, disk))
    except OSError as error:
        return Damage(file=section.file, what=reason_of(error, file))
    return None


def check_header(path: Path, section: Section) -> None:
    """Compare the table at the beginning of a tensor file with the manifest, before anything trusts it."""
    with DISK.open(path / str(section.file)) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_JSON, section.num_bytes):
            raise CheckpointError(f"declares a header of {length} bytes in a file of {section.num_bytes}")
        header = parse_json(file.read(length), "its header", section.num_bytes)
    header.pop("__metadata__", None)
    for key, item in section.tensors.items():
        found = header.pop(key, None)
        if not isinstance(found, dict) or (found.get("dtype"), found.get("shape")) != (item.dtype, item.shape):
            raise CheckpointError(f"tensor {key[:80]!r} should be {item.dtype} {item.shape}, its header says {found}")
    if header:
        raise CheckpointError(f"holds tensor {next(iter(header))[:80]!r}, which the manifest does not know")


def reason_of(error: OSError, path: Path) -> str:
    """Why a file cannot be read, without repeating its path."""
    if error.errno == errno.ENOENT:
        return "is missing"
    if error.strerror:
        return f"cannot be read: {error.strerror}"
    return str(error).removeprefix(f"{path} ")


def _sha256(file: Path, disk: Disk) -> str:
    digest = hashlib.sha256()
    for block in _blocks(file, disk):
        digest.update(block)
    return digest.hexdigest()


def _blocks(file: Path, disk: Disk) -> Iterator[memoryview]:
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    with disk.open(file) as opened:
        while count := disk.read_into(opened, buffer, file):
            yield view[:count]


def _ends(section: Section) -> Iterator[tuple[str, int, str]]:
    """Name, end in the file, and mark: of the header, then of each tensor."""
    end = section.num_bytes - sum(item.num_bytes for item in section.tensors.values())
    yield "the header", end, section.header
    for key, item in section.tensors.items():
        end += item.num_bytes
        yield f"tensor {key!r}", end, item.mark


def _first_difference(file: Path, section: Section, disk: Disk) -> str:
    """The hash was noted at the end of each tensor, so the first note that differs shows where the damage begins."""
    digest, position = hashlib.sha256(), 0
    ends = _ends(section)
    name, end, mark = next(ends)
    for block in _blocks(file, disk):
        while len(block) >= end - position:
            digest.update(block[: end - position])
            block, position = block[end - position :], end
            if digest.copy().hexdigest()[:16] != mark:
                return f"{name} is not what was written (the SHA-256 differs)"
            following = next(ends, None)
            if following is None:
                break
            name, end, mark = following
        digest.update(block)
        position += len(block)
    return "the SHA-256 differs from the manifest's"


def _cut(section: Section, size: int) -> str:
    first = next((name for name, end, _ in _ends(section) if end > size), None)
    return f": {first} is cut off" if first is not None else ""


_ON_THE_WAY = 8  # copies from a device that may wait to be hashed

_Item = tuple[str, memoryview]


def in_file_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Widest dtypes first, as safetensors does it, so that every tensor is aligned."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def header_of(tensors: Mapping[str, Tensor]) -> bytes:
    """The length and the JSON that a safetensors file begins with, for tensors in this order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[key] = {"dtype": SAFE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    if len(text) > MAX_JSON or json_memory(text) > memory_for(num_bytes_of(tensors)):
        raise CheckpointError(
            f"the names of {len(tensors)} tensors take {len(text)} bytes, more than is read back: store fewer of them"
        )
    return len(text).to_bytes(8, "little") + text


class TensorFile:
    """A safetensors file to be: hashed on a thread of its own (hashlib lets go of the interpreter) while it is written.

    Hashing begins at once, for all the files of a checkpoint, and goes on while the disk is waited for. Nothing is
    copied but what is on another device, so nobody may change the values meanwhile.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._header = header_of(tensors)
        self.num_bytes = len(self._header) + num_bytes_of(tensors)
        self._local = all(tensor.device.type == "cpu" for tensor in tensors.values())
        self._queue: queue.Queue[_Item | None] = queue.Queue(0 if self._local else _ON_THE_WAY)
        self._digest = hashlib.sha256()
        self._marks: dict[str, str] = {}
        self._given_up = False
        self._path = Path()
        self._fd: int | None = None
        self._thread = threading.Thread(target=self._hash, name="trimtab-sha256", daemon=True)
        self._thread.start()
        self._queue.put(("", memoryview(self._header)))
        self._items = list(_views(tensors)) if self._local else []
        for item in self._items:
            self._queue.put(item)

    def write(self, path: Path, disk: Disk) -> None:
        """Hand all of it to the system, which may begin to store it."""
        self._path, self._fd = path, (fd := disk.create(path))
        if self._local:
            disk.write(fd, [memoryview(self._header), *(data for _, data in self._items)], path)
        else:
            disk.write(fd, [memoryview(self._header)], path)
            for item in _views(self._tensors):  # one copy at a time
                self._queue.put(item)
                disk.write(fd, [item[1]], path)

    def sync(self, disk: Disk) -> None:
        """Wait until it is stored."""
        assert self._fd is not None
        disk.fsync(self._fd, self._path)
        self._close()

    def finish(self) -> tuple[str, dict[str, str]]:
        """Wait for the SHA-256 of the file; it comes with how it began after the header and after each tensor."""
        self._queue.put(None)
        self._thread.join()
        return self._digest.hexdigest(), self._marks

    def give_up(self) -> None:
        """End the thread without an answer."""
        self._given_up = True
        self._close()
        self.finish()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _hash(self) -> None:
        while (item := self._queue.get()) is not None:
            key, data = item
            if not self._given_up:
                self._digest.update(data)
                self._marks[key] = self._digest.copy().hexdigest()[:16]


def _views(tensors: Mapping[str, Tensor]) -> Iterator[_Item]:
    for key, tensor in tensors.items():
        data = flat(tensor.detach().cpu()).view(torch.uint8)
        yield key, memoryview(data.numpy())  # type: ignore[arg-type]  # an array is a buffer


def table_of(tensors: Mapping[str, Tensor], marks: Mapping[str, str]) -> dict[str, Stored]:
    """What the manifest says about the tensors of a file."""
    return {key: Stored(SAFE_NAMES[t.dtype], list(t.shape), marks[key]) for key, t in tensors.items()}


def num_bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of all values."""
    return sum(tensor.nbytes for tensor in tensors.values())


class _About(TypedDict, total=False):
    """What is stored beside the sections of a checkpoint under a name of its own."""

    meta: Mapping[str, object]
    status: str
    reason: str


def replace_with(
    path: Path, sections: Mapping[str, object], *, disk: Disk = DISK, step: int, **about: Unpack[_About]
) -> None:
    """Write `sections` as the checkpoint `path`, replacing the one that is there.

    The new one is written beside it (`name~new`), made durable, read again, and only then takes the name; until that is
    durable too, the old one stays as `name~old`. Whatever kills the process, `candidates` finds a whole one.
    """
    check_place(path)
    fresh, old = beside(path)
    try:
        settle(path, disk=disk)
        clean(path.parent, disk=disk)
        write(path.parent, fresh.name, sections, step=step, disk=disk, **about)
        if damages := damage_of(fresh, disk=disk):
            remove(fresh, disk=disk)
            raise CheckpointError(
                f"{path} was not saved: read again, it is not what was written ({damages[0]}); the disk or the memory "
                "fails; the earlier checkpoint is as it was: save to another disk"
            )
        _swap(fresh, path, old, disk)
    except CheckpointError:
        raise
    except OSError as error:
        raise explained(error, path) from error


def candidates(path: Path) -> Iterator[Path]:
    """Where the checkpoint `path` may be: under its own name, or where a killed save left it."""
    for _ in range(2):  # a save that ends meanwhile moves it from one place to the next
        here = [one for one in (path, *beside(path)) if os.path.lexists(one)]
        yield from here
        if here:
            return


def beside(path: Path) -> tuple[Path, Path]:
    """Where a new one is written, and where the old one is kept meanwhile."""
    return path.with_name(f"{path.name}~new"), path.with_name(f"{path.name}~old")


def settle(path: Path, *, disk: Disk = DISK) -> None:
    """Put right what a killed save left: the first sound one gets the name, the rest go."""
    left = [one for one in beside(path) if os.path.lexists(one)]
    if not left:
        return
    sound = next((one for one in (path, *left) if not unusable(one, disk=disk)), None)
    if sound is None:
        for one in left:
            quarantine(one, disk=disk)  # nothing to go back to: only out of the way
        return
    if sound != path:
        if os.path.lexists(path):
            quarantine(path, disk=disk)
        disk.rename(sound, path)
        disk.sync_dir(path.parent)
        log.warning("an earlier save of %s was cut short: %s is taken for it", path, sound.name)
    for one in left:
        if os.path.lexists(one):
            remove(one, disk=disk)


def check_place(path: Path) -> None:
    """Refuse a path under which something else lives than a checkpoint: it would be replaced."""
    if not path.name or path.name.startswith("."):
        raise CheckpointError(f"{str(path)!r} is no name for a checkpoint: give one such as 'best' or 'out/best'")
    if path.is_dir():
        names = set(os.listdir(path))
        if names and not names & {MANIFEST, MARKER}:
            raise CheckpointError(
                f"{path} is a folder with other things in it ({', '.join(sorted(names)[:3])}), and a checkpoint takes "
                f"the place of what has its name: give a name inside it, such as {path / 'best'}"
            )
        if not names:
            path.rmdir()
    elif os.path.lexists(path):
        raise CheckpointError(f"{path} is a file, and a checkpoint is a folder: give another name, or remove that file")


def unusable(path: Path, *, disk: Disk = DISK) -> list[Damage]:
    """What makes a checkpoint unusable; a lost status is only a lost opinion."""
    return [damage for damage in damage_of(path, disk=disk) if damage.file != STATUS]


def _swap(fresh: Path, path: Path, old: Path, disk: Disk) -> None:
    if not os.path.lexists(path):
        disk.rename(fresh, path)
        disk.sync_dir(path.parent)
        return
    disk.rename(path, old)
    try:
        disk.sync_dir(path.parent)
        disk.rename(fresh, path)
    except BaseException:
        disk.rename(old, path)
        raise
    disk.sync_dir(path.parent)
    try:
        remove(old, disk=disk)
    except OSError as error:  # the new one is saved: that is what counts
        log.warning("%s could not be deleted: %s; the next save will try again", old, error)
