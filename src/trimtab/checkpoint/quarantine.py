"""Samples that are left out for ever: by their index, or by a hash of their content where data has no index."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler


class Quarantine:
    """The indices and content hashes of samples that must not be seen again; shared by all that enforce it.

    Example:
        >>> from trimtab.checkpoint import Quarantine, QuarantineSampler
        >>> quarantine = Quarantine()
        >>> quarantine.add(ids=[3, 5])
        2
        >>> list(QuarantineSampler(range(6), quarantine))
        [0, 1, 2, 4]
    """

    def __init__(self, ids: Iterable[Any] = (), hashes: Iterable[str] = ()) -> None:
        self._ids: dict[Any, None] = {}
        self._hashes: dict[str, None] = {}
        self.add(ids, hashes)

    def add(self, ids: Iterable[Any] = (), hashes: Iterable[str] = ()) -> int:
        """Leave these out from now on; returns how many were not yet left out."""
        before = len(self)
        self._ids.update(dict.fromkeys(map(plain_id, ids)))
        self._hashes.update(dict.fromkeys(hashes))
        return len(self) - before

    def __len__(self) -> int:
        return len(self._ids) + len(self._hashes)

    def __contains__(self, sample_id: Any) -> bool:
        return bool(self._ids) and plain_id(sample_id) in self._ids

    @property
    def ids(self) -> tuple[Any, ...]:
        """Indices left out, in the order they came."""
        return tuple(self._ids)

    @property
    def hashes(self) -> tuple[str, ...]:
        """Content hashes left out, in the order they came."""
        return tuple(self._hashes)

    def hides(self, item: Any) -> bool:
        """Whether the content of this sample is left out; nothing is hashed while there are no hashes."""
        return bool(self._hashes) and content_hash(item) in self._hashes

    def state_dict(self) -> dict[str, Any]:
        """Plain data to go on from."""
        return {"ids": list(self._ids), "hashes": list(self._hashes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Leave out what was left out then as well. What is left out now stays so: a rewind brings nothing back."""
        self.add(state["ids"], state["hashes"])


class QuarantineSampler(Sampler[Any]):
    """Another sampler without the samples in quarantine; its length is that of the other, so an upper bound."""

    def __init__(self, sampler: Any, quarantine: Quarantine) -> None:
        self.sampler, self.quarantine = sampler, quarantine

    def __iter__(self) -> Iterator[Any]:
        """Every index of the other sampler that is not in quarantine at the moment it is drawn."""
        return (one for one in iter(self.sampler) if one not in self.quarantine)

    def __len__(self) -> int:
        return len(self.sampler)


def plain_id(sample_id: Any) -> Any:
    """An index as it can be compared and written down: tensors and numpy scalars become numbers."""
    if isinstance(sample_id, Tensor | np.generic):
        return sample_id.item()
    return tuple(map(plain_id, sample_id)) if isinstance(sample_id, list | tuple) else sample_id


def content_hash(item: Any) -> str:
    """A name for a sample that depends on nothing but its content: the same in every process, run and machine.

    Tensors and arrays count with type, shape and values; dicts and sequences with what they hold. Anything else counts
    with its `repr`, and must have one that says what it is.

    Example:
        >>> content_hash({"x": torch.ones(2), "y": 1}) == content_hash({"x": torch.ones(2), "y": 1})
        True
        >>> content_hash(torch.zeros(2)) == content_hash(torch.zeros(1, 2))
        False
    """
    digest = hashlib.sha256()
    _feed(digest, item)
    return digest.hexdigest()


def _feed(digest: Any, item: Any) -> None:
    if isinstance(item, Tensor):
        values = item.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        digest.update(f"tensor {item.dtype} {tuple(item.shape)} ".encode())
        digest.update(values.view(torch.uint8).numpy())
    elif isinstance(item, np.ndarray) and item.dtype != object:
        digest.update(f"array {item.dtype} {item.shape} ".encode() + item.tobytes())
    elif isinstance(item, bytes | bytearray):
        digest.update(f"bytes {len(item)} ".encode() + item)
    elif isinstance(item, Mapping):
        digest.update(f"mapping {len(item)} ".encode())
        for key, value in item.items():
            _feed(digest, key)
            _feed(digest, value)
    elif isinstance(item, list | tuple | np.ndarray):
        digest.update(f"sequence {len(item)} ".encode())
        for value in item:
            _feed(digest, value)
    else:
        told = repr(item).encode()
        digest.update(f"{type(item).__name__} {len(told)} ".encode() + told)
