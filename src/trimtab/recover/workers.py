"""The random numbers of loader workers: reported with every batch, so that new workers can go on with them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info

from trimtab.recover import rng
from trimtab.recover.sampler import Quarantine

try:
    from torch.utils.data._utils.worker import _generate_state
except ImportError:  # a version that seeds numpy in another way, or not at all
    _generate_state = None  # type: ignore[assignment]


class Delivery(NamedTuple):
    """A batch as it comes from the inner loader: the data, who made it, and its generators if they moved."""

    data: Any
    worker: int
    generators: dict[str, Any] | None
    dropped: bool


class Deliver:
    """Makes a batch as the loader's own `collate_fn` does, and says what random numbers were left afterwards.

    Samples whose content is in quarantine are left out before; where nothing remains, there is no batch.
    """

    def __init__(self, collate: Callable[[Any], Any], quarantine: Quarantine, in_lists: bool) -> None:
        self._collate, self._quarantine, self._in_lists = collate, quarantine, in_lists
        self._last: dict[str, Any] | None = None

    def __call__(self, samples: Any) -> Delivery:
        """One batch, or one sample where the loader makes no batches."""
        if self._in_lists and self._quarantine.hashes:
            kept = [one for one in samples if not self._quarantine.hides(one)]
            dropped = bool(samples) and not kept
        else:
            kept, dropped = samples, not self._in_lists and self._quarantine.hides(samples)
        data = None if dropped else self._collate(kept)
        info = get_worker_info()
        if info is None:
            return Delivery(data, -1, None, dropped)
        return Delivery(data, info.id, self._moved(), dropped)

    def _moved(self) -> dict[str, Any] | None:
        """The generators of this process, or None where they are as they were told last."""
        now = rng.capture_host()
        now["torch"] = now["torch"].numpy()  # a tensor would cost a file of shared memory per batch
        if self._last is not None and _same(now, self._last):
            return None
        self._last = now
        return now


class Begin:
    """Starts a worker in the place of an earlier one: with its number, and the random numbers it had left."""

    def __init__(
        self,
        own: Callable[[int], Any] | None,
        generators: Mapping[int, Any],
        base_seed: int | None,
        shift: int,
    ) -> None:
        self._own, self._generators, self._base_seed, self._shift = own, dict(generators), base_seed, shift

    def __call__(self, worker: int) -> None:
        """Called in the new process, before its first sample."""
        info: Any = get_worker_info()
        former = (worker + self._shift) % info.num_workers
        # The next batch was due from that worker, and goes to the first of these.
        object.__setattr__(info, "id", former)  # its own refuses any change
        if self._base_seed is not None:
            object.__setattr__(info, "seed", self._base_seed + former)
            _seed(self._base_seed, former)
        if self._own is not None:
            self._own(former)
        if former in self._generators:
            rng.restore_host(self._generators[former])


def _seed(base_seed: int, worker: int) -> None:
    """As a loader seeds its workers."""
    random.seed(base_seed + worker)
    torch.manual_seed(base_seed + worker)
    if _generate_state is not None:
        np.random.seed(_generate_state(base_seed, worker))  # type: ignore[no-untyped-call]


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (
        np.array_equal(one["torch"], other["torch"])
        and np.array_equal(one["python"]["words"], other["python"]["words"])
        and one["python"]["gauss"] == other["python"]["gauss"]
        and np.array_equal(one["numpy"]["keys"], other["numpy"]["keys"])
        and all(one["numpy"][key] == other["numpy"][key] for key in ("place", "has_gauss", "cached"))
    )
