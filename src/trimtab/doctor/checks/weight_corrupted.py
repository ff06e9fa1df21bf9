"""WGT004: weights are changed between steps, and not by the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe
from trimtab.sample.transfer import number
from trimtab.torchutil.optimizers import params_of

NUM_STEPS = 6
BOUNDS = ((0.03, 5.0), (0.1, 2.0))
"""Part of their size, times what the step did: clamps, norms and decay by hand move weights by less than that."""


class WeightCorrupted:
    """Weights are changed between steps, and not by the optimizer.

    ## What it means
    What a step has learned is overwritten: weights are initialised, loaded, scaled or filled again in every call.

    ## How it is checked
    The weights when a step ends, and when the next one begins. Clamps, norms, decay by hand and perturbations that are
    taken back change little; here it is many times what the step itself did, or the very step that is undone.

    ## What to try
    1. Look for `reset_parameters`, `load_state_dict`, `.data` and `torch.no_grad()` in the loop and in forward.
    """

    code: ClassVar[str] = "WGT004"
    name: ClassVar[str] = "weight-corrupted"
    title: ClassVar[str] = "only the optimizer moves the weights"
    causes: ClassVar[tuple[str, ...]] = (
        "gradcheck",
        "learning-rate",
        "weights-unchanged",
        "targets-do-not-predict",
        "not-learning",
        "resume-differs",
    )

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report weights that something else than the optimizer changes."""
        why = probe.no_experiments
        if why:
            yield not_applicable(self, why)
            return
        tape = Tape()
        with probe.trial(), tape:
            probe.run([probe.batch(i) for i in range(max(NUM_STEPS, min(len(probe.calls), 12)))])
        if not tape.between:
            yield not_applicable(self, "fewer than two steps of one optimizer were seen")
            return
        undone = [k for k, v in tape.between.items() if len(v) > 1 and all(one.undone for one in v)]
        moved = [k for k, v in tape.between.items() if len(v) > 1 and all(one.far for one in v[1:])]
        named = [probe.names.get(k, "a parameter") for k in undone or moved]
        if undone:
            yield failed(
                self,
                "the weights are put back to where they were after every step.",
                f"{', '.join(named[:4])}: {len(named)} of {len(tape.between)} begin each step with the same values",
                "# load or initialise the weights once, before the loop",
                tuple(named),
            )
        elif moved:
            worst = tape.between[moved[0]][-1]
            yield failed(
                self,
                "weights are changed between the steps, and not by the optimizer.",
                f"{', '.join(named[:4])}: by {worst.outside:.2g} of its size between steps, by {worst.own:.2g} in one",
                "# look for reset_parameters, load_state_dict or .data in the loop",
                tuple(named),
            )
        else:
            yield passed(self, f"{len(tape.between)} parameters, from the end of a step to the next one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """How a weight moved in a step, and from there to the next, as parts of its size."""

    own: float
    outside: float
    undone: bool

    @property
    def far(self) -> bool:
        """Whether no projection moves so far."""
        return any(self.outside > size and self.outside > many * self.own for size, many in BOUNDS)


@dataclass(slots=True)
class Tape:
    """Listens to all optimizers while it is entered."""

    between: dict[int, list[Between]] = field(default_factory=dict)
    _at: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _begun: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    _hooks: list[RemovableHandle] = field(default_factory=list)

    def __enter__(self) -> Tape:
        self._hooks = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if id(optimizer) in self._begun:
            return
        now = {id(p): p.detach().clone() for p in params_of(optimizer) if not p.is_meta}
        self._begun[id(optimizer)] = now
        for key, value in now.items():
            began, ended = self._at.get((id(optimizer), key), (None, None))
            if began is None or ended is None or began.shape != value.shape:
                continue
            size = _length(ended)
            own, outside = _length(ended - began), _length(value - ended)
            if size > 0 and math.isfinite(own + outside):
                undone = own > 0 and torch.equal(value, began)
                self.between.setdefault(key, []).append(Between(own=own / size, outside=outside / size, undone=undone))

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        began = self._begun.pop(id(optimizer), {})
        for p in params_of(optimizer):
            if id(p) in began:
                self._at[id(optimizer), id(p)] = (began[id(p)], p.detach().clone())


def _length(value: Tensor) -> float:
    return number(torch.linalg.vector_norm(value.abs().double()))
