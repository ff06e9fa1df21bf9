"""One checkpoint under a name of its own: replaced so that at every moment there is one to load."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trimtab.checkpoint.directory import explained
from trimtab.checkpoint.format import container
from trimtab.checkpoint.format.filesystem import DISK, Disk
from trimtab.checkpoint.format.manifest import MANIFEST, MARKER, STATUS
from trimtab.core.errors import CheckpointError

log = logging.getLogger("trimtab")


def replace_with(path: Path, sections: Mapping[str, Any], *, disk: Disk = DISK, **about: Any) -> None:
    """Write `sections` as the checkpoint `path`, in the place of the one that is there.

    The new one is written beside it (`name~new`), made durable, read again, and only then takes the name; until that is
    durable too, the old one stays as `name~old`. Whatever kills the process, `candidates` finds a whole one.
    """
    check_place(path)
    fresh, old = beside(path)
    try:
        settle(path, disk=disk)
        container.clean(path.parent, disk=disk)
        container.write(path.parent, fresh.name, sections, disk=disk, **about)
        if damages := container.damage_of(fresh, disk=disk):
            container.remove(fresh, disk=disk)
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
    sound = next((one for one in (path, *left) if not _damages(one, disk)), None)
    if sound is None:
        for one in left:
            container.quarantine(one, disk=disk)  # nothing to go back to: only out of the way
        return
    if sound != path:
        if os.path.lexists(path):
            container.quarantine(path, disk=disk)
        disk.rename(sound, path)
        disk.sync_dir(path.parent)
        log.warning("an earlier save of %s was cut short: %s is taken for it", path, sound.name)
    for one in left:
        if os.path.lexists(one):
            container.remove(one, disk=disk)


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


def _damages(path: Path, disk: Disk) -> list[container.Damage]:
    """What makes a checkpoint unusable; a lost status is only a lost opinion."""
    return [damage for damage in container.damage_of(path, disk=disk) if damage.file != STATUS]


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
        container.remove(old, disk=disk)
    except OSError as error:  # the new one is saved: that is what counts
        log.warning("%s could not be deleted: %s; the next save will try again", old, error)
