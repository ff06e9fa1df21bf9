"""Which samples the last steps were made from, as far as it is known, and the quarantine they can be put into."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.checkpoint.loader import Quarantine, content_hash
from trimtab.trace.batch_rows import ids_in

MAX_BYTES = 1 << 26
"""A larger batch is not held on to for its content."""


class Batches:
    """The samples of the last few steps: ids from the loader or from the batch itself, and the batch, to look into."""

    def __init__(self, loader: object, lag: int, quarantine: Quarantine | None = None, *, least: int = 0) -> None:
        self._loader = loader
        self.quarantine = quarantine_of(loader) if quarantine is None else quarantine
        self._told: list[tuple[Any, list[Any]]] = []
        self._steps: deque[tuple[int, list[Any], list[Any]]] = deque(maxlen=max(lag + 2, least))
        self._suspects: dict[Any, None] = {}  # the samples of every step that did harm lately
        self._harms = 0

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

    def offended(self, step: int) -> str:
        """Note that a step did harm; samples that were in every such step are put aside, and the text says so.

        One harmful batch says nothing about its samples. Those that all harmful batches share are to blame as soon as
        less than half a sample is expected in all of them by chance.
        """
        ids = next((s[1] for s in self._steps if s[0] == step), [])
        if not ids:
            return ""
        shared = [one for one in ids if one in self._suspects]
        self._harms = self._harms + 1 if shared else 1
        self._suspects = dict.fromkeys(shared or ids)
        by_chance = len(ids) * (len(ids) / self._num_samples(len(ids))) ** (self._harms - 1)
        if self._harms < 2 or by_chance >= 0.5:
            return ""
        harms, self._harms, self._suspects = self._harms, 0, {}
        self.quarantine.add(ids=shared)
        named = ", ".join(map(str, shared[:3])) + (f" and {len(shared) - 3} more" if len(shared) > 3 else "")
        who, is_ = (f"sample {named} was", "is") if len(shared) == 1 else (f"samples {named} were", "are")
        return f"{who} in the last {harms} harmful batches and {is_} in quarantine by id from now on"

    def _num_samples(self, batch: int) -> int:
        try:
            return max(len(self._loader.dataset), batch)  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            return 10 * batch  # nobody knows: enough for three batches to tell

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
