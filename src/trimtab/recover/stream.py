"""Tensors straight from memory into a safetensors file, hashed on the way in a second thread."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trimtab.core.errors import CheckpointError
from trimtab.core.files import json_memory
from trimtab.recover.disk import Disk
from trimtab.recover.manifest import MAX_JSON, Stored, memory_for
from trimtab.recover.tensors import SAFE_NAMES, flat

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
