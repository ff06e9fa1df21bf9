"""A checkpoint is one directory; this is the place to import from whatever works on checkpoints as files.

step-00000500/
    manifest.json        what is in it, with sizes and SHA-256 of every file
    model.safetensors    the tensors of one section, readable by anything that reads safetensors
    COMMIT               the SHA-256 of manifest.json
    status.json          candidate, good or bad: the only file that changes later
"""

from __future__ import annotations

from trimtab.recover.house import Entry, clean, entries, name_of, quarantine, remove, size_of, step_of
from trimtab.recover.manifest import Contents, Damage, Manifest, Section, Status, Written
from trimtab.recover.prepare import prepare
from trimtab.recover.read import damage_of, inspect, look_at, read
from trimtab.recover.status import get_status, set_status
from trimtab.recover.write import write

__all__ = [
    "Contents",
    "Damage",
    "Entry",
    "Manifest",
    "Section",
    "Status",
    "Written",
    "clean",
    "damage_of",
    "entries",
    "get_status",
    "inspect",
    "look_at",
    "name_of",
    "prepare",
    "quarantine",
    "read",
    "remove",
    "set_status",
    "size_of",
    "step_of",
    "write",
]
