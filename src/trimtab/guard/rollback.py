"""States of a run to go back to: copies in memory, dense lately and sparse further back, then checkpoints on disk."""

from __future__ import annotations

import copy
import logging
import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.checkpoint.checkpointer import Checkpointer
from trimtab.checkpoint.format import container
from trimtab.checkpoint.parts import (
    copied,
    module_differences,
    optimizer_differences,
    paired,
    placed,
    plain_name,
    refuse,
)
from trimtab.core.config import PolicyConfig
from trimtab.core.errors import CheckpointError
from trimtab.core.remedy import Reached
from trimtab.core.types import Sample, Severity, Snapshot, Verdict
from trimtab.sample.watch import Step
from trimtab.torchutil.averaged_weights import averaged_state
from trimtab.torchutil.optimizers import params_of, rates_of

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


class GoesBack(Protocol):
    """What is kept for one optimizer, as far as going back concerns it."""

    optimizer: Any

    @property
    def attempts(self) -> int:
        """How many steps were tried."""
        ...

    def memory(self) -> dict[str, Any]:
        """What the reflexes remember of gradients."""
        ...

    def was_put_back(self, memory: Mapping[str, Any] | None) -> None:
        """Weights and moments of an earlier step are in place."""
        ...


class RecentStates:
    """Owns the copies of one guard. Bounded in bytes; a model that is too large for it has none."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        ema: object,
        lanes: Mapping[str, GoesBack],
        settings: PolicyConfig,
        instead: Callable[[int], str] | None = None,
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
        # Asked once, with the bytes of a copy, where there is no room for copies: what is gone back to then.
        self._instead = instead or nothing_instead
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
            return  # reported after the first step, when it is known how large the optimizer's state is
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
        if not self._sized:  # the optimizer has its state from the first step on
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
        log.warning("no states are kept in memory to go back to: %s; %s", why, self._instead(num_bytes))

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

    def try_out(self, label: str, before: int, back: int) -> bool:
        """Write the state that `go_back` would reach over what is there now, and drop nothing; False without one."""
        state = self.before(label, before, max(back - self._gone_back, 0))
        return state is not None and not state.initial and self._copied.put_back(state.tensors, state.others) == 0

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


class Rollback:
    """All states that one guard can go back to: copies in memory, and its checkpoints once there are any."""

    def __init__(self, memory: RecentStates) -> None:
        self.memory = memory
        self._disk: DiskStates | None = None

    @property
    def disk(self) -> DiskStates | None:
        """The checkpoints of this run, if any are saved."""
        return self._disk

    def use_disk(self, states: DiskStates) -> None:
        """Checkpoints of this run can be gone back to as well."""
        self._disk = states


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


Key = tuple[Hashable, ...]
_NO_STATE = frozenset({"params", "lr", "initial_lr"})


class Copied:
    """Where a guarded run keeps its state, and how to copy it fast: into the memory of a copy no longer needed."""

    def __init__(self, model: nn.Module, optimizers: Mapping[str, Optimizer], ema: object) -> None:
        self._model, self._optimizers, self._ema = model, optimizers, ema

    def live(self) -> tuple[dict[Key, Tensor], dict[Key, Any]]:
        """Every tensor there is now, and every number beside them."""
        tensors: dict[Key, Tensor] = {("model", n): p.detach() for n, p in self._model.named_parameters()}
        tensors |= {("model", n): b.detach() for n, b in self._model.named_buffers()}
        tensors |= {("ema", n): t.detach() for n, t in averaged_state(self._ema)}
        others: dict[Key, Any] = {}
        for label, optimizer in self._optimizers.items():
            places = _places(optimizer)
            for owner, entries in getattr(optimizer, "state", {}).items():
                where = places.get(id(owner), owner if isinstance(owner, str) else None)
                if where is None:
                    continue
                if not isinstance(entries, Mapping):
                    others[("state", label, where)] = entries
                    continue
                for name, value in entries.items():
                    (tensors if isinstance(value, Tensor) else others)[("state", label, where, name)] = value
            for i, group in enumerate(optimizer.param_groups):
                for name in group.keys() - optimizer.defaults.keys() - _NO_STATE:
                    if isinstance(group[name], bool | int | float):
                        others[("group", label, i, name)] = group[name]
        return tensors, others

    def num_bytes(self) -> int:
        """How much one copy takes."""
        return sum(t.numel() * t.element_size() for t in self.live()[0].values())

    @torch.no_grad()
    def take(self, spare: dict[Key, Tensor] | None = None) -> tuple[dict[Key, Tensor], dict[Key, Any]]:
        """A copy of all of it; `spare` is memory that may be written over."""
        live, others = self.live()
        kept = copy.deepcopy(others)
        if spare is not None and spare.keys() == live.keys() and all(_alike(live[k], spare[k]) for k in live):
            torch._foreach_copy_([spare[k] for k in live], list(live.values()))
            return spare, kept
        return {key: tensor.clone() for key, tensor in live.items()}, kept

    @torch.no_grad()
    def put_back(self, tensors: Mapping[Key, Tensor], others: Mapping[Key, Any]) -> int:
        """Write a copy over what is there now, in place; returns how many tensors are no longer there to be written.

        It may lie on another device.
        """
        live, _ = self.live()
        fit = [k for k in tensors if k in live and _same_kind(live[k], tensors[k])]
        if fit:
            torch._foreach_copy_([live[k] for k in fit], [tensors[k] for k in fit])
        missing = [k for k in tensors if k[0] != "state" and (k not in live or not _same_kind(live[k], tensors[k]))]
        for label, optimizer in self._optimizers.items():
            self._put_state_back(label, optimizer, tensors, others, set(fit))
        return len(missing)

    @torch.no_grad()
    def put_buffers_back(self, tensors: Mapping[Key, Tensor]) -> bool:
        """Write back what forward passes left behind (running averages), nothing else; whether there is any."""
        live = {k: b for n, b in self._model.named_buffers() if (k := ("model", n)) in tensors}
        fit = [(b.detach(), tensors[k]) for k, b in live.items() if _same_kind(b, tensors[k])]
        return [buffer.copy_(kept) for buffer, kept in fit] != []

    def _put_state_back(
        self, label: str, optimizer: Any, tensors: Mapping[Key, Tensor], others: Mapping[Key, Any], done: set[Key]
    ) -> None:
        """State that was lost is made again, state that was not there yet goes, the rest was written in place."""
        state = getattr(optimizer, "state", None)
        if state is None:
            return
        owners: dict[Hashable, Tensor] = dict(enumerate(params_of(optimizer)))
        kept = {**tensors, **others}
        mine = [k for k in kept if k[:2] == ("state", label)]
        wanted = {k[2] for k in mine}
        for i, p in owners.items():
            if i not in wanted:
                state.pop(p, None)
        for key in mine:
            where = key[2]
            owner = owners.get(where) if isinstance(where, int) else where
            if owner is None or key in done:
                continue
            value = kept[key].clone() if isinstance(kept[key], Tensor) else copy.deepcopy(kept[key])
            if len(key) == 3:
                state[owner] = value
            else:
                state.setdefault(owner, {})[key[3]] = value
        for i in wanted & owners.keys():
            entries = state.get(owners[i])
            names = {k[3] for k in mine if k[2] == i and len(k) == 4}
            for name in [n for n in entries if n not in names] if isinstance(entries, dict) and names else ():
                del entries[name]
        for key, value in others.items():
            if key[:2] == ("group", label) and key[2] < len(optimizer.param_groups):  # type: ignore[operator]
                optimizer.param_groups[key[2]][key[3]] = value


def _places(optimizer: object) -> dict[int, int]:
    """Where each parameter stands: groups are only ever added behind the others."""
    return {id(p): i for i, p in enumerate(params_of(optimizer))}


def _alike(one: Tensor, other: Tensor) -> bool:
    return _same_kind(one, other) and one.device == other.device


def _same_kind(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint of this run: how many steps of each lane are in it, and the rates at that time."""

    path: Path
    steps: Mapping[str, int]
    rates: Mapping[str, list[float]]


class DiskStates:
    """Knows which checkpoints were written by this run, or came before the one it was resumed from."""

    def __init__(self, checkpointer: Checkpointer, objects: Mapping[str, Any], lanes: Mapping[str, GoesBack]) -> None:
        self._checkpointer, self._lanes = checkpointer, lanes
        self._model: nn.Module = objects["model"]
        self._optimizers: Mapping[str, Any] = objects["optimizer"]
        self._ema = objects.get("ema")
        self._copied = Copied(self._model, self._optimizers, self._ema)
        self._saved: list[Saved] = []

    def saved(self, path: Path) -> None:
        """A checkpoint was written now."""
        steps = {label: lane.attempts for label, lane in self._lanes.items()}
        rates = {label: rates_of(lane.optimizer) for label, lane in self._lanes.items()}
        self._saved.append(Saved(path=path, steps=steps, rates=rates))

    def resumed(self, snapshot: Snapshot) -> None:
        """This run goes on from there: what came before it are its own states as well."""
        older = [s for s in self._checkpointer.history() if s.path != snapshot.path]
        one = next(iter(self._lanes)) if len(self._lanes) == 1 else None  # of several the numbers are not known
        self._saved = [Saved(path=s.path, steps={one: s.step}, rates={}) for s in older if one is not None]
        self.saved(snapshot.path)

    # -- going back ----------------------------------------------------------------------------------------------

    def go_back(self, label: str, before: int, back: int) -> Reached | None:
        """Put the newest sound state before `before`, or one of the `back` before it, in place; None without one.

        A checkpoint of as many steps was written when the next step had begun, so it may already hold what did the
        damage: it has to be older. One whose checksums do not hold, or that does not fit, is reported and left out.
        """
        known, usable = self._usable(label, before)
        for one in reversed(usable[: max(len(usable) - back, 1)]):
            try:
                sections = container.read(one.path).sections
                missing = self._put_back(sections)
            except CheckpointError as error:
                log.warning("%s is not gone back to: %s", one.path.name, error)
                continue
            told = sections.get("guard", {}).get("lanes", {})
            for name, lane in self._lanes.items():
                lane.was_put_back(told.get(name))
            return Reached(
                step=one.steps[label] - 1,
                proven=known[one.path].state == "good",
                source=f"from the checkpoint {one.path.name}, verified",
                missing=missing,
                rates=sound_rates(one.rates.get(label, []), [s.rates.get(label, []) for s in usable]),
            )
        return None

    def put_buffers_back(self, label: str, before: int) -> bool:
        """Put only the buffers of that state in place; whether there was anything to put back."""
        _, usable = self._usable(label, before)
        for one in reversed(usable if any(True for _ in self._model.buffers()) else []):
            try:
                model = container.read(one.path, sections=["model"]).sections["model"]
                refuse(module_differences("model", self._model, model))
            except CheckpointError as error:
                log.warning("the buffers in %s are not gone back to: %s", one.path.name, error)
                continue
            named = {n: model.get(plain_name(self._model, n)) for n, _ in self._model.named_buffers()}
            return self._copied.put_buffers_back({("model", n): t for n, t in named.items() if isinstance(t, Tensor)})
        return False

    def would_reach(self, label: str, before: int, back: int) -> int | None:
        """The last step in the state that `go_back` would put in place, if its checksums hold."""
        _, usable = self._usable(label, before)
        return usable[max(len(usable) - 1 - back, 0)].steps[label] - 1 if usable else None

    def _usable(self, label: str, before: int) -> tuple[dict[Path, Snapshot], list[Saved]]:
        self._wait()
        known = {s.path: s for s in self._checkpointer.list() if s.state != "bad" and not s.repaired}
        return known, [s for s in self._saved if s.path in known and s.steps.get(label, before) < before]

    def condemn(self, label: str, since: int, reason: str) -> None:
        """Trouble began at step `since` of a lane: what was written from then on is never resumed from."""
        self._wait()
        self._checkpointer.condemn_these([s.path for s in self._saved if s.steps.get(label, -1) >= since], reason)

    def _wait(self) -> None:
        try:
            self._checkpointer.wait()
        except CheckpointError as error:
            log.warning("the last checkpoint could not be written: %s", error)

    def _put_back(self, sections: Mapping[str, Any]) -> int:
        """Write a checkpoint over what is there now, in place; nothing is changed where it does not fit.

        As with copies in memory, schedule, loss scaler, random numbers and data are not taken back.
        """
        model, ema = sections.get("model", {}), sections.get("ema")
        moments = paired(self._optimizers, sections.get("optimizer", {}))
        averaged = self._ema if isinstance(self._ema, nn.Module) and ema is not None else None
        lines = module_differences("model", self._model, model)
        lines += optimizer_differences(self._optimizers, moments, self._model)
        lines += [] if averaged is None else module_differences("ema", averaged, ema or {})
        strange = [n for n, m in moments.items() if not {"state", "param_groups"} <= set(m["state"])]
        refuse([*lines, *(f"optimizer {n}: it keeps its state in a way of its own" for n in strange)])
        live, numbers = self._copied.live()
        tensors: dict[Key, Tensor] = {}
        others: dict[Key, Any] = {}
        for key in live:
            owner, saved = (self._model, model) if key[0] == "model" else (averaged, ema)
            name = plain_name(owner, str(key[1])) if key[0] in ("model", "ema") and owner is not None else None
            if name is not None and saved is not None and isinstance(saved.get(name), Tensor):
                tensors[key] = saved[name]
        for label, optimizer in self._optimizers.items():
            state = moments[label]["state"]
            for key, value in _moments(label, optimizer, state):
                (tensors if isinstance(value, Tensor) else others)[key] = value
            for key in (k for k in numbers if k[:2] == ("group", label)):
                group = dict(enumerate(state["param_groups"])).get(key[2], {})  # type: ignore[call-overload]
                others |= {key: group[key[3]]} if key[3] in group else {}
        missing = self._copied.put_back(tensors, others)
        if self._ema is not None and averaged is None and ema is not None and hasattr(self._ema, "load_state_dict"):
            self._ema.load_state_dict(copied(ema))
        return missing


def _moments(label: str, optimizer: Any, state: Mapping[str, Any]) -> list[tuple[Key, Any]]:
    """The saved state of one optimizer under the names that copies in memory have, where its parameters are."""
    found: list[tuple[Key, Any]] = []
    owners = dict(enumerate((p, group) for group in optimizer.param_groups for p in group["params"]))
    for where, entries in state["state"].items():
        if not isinstance(entries, Mapping):
            found.append((("state", label, where), entries))
            continue
        for name, value in entries.items():
            if isinstance(value, Tensor) and where in owners:
                value = placed(name, value, *owners[where])
            found.append((("state", label, where, name), value))
    return found


class Branches:
    """From which step on which branch."""

    def __init__(self, number: int = 0) -> None:
        self._known = [(0, number)]

    @property
    def now(self) -> int:
        """How many times the run has gone back."""
        return self._known[-1][1]

    def begin(self, step: int) -> None:
        """A new branch begins with this step."""
        self._known = [*self._known[-7:], (step, self.now + 1)]

    def marked(self, sample: Sample) -> Sample:
        """The sample under the number of its branch."""
        if not self.now:
            return sample
        if sample.phase != "train":
            return replace(sample, branch=self.now)
        return replace(sample, branch=next((b for first, b in reversed(self._known) if first <= sample.step), 0))
