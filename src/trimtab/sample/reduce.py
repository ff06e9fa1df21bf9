"""What several processes that train one model tell each other: the only collectives there are.

The mean loss, so that all judge the same; and, before anything that cannot be undone, a hash of what each would do.
"""

from __future__ import annotations

import datetime
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.sample.transfer import to_host

log = logging.getLogger("trimtab")
WAIT_S = 30.0
"""How long a guard waits, once, for those of the other processes."""
TIMEOUT_S = 600.0
_TURNS = itertools.count()


class Peers:
    """The guards of all processes of a run. They are looked for at the first step: by then all have been built.

    Where one has no guard, or stops answering, nobody waits for it again, and nothing that needs all is agreed on.
    """

    def __init__(self, model: nn.Module) -> None:
        self._replicated = is_replicated(model)
        self._group: Any = None
        self._turn = -1
        self.alone = False

    def present(self) -> bool:
        """Whether there are others that must do the same as this process."""
        if not self._replicated or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
            return False
        if self._turn < 0:
            self._turn = next(_TURNS)
            self._look_for_the_others()
        return True

    def agreed(self, values: Sequence[int]) -> list[bool]:
        """Which of these 63-bit values are the same in all processes; none where not all answer. One all-reduce."""
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
        rank, size, turn = dist.get_rank(), dist.get_world_size(), self._turn
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"trimtab/{turn}/{rank}", "here")
            store.wait([f"trimtab/{turn}/{r}" for r in range(size)], datetime.timedelta(seconds=WAIT_S))
            # Of its own, and on the host: what is compared is known there, and no device has to be waited for.
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
        except Exception as error:
            self._give_up(f"not all of the {size} processes have a guard in mode act ({error})")

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


def is_replicated(model: nn.Module) -> bool:
    """Whether other processes hold the same weights, or parts of them."""
    wrapped = any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules())
    return wrapped or any(hasattr(p, "device_mesh") or hasattr(p, "_is_flat_param") for p in model.parameters())
