"""What several processes that train one model tell each other: the only collectives there are.

In every step the loss of each and what is wrong with its batch, so that all judge the same; where each holds a part of
every parameter also what it measured of its parts, which add up to the whole; and, before anything that cannot be
undone, a hash of what each would do. Before the first step, through the store alone, where they record.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from trimtab.core.types import ABSENT
from trimtab.sample.transfer import to_host
from trimtab.torchutil.sharded import is_part

log = logging.getLogger("trimtab")
WAIT_S = 30.0
"""How long a guard waits, once, for those of the other processes. Each is announced when it is built, and all have been
built when one steps: gradients that processes share are there only once all of them went through their first batch."""
TIMEOUT_S = 600.0
PLACE_WAIT_S = 10.0
"""How long a process that was given a folder waits, once, to hear whether rank 0 was given the same."""
_TURNS = itertools.count()
_RUNS = itertools.count()


@dataclass(frozen=True, slots=True)
class Told:
    """What each process told of its own batch in one step."""

    losses: NDArray[np.float64]  # NaN where there was none, or where it is NaN: `num_losses` tells them apart
    has_loss: NDArray[np.bool_]
    bad_inputs: NDArray[np.float64]
    bad_buffers: NDArray[np.float64]
    samples: NDArray[np.float64]  # the first one that holds NaN or Inf; -1 where none does, or it is not known
    prints: NDArray[np.float64]  # fingerprints of the batches; -1 where not known
    checksums: NDArray[np.float64]  # of the weights; -1 where not told in this step
    late_s: NDArray[np.float64]  # from the end of the last step to the beginning of the forward pass
    spent_s: NDArray[np.float64]  # from there to this step; 0 where not known

    @property
    def num(self) -> int:
        """How many processes there are."""
        return len(self.losses)

    def loss(self) -> float | None:
        """The mean over the processes that have one."""
        return float(self.losses[self.has_loss].mean()) if self.has_loss.any() else None

    def ranks_of_loss(self) -> tuple[str, ...]:
        """Whose loss is not finite."""
        return named_ranks(self.has_loss & ~np.isfinite(self.losses))

    def ranks_of_input(self) -> tuple[str, ...]:
        """Whose batch holds NaN or Inf."""
        return named_ranks(self.bad_inputs > 0)

    def ranks_unseen(self) -> tuple[str, ...]:
        """Whose guard failed to look at its own step."""
        return named_ranks(self.bad_inputs < 0)

    def samples_of_input(self) -> tuple[str, ...]:
        """The first such sample of each of them, where it is known."""
        return tuple(
            f"sample {int(i)}" for i, bad in zip(self.samples, self.bad_inputs, strict=True) if bad > 0 and i >= 0
        )


def named_ranks(which: NDArray[np.bool_]) -> tuple[str, ...]:
    """The names of those that are set.

    Example:
        >>> named_ranks(np.array([False, True]))
        ('rank 1',)
    """
    return tuple(f"rank {rank}" for rank in np.flatnonzero(which))


NUM_TOLD = 9
UNSEEN = -1.0
"""In place of a number of bad inputs: looking at them failed."""


class Mine(NamedTuple):
    """What this process tells the others of its own batch."""

    loss: float | None = None
    bad_inputs: float = 0.0
    bad_buffers: float = 0.0
    bad_sample: int = -1  # the first sample that holds NaN or Inf, where there is one and it is known
    batch_print: float = -1.0
    checksum: float = -1.0
    late_s: float = 0.0
    spent_s: float = 0.0

    def numbers(self) -> tuple[float, ...]:
        """The same as numbers of which 0 says nothing: the rows of all processes are added up."""
        loss = 0.0 if self.loss is None else self.loss
        unknown = 1 + self.bad_sample, 1 + self.batch_print, 1 + self.checksum
        return loss, self.loss is not None, self.bad_inputs, self.bad_buffers, *unknown, self.late_s, self.spent_s


class Peers:
    """The guards of all processes of a run, looked for at the first step.

    Where one has no guard, or stops answering, nobody waits for it again, and nothing that needs all is agreed on.
    """

    def __init__(self, model: nn.Module, *, acts: bool = False, stages: bool = False) -> None:
        self._group: Any = None
        self.stages = stages
        """Whether each process holds a part of the model of its own: their paces and losses do not compare."""
        self._looked = self.alone = False
        self._agrees = acts
        self._several = (stages or is_replicated(model)) and is_one_of_several()
        if self._several:
            self._rank, self._size, self._turn = dist.get_rank(), dist.get_world_size(), next(_TURNS)
            self._store().set(f"trimtab/{self._turn}/{self._rank}", "acts" if acts else "here")

    def present(self) -> bool:
        """Whether there are others that must do the same as this process."""
        if self._several and not self._looked:
            self._looked = True
            self._look_for_the_others()
        return self._several

    def share(self, mine: Mine, parts: Tensor, shards: Shards | Stages | None) -> tuple[Told, Tensor]:
        """Tell all others of this step, and hear of theirs; what was measured of parts adds up to the whole.

        `parts` are the squared norms of what this process holds of each parameter, in float64; without `shards` that is
        all of it. One sum over all processes. Where not all answer it is this one's own that comes back.
        """
        all_told = np.zeros((self._size, NUM_TOLD))
        all_told[self._rank] = mine.numbers()
        facts = torch.from_numpy(all_told.reshape(-1))
        if shards is None:
            heard = facts.clone()
            return told_from(heard if self._all_reduce(heard, dist.ReduceOp.SUM) else facts, self._size), parts
        if self.alone:
            shards.give_up()
            return told_from(facts, self._size), parts
        whole, heard = shards.add_up(parts, facts)
        return told_from(heard, self._size), whole

    def _store(self) -> Any:
        return dist.distributed_c10d._get_default_store()

    def agreed(self, values: Sequence[int]) -> list[bool]:
        """Which of these 63-bit values are the same in all processes; none where not all answer. One all-reduce.

        Where some are not there to act, nothing is asked: they would never answer.
        """
        if not self._agrees:
            return [False] * len(values)
        told = torch.tensor([*values, *(-v for v in values)], dtype=torch.int64, device="cpu")
        if not self._all_reduce(told, dist.ReduceOp.MAX):
            return [False] * len(values)
        highest, lowest = (half.astype(object) for half in np.split(to_host(told), 2))
        return [high == -low for high, low in zip(highest, lowest, strict=True)]

    def mean(self, loss: float | None) -> float | None:
        """The mean over all processes that have a loss; this one's own where not all answer."""
        told = torch.tensor([0.0, 0.0] if loss is None else [loss, 1.0], dtype=torch.float64, device="cpu")
        if not self._all_reduce(told, dist.ReduceOp.SUM):
            return loss
        total, num = (float(v) for v in to_host(told))
        return total / num if num else None

    def mean_on_device(self, loss: Tensor | float | None, device: torch.device) -> Tensor | float | None:
        """The same with nobody waiting for the device: every process must take part."""
        if self.alone:
            return loss
        told = torch.zeros(2, dtype=torch.float32, device=device)
        if loss is not None:
            told[0], told[1] = loss, 1.0
        dist.all_reduce(told)
        return None if loss is None else told[0] / told[1]

    def _look_for_the_others(self) -> None:
        size, turn = self._size, self._turn
        try:
            names = [f"trimtab/{turn}/{r}" for r in range(size)]
            self._store().wait(names, datetime.timedelta(seconds=WAIT_S))
            # Of its own, and on the host: what is compared is known there, and no device has to be waited for.
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
            self._agrees = self._agrees and all(self._store().get(name) == b"acts" for name in names)
        except Exception as error:
            self._give_up(f"not all of the {size} processes have a guard ({error})")

    def _all_reduce(self, told: Tensor, how: object) -> bool:
        if self.alone:
            return False
        try:
            dist.all_reduce(told, how, group=self._group)
        except Exception as error:  # a process has ended, or does not answer any more
            self._give_up(f"another process does not answer ({error})")
        return not self.alone

    def _give_up(self, why: str) -> None:
        self.alone = True
        log.warning("%s: this one goes on judging, but changes nothing that all would have to change alike", why)


def told_from(facts: Tensor, size: int) -> Told:
    """What all processes told, from the sum of their rows."""
    columns = to_host(facts).reshape(size, NUM_TOLD).T.copy()
    losses, has, inputs, buffers, samples, prints, checksums, late_s, spent_s = columns
    return Told(losses, has > 0, inputs, buffers, samples - 1, prints - 1, checksums - 1, late_s, spent_s)


class Shards:
    """Parameters of which each process holds a part: what is measured of the parts adds up to the whole.

    Of what several processes hold alike the first one's counts.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        owned, shares, meshes = [], [], dict[Any, list[int]]()
        for i, p in enumerate(params):
            mesh = getattr(p, "device_mesh", None)
            meshes.setdefault(mesh, []).append(i)
            owned.append(_counts(p, mesh))
            shares.append(_share(p))
        device = params[0].device
        self._owned = torch.tensor(owned, dtype=torch.bool, device=device)
        self._shares = torch.tensor(shares, dtype=torch.float64, device=device)
        self._alone = False
        self._meshes = [(mesh, torch.tensor(rows, dtype=torch.int64, device=device)) for mesh, rows in meshes.items()]

    @classmethod
    def of(cls, params: Sequence[Tensor]) -> Shards | None:
        """None where this process holds all of every parameter."""
        return cls(params) if is_one_of_several() and any(map(is_part, params)) else None

    def give_up(self) -> None:
        """The others do not take part: from now on parts are all that is known."""
        self._alone = True

    def add_up(self, squares: Tensor, facts: Tensor) -> tuple[Tensor, Tensor]:
        """The squared norm of each whole parameter from those of the parts, and the sum of the facts of all."""
        mine = torch.where(self._owned[: squares.numel()], squares, 0.0)
        facts = facts.to(mine.device)
        if len(self._meshes) == 1 and is_everybody(self._meshes[0][0]):
            both = torch.cat([mine, facts])
            dist.all_reduce(both)
            return both[: mine.numel()], both[mine.numel() :]
        dist.all_reduce(facts)
        return self._over_meshes(mine, dist.ReduceOp.SUM), facts

    def whole(self, table: Tensor, rows: Tensor) -> Tensor:
        """Rows with all columns, of whole parameters, from those of the parts. `rows`: the parameter of each."""
        if self._alone:
            return table
        wide = table.double()
        absent = wide[:, 0] == ABSENT
        share = self._shares[rows].unsqueeze(1)
        sums = torch.cat([wide[:, :1].square(), wide[:, 2:3] * share, wide[:, 3:5], wide[:, 5:] * share], 1)
        sums = torch.where((self._owned[rows] & ~absent).unsqueeze(1), sums, 0.0)
        largest = torch.where(torch.isnan(wide[:, 1]), -1.0, wide[:, 1])
        sums = self._over_meshes(sums, dist.ReduceOp.SUM, rows)
        largest = self._over_meshes(largest, dist.ReduceOp.MAX, rows)
        unmeasured = (largest < 0) | (sums[:, 2] > 0)
        out = torch.cat([sums[:, :1].sqrt(), torch.where(unmeasured, torch.nan, largest).unsqueeze(1), sums[:, 1:]], 1)
        out[absent] = wide[absent]
        return out.to(table.dtype)

    def _over_meshes(self, values: Tensor, how: object, rows: Tensor | None = None) -> Tensor:
        if len(self._meshes) == 1:
            _reduce(values, self._meshes[0][0], how)
            return values
        for mesh, members in self._meshes:
            mine = members[members < len(values)] if rows is None else torch.isin(rows, members).nonzero().squeeze(1)
            part = values[mine].contiguous()
            _reduce(part, mesh, how)
            values[mine] = part
        return values


class Stages:
    """Parameters that other processes hold nothing of, as in pipeline stages: only the sums of all stages add up.

    Of a stage that several processes hold, each counts for its share of it.
    """

    def __init__(self, model: nn.Module, inner: Shards | None = None) -> None:
        self._model, self._inner, self._alone = model, inner, False
        copies = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
        meshes: list[Any] = [p for p in model.parameters() if hasattr(p, "device_mesh")]
        self._num_alike = copies[0].process_group.size() if copies else meshes[0].device_mesh.size() if meshes else 1

    def holding(self, inner: Shards | None) -> Stages:
        """The same, where parameters of the stage are sharded within it."""
        return Stages(self._model, inner)

    def give_up(self) -> None:
        """The others do not take part: from now on this stage is all that is known."""
        self._alone = True
        if self._inner is not None:
            self._inner.give_up()

    def add_up(self, squares: Tensor, facts: Tensor) -> tuple[Tensor, Tensor]:
        """The squared norms of this stage, behind them that of all others together, and the sum of the facts of all."""
        size = dist.get_world_size()
        here = torch.arange(size, device=squares.device) == dist.get_rank()
        if self._inner is not None:
            squares, facts = self._inner.add_up(squares, facts)
        sums = torch.where(here, squares.sum() / self._num_alike, 0.0)
        told = sums if self._inner is not None else torch.cat([sums, facts.to(sums.device)])
        dist.all_reduce(told)
        sums, facts = told[:size], facts if self._inner is not None else told[size:]
        # Subtracted only where it must be: of what overflows nothing would be left.
        alone = self._num_alike == 1
        others = torch.where(here, 0.0, sums).sum() if alone else sums.sum() - squares.sum()
        return torch.cat([squares, others.reshape(1)]), facts

    def whole(self, table: Tensor, rows: Tensor) -> Tensor:
        """Rows with all columns, of whole parameters."""
        return table if self._inner is None else self._inner.whole(table, rows)


def _reduce(values: Tensor, mesh: Any, how: object) -> None:
    if is_everybody(mesh):
        dist.all_reduce(values, how)
        return
    for dim in range(mesh.ndim):
        dist.all_reduce(values, how, group=mesh.get_group(dim))


def is_everybody(mesh: Any) -> bool:
    """Whether every process takes part in a device mesh; None is all of them."""
    return mesh is None or mesh.size() == dist.get_world_size()


def _counts(param: Any, mesh: Any) -> bool:
    """Whether this process is the one whose part counts: the first of those that hold the same."""
    if mesh is None:  # the flat parameter of an older wrapper is a part of its own; anything else is held alike by all
        return hasattr(param, "_is_flat_param") or dist.get_rank() == 0
    place = mesh.get_coordinate()
    if place is None:
        return False
    return all(not kind.is_replicate() or at == 0 for kind, at in zip(param.placements, place, strict=True))


def _share(param: Any) -> float:
    """Which share of a parameter's elements this process holds."""
    if hasattr(param, "to_local"):
        return float(param.to_local().numel() / max(param.numel(), 1))
    return 1.0 / dist.get_world_size() if hasattr(param, "_is_flat_param") else 1.0


class OneRun:
    """Where the records of processes that train together go: rank 0's to a folder, the others' to `rank-k` inside it.

    Agreed through the store, without a collective: a process that has no guard keeps nobody waiting for good. `store`
    is None where there is only one process.
    """

    def __init__(self, store: Any = None, rank: int = 0, turn: int = 0) -> None:
        self._store, self.rank = store, rank
        self._key = f"trimtab/run/{turn}"

    @classmethod
    def here(cls) -> OneRun:
        """That of this process, for its next guard."""
        if not is_one_of_several():
            return cls()
        return cls(dist.distributed_c10d._get_default_store(), dist.get_rank(), next(_RUNS))

    @property
    def is_several(self) -> bool:
        """Whether there are other processes."""
        return self._store is not None

    def id(self, mine: str) -> str:
        """The id of the run: that of the process that asks first. Nobody waits."""
        try:
            return mine if self._store is None else str(self._store.compare_set(f"{self._key}/id", "", mine).decode())
        except Exception as error:  # a store of an older kind, or one whose host has ended
            log.warning(
                "the processes could not agree on a run id (%s): this one records to a folder of its own", error
            )
            return mine

    def settled(self, given: Path | None, chosen: Path | None) -> None:
        """On rank 0: tell the others which folder it was given, and which it records to."""
        if self._store is None or self.rank:
            return
        try:
            self._store.set(f"{self._key}/place", f"{_absolute(given)}\n{_absolute(chosen)}")
        except Exception as error:
            log.warning("the other processes cannot be told where rank 0 records (%s)", error)

    def inside(self, given: Path) -> Path | None:
        """On any other rank: the folder in that of rank 0, if it was given the same one; None if it was not."""
        if self._store is None or not self.rank:
            return None
        try:
            self._store.wait([f"{self._key}/place"], datetime.timedelta(seconds=PLACE_WAIT_S))
            theirs, chosen = self._store.get(f"{self._key}/place").decode().split("\n")
        except Exception as error:
            log.warning("rank 0 did not say within %g s where it records: %s", PLACE_WAIT_S, error)
            return None
        return Path(chosen) / f"rank-{self.rank}" if chosen and theirs == _absolute(given) else None


def _absolute(folder: Path | None) -> str:
    return "" if folder is None else os.path.abspath(folder)


def is_one_of_several() -> bool:
    """Whether other processes train along with this one."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_replicated(model: nn.Module) -> bool:
    """Whether other processes hold the same weights, or parts of them."""
    wrapped = any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules())
    return wrapped or any(map(is_part, model.parameters()))
