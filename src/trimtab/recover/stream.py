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
from trimtab.recover.disk import Disk
from trimtab.recover.manifest import MAX_JSON, Stored
from trimtab.recover.tensors import SAFE_NAMES, flat

_PACK = 1 << 20  # tensors smaller than this are written together: a system call for each of thousands is slow
_ON_THE_WAY = 8  # copies from a device that may wait to be hashed

_Item = tuple[str, memoryview]


class Hasher:
    """SHA-256 of everything put into it, computed on a thread of its own (hashlib lets go of the interpreter)."""

    def __init__(self, max_waiting: int = 0) -> None:
        self._queue: queue.Queue[_Item | None] = queue.Queue(max_waiting)
        self._digest = hashlib.sha256()
        self._marks: dict[str, str] = {}
        self._thread = threading.Thread(target=self._work, name="trimtab-sha256", daemon=True)
        self._thread.start()

    def put(self, key: str, data: memoryview) -> None:
        """Hash `data`, and remember under `key` where the hash stood after it."""
        self._queue.put((key, data))

    def finish(self) -> tuple[str, dict[str, str]]:
        """Wait for everything put so far: the SHA-256, and how it began after each key."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        return self._digest.hexdigest(), self._marks

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            key, data = item
            self._digest.update(data)
            self._marks[key] = self._digest.copy().hexdigest()[:16]


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
    if len(text) > MAX_JSON:
        raise CheckpointError(f"the names of {len(tensors)} tensors take {len(text)} bytes, more than {MAX_JSON}")
    return len(text).to_bytes(8, "little") + text


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: bytes, disk: Disk) -> Hasher:
    """Write and sync a safetensors file; the returned hasher may still be busy.

    Nothing is copied but what is on another device and tensors below 1 MiB, so nobody may change the values meanwhile.
    """
    local = all(tensor.device.type == "cpu" for tensor in tensors.values())
    hasher = Hasher(0 if local else _ON_THE_WAY)
    fd = disk.create(path)
    try:
        hasher.put("", memoryview(header))
        pack, num_packed = [memoryview(header)], len(header)
        for key, data in _views(tensors):
            hasher.put(key, data)
            if data.nbytes < _PACK:
                pack.append(data)
                num_packed += data.nbytes
            if data.nbytes >= _PACK or num_packed >= _PACK:
                disk.write(fd, b"".join(pack), path)
                pack, num_packed = [], 0
            if data.nbytes >= _PACK:
                disk.write(fd, data, path)
        disk.write(fd, b"".join(pack), path)
        disk.fsync(fd, path)
    except BaseException:
        hasher.finish()
        raise
    finally:
        os.close(fd)
    return hasher


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
