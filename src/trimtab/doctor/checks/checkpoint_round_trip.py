"""WIRE024: a model that is saved and loaded is not the same model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed, warned
from trimtab.doctor.probe import Probe
from trimtab.doctor.repeatability import resumed


class CheckpointRoundTrip:
    """A model that is saved and loaded is not the same model.

    ## What it means
    Something that the model computes with is not in its `state_dict`: a plain tensor instead of a parameter or
    buffer, a buffer with `persistent=False`, a `state_dict` that leaves out keys. After a resume it starts from its
    initial value.

    ## How it is checked
    Two steps are made and the state saved; the model is put back to its beginning and the state loaded: the next loss,
    with the same batch and random numbers, must be bit-identical.

    ## What to try
    1. `self.register_buffer("mean", mean)` instead of `self.mean = mean`.
    """

    code: ClassVar[str] = "WIRE024"
    name: ClassVar[str] = "checkpoint-round-trip"
    title: ClassVar[str] = "a checkpoint holds all of the model"
    causes: ClassVar[tuple[str, ...]] = ("resume-differs",)

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report what a checkpoint leaves out."""
        why = probe.no_experiments or (probe.failed_as and "a step ended with an exception")
        if why:
            yield not_applicable(self, why)
            return
        found = resumed(probe)
        fix = 'self.register_buffer("mean", mean)  # instead of self.mean = mean'
        if found.error:
            yield failed(
                self,
                f"the model's own state cannot be loaded: {found.error}",
                "load_state_dict raised",
                fix,
                ("model",),
            )
        elif found.loss is None or found.again is None:
            yield not_applicable(self, "the step returns no loss, or a loss that is not finite")
        elif found.loss == found.again:
            yield passed(self, f"the loss after loading is bit-identical ({found.again:.6g}); {found.num_keys} entries")
        else:
            names = found.unsaved
            evidence = f"the loss is {found.loss:.8g} before saving and {found.again:.8g} after loading"
            tell = warned if found.per_sample else failed
            yield tell(
                self,
                f"the model's state_dict does not hold all of it{f': {names[0]}' if names else ''}.",
                evidence + (f"; tensors that are not in it: {', '.join(names[:3])}" if names else ""),
                fix,
                names[:8],
            )
