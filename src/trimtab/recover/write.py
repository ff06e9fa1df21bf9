"""Writes a checkpoint so that at every moment it is either wholly there or not there at all."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab.core.errors import CheckpointError
from trimtab.recover import manifest, stream, tree
from trimtab.recover.disk import DISK, Disk
from trimtab.recover.house import HOST, move_away, quarantine, temporary
from trimtab.recover.manifest import MANIFEST, MARKER, STATUS, Section, Written
from trimtab.recover.prepare import explained, make_parents
from trimtab.recover.read import damage_of, inspect
from trimtab.recover.status import encode_status
from trimtab.recover.tensors import Json

log = logging.getLogger("trimtab.recover")


def write(
    parent: Path,
    name: str,
    sections: Mapping[str, Any],
    *,
    step: int,
    branch: int = 0,
    run: str = "",
    sequence: int = 0,
    history: Sequence[int] = (),
    meta: Mapping[str, Any] | None = None,
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
        >>> from trimtab.recover import container
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     done = container.write(Path(folder), "step-00000005", {"model": {"w": torch.ones(2)}}, step=5)
        ...     container.read(done.path).sections["model"]
        {'w': tensor([1., 1.])}
    """
    parent = Path(parent)
    final = parent / name
    if not name or Path(name).name != name or name.startswith("."):
        raise CheckpointError(f"{name!r} is no name for a checkpoint: use one such as 'step-00000500'")
    head = {"step": step, "branch": branch, "run": run, "sequence": sequence, "history": list(history)}
    body, tensors = _describe(sections, head, meta or {})
    state = encode_status(status, reason)
    needed = sum(stream.num_bytes_of(each) for each in tensors.values())
    try:
        make_parents(parent, disk)
        _make_way(final, disk)
        with temporary(parent, name, disk) as folder:
            digest, num_bytes = _fill(folder, body, tensors, state, disk)
            disk.rename(folder, final)
            try:
                disk.sync_dir(parent)
            except BaseException:  # what may be gone after a power failure must not look saved
                move_away(final, folder, disk)
                raise
    except CheckpointError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and os.path.lexists(final):
            raise _taken(final) from error  # somebody else was faster
        raise explained(error, final, needed) from error
    return Written(path=final, digest=digest, num_bytes=num_bytes)


def _describe(
    sections: Mapping[str, Any], told: Mapping[str, Json], meta: Mapping[str, Any]
) -> tuple[dict[str, Json], dict[str, dict[str, Tensor]]]:
    """The manifest without what is known only when the files are written, and the tensors of each section."""
    trees: dict[str, Json] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for section, state in sections.items():
        manifest.file_of(section)
        trees[section], found = tree.flatten(state, section)
        tensors[section] = stream.in_file_order(found)
    notes, strangers = tree.flatten(dict(meta), "meta")
    if strangers:
        raise CheckpointError(f"meta.{next(iter(strangers))} holds a tensor or an array: those belong into a section")
    head = {"format": manifest.FORMAT, **told, "created": max(time.time(), 0.0)}
    return {**head, "writer": f"pid {os.getpid()} on {HOST}", "sections": trees, "meta": notes}, tensors


def _fill(
    folder: Path, body: dict[str, Json], tensors: Mapping[str, Mapping[str, Tensor]], state: bytes, disk: Disk
) -> tuple[str, int]:
    files: dict[str, stream.TensorFile] = {}
    try:
        for name, found in tensors.items():
            if found:
                files[name] = stream.TensorFile(found)
        for name, file in files.items():
            file.write(folder / manifest.file_of(name), disk)
        for file in files.values():  # only now: the disk has been at work on them meanwhile
            file.sync(disk)
    except BaseException:
        for file in files.values():
            file.give_up()
        raise
    sums = {name: (file.num_bytes, *file.finish()) for name, file in files.items()}
    for name, skeleton in body["sections"].items():
        num_bytes, sha256, marks = sums.get(name, (0, "", {"": ""}))
        section = Section(
            tree=skeleton,
            file=manifest.file_of(name) if name in sums else None,
            num_bytes=num_bytes,
            sha256=sha256,
            header=marks[""],
            tensors=stream.table_of(tensors[name], marks),
        )
        body["sections"][name] = manifest.encode_section(section)
    data = manifest.dump(body, sum(file.num_bytes for file in files.values()))
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
    damages = [damage for damage in damage_of(final, disk=disk) if damage.file != STATUS]
    if not damages:
        raise _taken(final)
    moved = quarantine(final, disk=disk)
    log.warning("%s is damaged (%s): moved to %s, and saved anew", final, damages[0], moved)


def _taken(final: Path) -> CheckpointError:
    owner = ""
    with contextlib.suppress(CheckpointError):
        owner = f", written by {inspect(final).writer}"
    return CheckpointError(
        f"{final} exists already{owner}: nothing was changed; "
        "do two runs save to one directory? Give each its own, or remove that checkpoint first"
    )
