"""Stores each traced incident in the run directory, so that `trimtab trace` can show it and a script reproduce it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab.core.config import Config
from trimtab.guard.provenance import LATER
from trimtab.trace.bundle import Evidence, write
from trimtab.trace.step_replay import Replay
from trimtab.trace.trace import Trace

log = logging.getLogger("trimtab")


class Incidents:
    """The incidents of one run. What cannot be written is contained by whoever calls `keep`."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        self._run_dir, self._config = run_dir, config

    def keep(self, step: int, found: Trace, replay: Replay) -> None:
        """Write a bundle of what a trace found, with the weights that the step was run on, if they are still there."""
        if found.origin is None:
            return
        evidence = Evidence(
            failing=found.failing,
            batch=batch_of(replay, found.origin.micro_batch),
            rng=random_of(replay, found.origin.micro_batch),
            model={} if LATER in found.origin.notes else state_of(replay),
            config=self._config.to_dict(),
            step_fn=replay.step_fn,
            root=replay.model,
        )
        path = write(self._run_dir, found.origin, evidence, step=step)
        if path is not None:
            log.info("step %d: stored as an incident; see `trimtab trace %s`", step, path)


def batch_of(replay: Replay, micro_batch: int | None) -> object:
    """What the step was run on: the batch where the loop told it, else what the model was called with."""
    if replay.batch is not None:
        return replay.batch
    if not replay.calls:
        return None
    call = replay.calls[micro_batch or 0]
    return {"args": call.args, "kwargs": dict(call.kwargs)} if call.kwargs else call.args


def random_of(replay: Replay, micro_batch: int | None) -> dict[str, Any]:
    """Where the random numbers stood before the forward pass; empty where it draws none."""
    random = replay.calls[micro_batch or 0].random if replay.calls else None
    if random is None or random.cpu is None:
        return {}
    return {"torch": random.cpu, "cuda": {str(index): state for index, state in random.cuda.items()}}


def state_of(replay: Replay) -> dict[str, Tensor]:
    """The model's tensors by name, with buffers as they were before the step.

    Not by `state_dict()`: under sharding that is a collective call, and only one process may have an incident.
    """
    before = {id(tensor): value for tensor, value in replay.buffers}
    state: dict[str, Tensor] = dict(replay.model.named_parameters(remove_duplicate=False))
    for name, tensor in replay.model.named_buffers(remove_duplicate=False):
        state[name] = before.get(id(tensor), tensor)
    return state
