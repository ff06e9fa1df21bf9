"""The last states of a run in memory: a copy every few accepted steps, dense lately and sparse further back."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.act.copies import Copied, Key
from trimtab.act.rewind import Reached
from trimtab.core.config import PolicyConfig
from trimtab.core.types import Severity, Verdict
from trimtab.sample.step import Step
from trimtab.torchutil.param_groups import rates_of

log = logging.getLogger("trimtab")
MAX_KEPT = 24
MIN_KEPT = 3
NUM_RATES = 8
OLDEST = 40
"""In units of the spacing: what is older than that is no help any more."""


@dataclass(slots=True, eq=False)  # looked up by identity: tensors cannot be compared as a whole
class State:
    """One copy. `steps` is the last step of each lane that is in it; it is `good` once enough quiet steps followed."""

    steps: dict[str, int]
    owner: str
    since: int
    tensors: dict[Key, Tensor]
    others: dict[Key, Any]
    rates: dict[str, list[float]]
    memories: dict[str, Any]
    good: bool = False
    initial: bool = False


class Ring:
    """Owns the copies of one guard. Bounded in bytes; a model that is too large for it has none."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Mapping[str, Any],
        ema: Any,
        lanes: Mapping[str, Any],
        settings: PolicyConfig,
    ) -> None:
        self._copied = Copied(model, optimizers, ema)
        self._lanes, self._every, self._max_bytes = lanes, settings.ring_every, settings.ring_bytes
        self._kept: list[State] = []
        self._spare: dict[Key, Tensor] | None = None
        self._since_last = 0
        self._trouble: dict[str, int] = {}
        self._gone_back = 0  # how many states were passed over by rewinds since the last copy: those are dropped
        self._capacity = MAX_KEPT
        self._sized = self._begun = False
        self.instead: Callable[[int], str] = nothing_instead
        """Asked once, with the bytes of a copy, where there is no room for copies: what is gone back to then."""
        self.why_none = "" if self._every > 0 and self._max_bytes > 0 else "the ring is switched off"

    def __len__(self) -> int:
        return len(self._kept)

    # -- taking --------------------------------------------------------------------------------------------------

    def begin(self, label: str) -> None:
        """Before the very first step: keep what there is, so that a run that begins badly can begin again."""
        if self._begun or self.why_none:
            return
        self._begun = True
        if self._copied.num_bytes() * MIN_KEPT > self._max_bytes:
            return  # told after the first step, when it is known how large the optimizer's state is
        try:
            self._take(label)
        except torch.OutOfMemoryError:
            self._off("there is not enough memory for it", self._copied.num_bytes())
        for state in self._kept:
            state.initial = True

    def after(self, label: str, step: Step) -> None:
        """A lane's step is over: if it went into the weights, nothing was wrong with it and it is time, copy."""
        if self.why_none or not _went_in(step):
            return
        if not self._sized:  # from the first step on the optimizer has its state: what is impossible is told at once
            self._sized = True
            if not self._fits():
                return
        self._since_last += 1
        if self._since_last < self._every or step.number - self._trouble.get(label, -self._every) < self._every:
            return
        self._since_last = 0
        try:
            self._take(label)
        except torch.OutOfMemoryError:
            self._off("there is not enough memory for it", self._copied.num_bytes())

    def _take(self, label: str) -> None:
        if not self._kept and self._spare is None and not self._fits():
            return
        tensors, others = self._copied.take(self._spare)
        self._spare, self._gone_back = None, 0
        steps = {name: lane.attempts - 1 for name, lane in self._lanes.items()}
        self._kept.append(
            State(
                steps=steps,
                owner=label,
                since=steps[label],
                tensors=tensors,
                others=others,
                rates={name: rates_of(lane.optimizer) for name, lane in self._lanes.items()},
                memories={name: lane.memory() for name, lane in self._lanes.items()},
            )
        )
        if len(self._kept) > self._capacity:
            self._spare = self._kept.pop(_least_needed([s.steps[label] for s in self._kept], self._every)).tensors

    def _fits(self) -> bool:
        num = self._copied.num_bytes()
        if num * MIN_KEPT > self._max_bytes:
            self._off(
                f"one copy of the model and its optimizer takes {num / 1e6:.0f} MB, and at least {MIN_KEPT} must fit "
                f"into policy.ring_bytes ({self._max_bytes / 1e6:.0f} MB)",
                num,
            )
            return False
        self._capacity = min(MAX_KEPT, max(self._max_bytes // max(num, 1) - 1, 1))  # one more while copying
        return True

    def _off(self, why: str, num_bytes: int) -> None:
        self.why_none = why
        self._kept.clear()
        self._spare = None
        log.warning("no states are kept in memory to go back to: %s; %s", why, self.instead(num_bytes))

    # -- judging -------------------------------------------------------------------------------------------------

    def heard(self, label: str, step: int, verdict: Verdict | None, *, rejected: bool) -> None:
        """A step was judged: a quiet one brings its lane's copies nearer to being good, a bad one sets them back."""
        grave = verdict is not None and any(f.severity >= Severity.ERROR for f in verdict.findings)
        bad = grave or rejected
        if bad:
            self._trouble[label] = step
        for state in self._kept:
            if state.good or state.initial or state.owner != label:
                continue
            if bad:
                state.since = max(state.since, step)
            state.good = step - state.since >= self._every

    # -- going back ----------------------------------------------------------------------------------------------

    def before(self, label: str, step: int, back: int) -> State | None:
        """The newest good state before `step`, or one of the `back` before it; a young one where there is no other.

        The one from before the first step comes last: it holds nothing that was learned.
        """
        usable = [s for s in self._kept if s.steps[label] < step]
        chosen = [s for s in usable if s.good or s.initial]
        chosen = chosen if any(s.good for s in chosen) else usable
        return chosen[max(len(chosen) - 1 - back, 0)] if chosen else None

    def sound_rates(self, label: str, state: State) -> list[float]:
        """The rates the run was long sound with when the state was kept."""
        past = self._kept[: self._kept.index(state) + 1]
        return sound_rates(state.rates.get(label, []), [s.rates.get(label, []) for s in past])

    def would_reach(self, label: str, before: int, back: int) -> int | None:
        """The last step in the state that `go_back` would put in place."""
        state = self.before(label, before, max(back - self._gone_back, 0))
        return None if state is None else state.steps[label]

    def go_back(self, label: str, before: int, back: int) -> Reached | None:
        """Put the state that `before` names in place; None where there is none.

        The states it passed over are dropped: asked the same again, it goes to the same state again.
        """
        state = self.before(label, before, max(back - self._gone_back, 0))
        if state is None:
            return None
        self._gone_back = back
        return Reached(
            step=state.steps[label],
            proven=state.good,
            source="from memory",
            missing=self.go_back_to(state),
            rates=self.sound_rates(label, state),
            restart=state.initial,
        )

    def put_buffers_back(self, label: str, before: int) -> bool:
        """Put only the buffers of that state in place; whether there was anything to put back."""
        state = self.before(label, before, 0)
        return state is not None and self._copied.put_buffers_back(state.tensors)

    def drop_after(self, label: str, step: int) -> None:
        """Another state, of `step`, was put in place: what came after it is no state of this run any more."""
        self._kept = [s for s in self._kept if s.steps[label] <= step]
        self._since_last = 0

    def go_back_to(self, state: State) -> int:
        """Put a state in place; all that came after it is dropped. Returns how many tensors no longer exist."""
        missing = self._copied.put_back(state.tensors, state.others)
        place = self._kept.index(state)
        self._kept = self._kept[: place + 1]
        self._since_last = 0
        for name, lane in self._lanes.items():
            lane.was_put_back(state.memories.get(name))
        return missing


def _went_in(step: Step) -> bool:
    """Whether the step changed the weights and nothing the host knows speaks against them."""
    loss = step.scalars.get("loss")
    skipped = "scaler_skipped" in step.scalars or "routine_overflow" in step.scalars
    return not step.rejected and not skipped and not (isinstance(loss, float) and not math.isfinite(loss))


def nothing_instead(num_bytes: int) -> str:
    """What there is to go back to where nobody keeps anything else."""
    return "rewinding is not possible; give the guard checkpoint=PATH, or raise policy.ring_bytes"


def sound_rates(own: list[float], past: Sequence[list[float]]) -> list[float]:
    """The rates a run was long sound with: those of a state, or of most of the `past` ones up to it if lower.

    Where a rate grew slowly the state may already have too much of it.
    """
    alike = [p for p in past[-NUM_RATES:] if len(p) == len(own)] or [own]
    return [min(rate, statistics.median_low([p[i] for p in alike])) for i, rate in enumerate(own)]


def _least_needed(steps: list[int], every: int) -> int:
    """Which copy to give up: one too old, else one whose neighbours, for their age, are nearest."""
    now = steps[-1]
    if now - steps[0] > OLDEST * every:
        return 0
    gaps = [(steps[i + 1] - steps[i - 1]) / (now - steps[i] + every) for i in range(1, len(steps) - 1)]
    return 1 + gaps.index(min(gaps)) if gaps else 0
