"""The order of samples as a loader draws it: counted, so that it can be drawn again up to the same place."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler

from trimtab.core.errors import CheckpointError
from trimtab.recover.sampler import Quarantine, QuarantineSampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where the sampler stood when a batch had been drawn; `check` sums up all that was drawn until then."""

    drawn: int = 0
    check: int = 0
    ids: Any = None


class Counted:
    """What a sampler yields, counted; begun no earlier than its reader begins, because beginning may draw numbers."""

    def __init__(self, source: Any) -> None:
        self.drawn, self.check = 0, 0
        self._source = source
        self._inner: Iterator[Any] | None = None
        self._ahead: list[Any] = []

    def __iter__(self) -> Counted:
        if self._inner is None:
            self._inner = iter(self._source)
        return self

    def __next__(self) -> Any:
        value = self._ahead.pop() if self._ahead else next(self._inner or iter(()))
        self.drawn += 1
        self.check = zlib.crc32(repr(value).encode(), self.check)
        return value

    def look_ahead(self) -> None:
        """Draw one value now and hand it out next: a loader with workers draws before it is asked for a batch."""
        if not self._ahead:
            self._ahead.extend(islice(self._inner or (), 1))


class Order:
    """Stands where a loader keeps its sampler: the same indices, without those in quarantine, and a mark per batch."""

    def __init__(self, loader: Any, quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        self._batch: BatchSampler | None = None
        self._of_lists = loader.batch_sampler is not None
        self._original = loader.batch_sampler if self._of_lists else loader.sampler
        if type(self._original) is BatchSampler:  # quarantine is enforced before batches are made, so they stay full
            self._batch, self._source = self._original, self._original.sampler
        else:
            self._source = self._original
        self.marks: deque[Mark] = deque()
        self.resumed: Counted | None = None

    def __len__(self) -> int:
        return len(self._original)

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch, or go on in one that was `resumed`. A loader with workers calls this twice, and so can we."""
        counted = self.resumed or self.begin()
        self.marks = deque()
        return self._marked(self._batches(counted), counted, self.marks)

    def begin(self) -> Counted:
        """Begin an epoch: a BatchSampler begins its sampler with the first batch, a loader its own at once."""
        counted = Counted(self._source)
        return counted if self._batch is not None else iter(counted)

    def replay(self, mark: Mark, generator: torch.Generator | None, *, fresh: bool, num_workers: int) -> Counted:
        """Draw again what was drawn until `mark`, in the order of draws of a loader; no sample is loaded.

        The generators must be as they were when the epoch began. `fresh` says that workers, if any, began with it.
        """
        counted = self.begin()
        if fresh:
            torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)  # the seed of the workers
            if num_workers:
                counted = self.begin()
        # Where nothing was drawn yet, and no worker waits, the sampler has yet to begin.
        drawn = sum(1 for _ in islice(iter(counted), mark.drawn)) if mark.drawn or num_workers else 0
        if drawn != mark.drawn or counted.check != mark.check:
            raise CheckpointError(
                f"the sampler ({type(self._source).__name__}) does not draw the same samples again: "
                f"{mark.drawn} were drawn before the checkpoint, and these {drawn} are others. It must draw from a "
                "generator of its own, or all at the beginning of an epoch, and the dataset must be the same"
            )
        if num_workers:
            counted.look_ahead()
        return counted

    def _batches(self, counted: Counted) -> Iterator[Any]:
        if self._batch is not None:
            kept = QuarantineSampler(counted, self._quarantine)
            return iter(BatchSampler(kept, self._batch.batch_size, self._batch.drop_last))
        return self._kept_lists(counted) if self._of_lists else iter(QuarantineSampler(counted, self._quarantine))

    def _kept_lists(self, lists: Counted) -> Iterator[list[Any]]:
        for whole in lists:
            kept = [one for one in whole if one not in self._quarantine]
            if kept or not whole:
                yield kept

    @staticmethod
    def _marked(batches: Iterator[Any], counted: Counted, marks: deque[Mark]) -> Iterator[Any]:
        for ids in batches:
            marks.append(Mark(drawn=counted.drawn, check=counted.check, ids=ids))
            yield ids
