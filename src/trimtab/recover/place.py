"""A place in the data: the epoch under way, how it began and how far it has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from trimtab.recover import chance, rng
from trimtab.recover.order import Mark


class Run:
    """One epoch under way: how it began, and how far it has come."""

    def __init__(self, start: Mapping[str, Any], fresh: bool, batches: int = 0, mark: Mark | None = None) -> None:
        self.start, self.fresh, self.batches, self.mark = start, fresh, batches, mark or Mark()
        self.iterator: Iterator[Any] = iter(())
        self.marks: deque[Mark] = deque()
        self.turn = self.hidden = 0

    def state(self) -> dict[str, Any]:
        """As plain data and tensors."""
        place = {"batches": self.batches, "drawn": self.mark.drawn, "check": self.mark.check, "fresh": self.fresh}
        return place | {"start": dict(self.start)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Run:
        """What `state` was taken of, before anybody reads it."""
        mark = Mark(drawn=state["drawn"], check=state["check"])
        return cls(state["start"], state["fresh"], state["batches"], mark)


def set_back(loader: Any, start: Mapping[str, Any]) -> None:
    """Put every generator back to where it was when the epoch began."""
    rng.restore_host(start["rng"])
    chance.restore(loader, start["generators"])


def described(loader: DataLoader[Any]) -> dict[str, Any]:
    """What must be the same for a place to mean the same; the number of workers only counts for random numbers."""
    try:
        num_samples = len(loader.sampler)  # type: ignore[arg-type]
    except TypeError:
        num_samples = None
    return {
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "sampler": type(loader.sampler).__name__,
        "num_samples": num_samples,
        "num_workers": loader.num_workers,
    }
