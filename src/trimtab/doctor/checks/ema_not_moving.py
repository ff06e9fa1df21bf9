"""EMA002: the averaged weights do not change, or are not a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe
from trimtab.torchutil.averaged_weights import search_averaged_weights
from trimtab.torchutil.patch import wrap_on_object

P = ParamSpec("P")
R = TypeVar("R")


class EmaNotMoving:
    """The averaged weights do not change, or are not a copy.

    ## What it means
    What will be evaluated or shipped is an untrained model: an update that is never called, a decay of 1, an average of
    another model. An average that shares its memory with the model is the model itself.

    ## How it is checked
    The average before and after the steps, in which the weights did move; and whether it has memory of its own.

    ## What to try
    1. `ema.update_parameters(model)` after each step; a decay of 0.99 to 0.9999.
    2. Build it from a copy: `AveragedModel(model)` makes one.
    """

    code: ClassVar[str] = "EMA002"
    name: ClassVar[str] = "ema-not-moving"
    title: ClassVar[str] = "the averaged weights follow"
    causes: ClassVar[tuple[str, ...]] = ()

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report averages that do not follow."""
        average = probe.target.ema
        if average is None:
            yield not_applicable(self, "there is no average of the weights")
            return
        mine = {p.data_ptr() for p in probe.model.parameters()}
        tensors = search_averaged_weights(average)
        shared = [t for t in tensors if t.data_ptr() in mine]
        moved = any(e.facts["moved"] for e in probe.events("step"))
        marks = [probe.average_at_start, *(c.average for c in probe.through)]
        if not tensors:
            yield not_applicable(self, f"no tensors were found in the {type(average).__name__}")
        elif shared and len(shared) == len(tensors):
            yield failed(
                self,
                "the average shares its memory with the model: it is the model itself.",
                f"{len(shared)} of {len(tensors)} tensors are the model's own",
                "ema = torch.optim.swa_utils.AveragedModel(model)  # it copies",
                ("ema",),
            )
        elif not moved:
            yield not_applicable(self, "the weights themselves did not move")
        elif idle := self._idle(probe, tensors):
            yield failed(
                self,
                "the average is updated and stays what it was: its decay is 1, or it is of another model.",
                f"{idle} updates after the first changed nothing, while the model moved",
                "ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))",
                ("ema",),
            )
        elif len(set(marks)) > 1:
            yield passed(self, f"it changed in {_num_changes(marks)} of {len(marks) - 1} steps")
        elif not probe.too_slow and len({c.average for c in probe.varied} | set(marks)) > 1:
            yield passed(self, f"it changed within {len(probe.varied)} steps")
        else:
            yield failed(
                self,
                "the averaged weights do not move while the model does.",
                f"bit-identical after {len(probe.through) + (0 if probe.too_slow else len(probe.varied))} steps",
                "ema.update_parameters(model)  # after optimizer.step(), with a decay below 1",
                ("ema",),
            )

    @staticmethod
    def _idle(probe: Probe, tensors: list[Tensor]) -> int:
        """How many updates after the first one, which may be a copy, did nothing; 0 where any did something."""
        average = probe.target.ema
        name = next((n for n in ("update_parameters", "update") if callable(getattr(average, n, None))), "")
        if not name or probe.too_slow:
            return 0
        changes: list[bool] = []

        def watched(inner: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
            before = [t.detach().clone() for t in tensors]
            out = inner(*args, **kwargs)
            changes.append(any(not torch.equal(a, t) for a, t in zip(before, tensors, strict=True)))
            return out

        with probe.trial():
            take_off = wrap_on_object(average, name, watched)
            try:
                calls = probe.run([probe.batch(i) for i in range(5)], listen=True)
            finally:
                take_off()
        moved = all(any(e.facts["moved"] for e in c.of("step")) for c in calls)
        return 0 if any(changes[1:]) or not moved else len(changes[1:])


def _num_changes(marks: list[float | None]) -> int:
    return sum(a != b for a, b in pairwise(marks))
