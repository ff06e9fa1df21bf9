"""What the processes of one run tell each other to save and resume as one: what the first does, and whether all could.

Every process must make the same calls in the same order. An error in one is raised in all, so that none waits for
another that has given up. A process that is alone makes the same calls, and waits for nobody.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from trimtab.core.errors import CheckpointError

log = logging.getLogger("trimtab")
MEET_S = 600.0
"""How long the first to save or resume waits for the others to do the same."""
TIMEOUT_S = 1800.0
"""How long one waits for what another writes or reads."""
SAME_S = 30.0
"""How long one that could save alone waits, once, to hear where the others save."""
_TURNS = itertools.count()
_FOLDERS = itertools.count()
_T = TypeVar("_T")


class _Failed(NamedTuple):
    """What another process says instead of an answer."""

    why: str


class Ranks:
    """The processes that save one state; by default this one alone."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self.group = rank, size, group

    @classmethod
    def meet(cls) -> Ranks:
        """All processes of the run, once each of them has come here."""
        rank, size, turn = dist.get_rank(), dist.get_world_size(), next(_TURNS)
        store: Any = dist.distributed_c10d._get_default_store()
        names = [f"trimtab/checkpoint/{turn}/{one}" for one in range(size)]
        store.set(names[rank], "here")
        try:
            store.wait(names, datetime.timedelta(seconds=MEET_S))
        except Exception as error:
            raise CheckpointError(
                f"rank {rank} waited {MEET_S:.0f} s in vain for all of the {size} processes: each holds a part of the "
                f"parameters, so every rank must save and resume, in the same order ({str(error)[:200]})"
            ) from error
        return cls(rank, size, _own_group())

    @classmethod
    def with_same(cls, folder: Path | None) -> Ranks:
        """All processes, if each of them was given the same folder; else this one alone.

        For models that every process holds whole: each calls this once, with None where it saves nothing.
        """
        rank, size, turn = dist.get_rank(), dist.get_world_size(), next(_FOLDERS)
        store: Any = dist.distributed_c10d._get_default_store()
        names = [f"trimtab/folder/{turn}/{one}" for one in range(size)]
        store.set(names[rank], "" if folder is None else os.path.realpath(folder))
        if folder is None:
            return cls()
        try:
            store.wait(names, datetime.timedelta(seconds=SAME_S))
        except Exception:
            log.warning("not all of the %d processes have a guard: this one saves its checkpoints alone", size)
            return cls()
        if len({bytes(store.get(name)) for name in names}) > 1:
            return cls()
        return cls(rank, size, _own_group())

    @property
    def several(self) -> bool:
        """Whether there are others to save and resume with."""
        return self.group is not None

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes what there is once."""
        return self.rank == 0

    def gathered(self, what: Callable[[], _T]) -> list[_T]:
        """What this comes to in each process; CheckpointError in all of them where it fails in one."""
        mine: Any
        failed: Exception | None = None
        try:
            mine = what()
        except Exception as error:
            if self.group is None:
                raise
            mine, failed = _Failed(str(error)), error
        if self.group is None:
            return [mine]
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, mine, group=self.group)
        if failed is not None:
            raise failed
        for rank, one in enumerate(told):
            if isinstance(one, _Failed):
                raise CheckpointError(f"rank {rank} failed: {one.why}")
        return told

    def all(self, what: Callable[[], _T]) -> _T:
        """This process's own result, once all have one."""
        mine: list[_T] = []
        self.gathered(lambda: mine.append(what()))
        return mine[0]

    def from_first(self, what: Callable[[], _T]) -> _T:
        """What this comes to in the first process, the only one that does it."""
        if self.group is None:
            return what()
        told: list[Any] = [None]
        failed: Exception | None = None
        if self.leads:
            try:
                told[0] = what()
            except Exception as error:
                told[0], failed = _Failed(str(error)), error
        dist.broadcast_object_list(told, src=0, group=self.group)
        if failed is not None:
            raise failed
        if isinstance(told[0], _Failed):
            raise CheckpointError(f"rank 0 failed: {told[0].why}")
        answer: _T = told[0]
        return answer


def _own_group() -> Any:
    """On the host, and for this alone: it must not get in the way of what training sends meanwhile."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
