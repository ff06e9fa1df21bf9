"""Which samples the last steps were made from, as far as it is known, and the quarantine they can be put into."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.checkpoint.loader import Quarantine, content_hash, plain_id

ID_NAMES = ("sample_ids", "sample_id", "ids", "id", "indices", "index", "idx")
"""Entries of a batch that are taken for the ids of its samples."""
MAX_BYTES = 1 << 26
"""A larger batch is not held on to for its content."""


class Batches:
    """The samples of the last few steps: ids from the loader or from the batch itself, and the batch, to look into."""

    def __init__(self, loader: object, lag: int, quarantine: Quarantine | None = None) -> None:
        self._loader = loader
        self.quarantine = quarantine_of(loader) if quarantine is None else quarantine
        self._told: list[tuple[Any, list[Any]]] = []
        self._steps: deque[tuple[int, list[Any], list[Any]]] = deque(maxlen=lag + 2)

    def told(self, batch: object) -> None:
        """The loop told the batch of the step that is coming."""
        if len(self._told) < 64:  # a loop that tells and never steps must not fill the memory
            # The loader is asked now: by the time of the step it may have given out others (accumulation).
            self._told.append((batch, ids_in(batch) or self._drawn()))

    def step_done(self, step: int) -> None:
        """The step is over: what was told belongs to it."""
        told, self._told = self._told, []
        ids = [i for _, known in told for i in known] if told else self._drawn()
        self._steps.append((step, ids, [batch for batch, _ in told if _is_small(batch)]))

    def _drawn(self) -> list[Any]:
        drawn = getattr(self._loader, "last_ids", None)
        return list(drawn) if isinstance(drawn, Sequence) and not isinstance(drawn, str) else []

    def knows(self, step: int) -> bool:
        """Whether the samples of a step can be named."""
        return any(s[0] == step and (s[1] or s[2]) for s in self._steps)

    def put_aside(self, step: int) -> tuple[int, str]:
        """Leave the samples of a step out from now on: how many, and known by what; none, and why."""
        found = next((s for s in self._steps if s[0] == step), None)
        if found is None or not (found[1] or found[2]):
            return 0, "which samples the batch holds is not known: tell guard.observe(batch=...), or give it the loader"
        _, ids, batches = found
        samples = [sample for batch in batches for sample in samples_in(batch)]
        bad = [i for i, sample in enumerate(samples) if not _is_finite(sample)]
        if ids:
            # NaN and Inf have an address: whoever shared the batch with them is not to blame.
            ids = [ids[i] for i in bad] if bad and len(samples) == len(ids) else ids
            self.quarantine.add(ids=ids)
            return len(ids), "their ids"
        hashes = [content_hash(samples[i]) for i in bad or range(len(samples))]
        self.quarantine.add(hashes=hashes)
        return len(hashes), "their content"


def quarantine_of(loader: object) -> Quarantine:
    """The quarantine that a loader, or the sampler in it, asks; a new one where none does."""
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    asked = (getattr(one, "quarantine", None) for one in (loader, sampler, inner))
    found = next((q for q in asked if isinstance(q, Quarantine)), None)
    return Quarantine() if found is None else found  # an empty one is false, and still the one to fill


def ids_in(batch: object) -> list[Any]:
    """The sample ids that a batch carries with it."""
    if not isinstance(batch, Mapping):
        return []
    ids = next((batch[name] for name in ID_NAMES if name in batch), None)
    if isinstance(ids, Tensor):
        return [int(i) for i in ids.reshape(-1)] if not ids.is_floating_point() else []
    return [plain_id(i) for i in ids] if isinstance(ids, Sequence) and not isinstance(ids, str) else []


def samples_in(batch: object) -> list[Any]:
    """The samples of a batch, as a data set gives them: one entry of every tensor."""
    if isinstance(batch, Tensor):
        return list(batch)
    if isinstance(batch, Mapping):
        parts = {k: list(v) for k, v in batch.items() if isinstance(v, Tensor) and v.dim()}
        return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=False)]
    if isinstance(batch, list | tuple):
        return list(zip(*[list(v) for v in batch if isinstance(v, Tensor) and v.dim()], strict=False))
    return []


def _is_finite(sample: object) -> bool:
    parts = sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, tuple) else (sample,)
    return all(bool(torch.isfinite(t).all()) for t in parts if t.is_floating_point() or t.is_complex())


def _is_small(batch: object) -> bool:
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else (batch,)
    tensors = [t for t in parts if isinstance(t, Tensor)]
    return bool(tensors) and all(t.is_cpu for t in tensors) and sum(t.nbytes for t in tensors) <= MAX_BYTES
