"""Puts a guard on every optimizer of a script that does not use trimtab itself, and closes it when the script ends."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, TypeVarTuple

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.core.config import resolve
from trimtab.core.contain import Contained, when_collected
from trimtab.core.errors import TrainingStopped, TrimtabError
from trimtab.core.types import Sink
from trimtab.guard.guard import Guard
from trimtab.guard.hooks import steps_on_stack, uncompiled
from trimtab.guard.lane import Lane
from trimtab.guard.loop_clipping import wrap_clipping
from trimtab.guard.loop_losses import Losses
from trimtab.integrations.training_guard import is_number, loss_name
from trimtab.record.recorder import wait_for_finished
from trimtab.run.discover import (
    Census,
    FirstCall,
    Kept,
    bystanders,
    can_be_guarded,
    copies_of,
    lookalikes,
    mark_of,
    marked_params,
    owners_of,
    seen_from_outside,
    uncalled,
)
from trimtab.run.frameworks import watch_frameworks
from trimtab.run.guarded_training import GuardedTraining
from trimtab.sample.rows import Parts
from trimtab.torchutil.optimizers import GUARDED, innermost, is_guarded, labelled, params_of
from trimtab.torchutil.patch import own_hook, wrap_attribute, wrap_method_of
from trimtab.torchutil.sharded import refusal, shares_parameters

P = ParamSpec("P")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

log = logging.getLogger("trimtab")
MAX_GUARDS = 64
"""A script that builds more optimizers than this (one per inner loop, say) runs on with the later ones unguarded."""
RENEW_EVERY = 16
"""Backward passes after which it is looked up again which parameters an optimizer moves."""


class _Now(threading.local):
    """Which step a thread is in."""

    def __init__(self) -> None:
        self.depth = 0  # of calls of `step` under way; one that raised left it behind


class Seen:
    """What happened besides guarded optimizers, to explain why nothing was guarded."""

    def __init__(self) -> None:
        self.num_backwards = 0
        self.built: Counter[str] = Counter()
        self.lookalikes: set[str] = set()


class AutoGuard:
    """Sees optimizers being built and stepped, and guards them.

    It holds guards weakly: they live as long as their optimizers.

    Args:
        settings: Keywords for each `Guard`.
        on_end: Called with the training of every guard that has ended.
        sinks: Makes further sinks for each guard.
        on_begin: Called with nothing before a guard is built, and with its training afterwards.
        on_fork: Called in a forked child process that begins to train.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        on_end: Callable[[GuardedTraining], object],
        *,
        sinks: Callable[[], Sequence[Sink]] = list,
        on_begin: Callable[[list[GuardedTraining]], object] = lambda trainings: None,
        on_fork: Callable[[], object] = lambda: None,
    ) -> None:
        self._settings, self._on_end = dict(settings), on_end
        self._sinks, self._on_begin, self._on_fork = sinks, on_begin, on_fork
        self.seen = Seen()
        self._theirs: list[GuardedTraining] = []
        self._kept: list[Guard] = []
        self._waiting: list[weakref.ref[Optimizer]] = []
        self._first_calls: list[FirstCall] = []
        self._guards: weakref.WeakValueDictionary[int, Guard] = weakref.WeakValueDictionary()  # by optimizer
        self._last: tuple[weakref.ref[Optimizer], weakref.ref[Guard]] | None = None  # which was stepped last
        # By optimizer, the parameters that tell which backward passes reach it; None where they must be looked up.
        self._marked: dict[int, list[Tensor]] | None = None
        self._trainings: dict[int, GuardedTraining] = {}  # by guard
        self._early: dict[int, list[Kept]] = {}  # buffers by optimizer, from the time it was built until it is guarded
        self._both_in_use: set[int] = set()
        self._driven: set[int] = set()  # guards that a framework's callback tells the losses
        self._given_up: set[int] = set()
        self._contained, self._warned = Contained(), set[str]()
        self._num = 0
        self._ours = False
        self._losses, self._census = Losses(self._marks, self._contained, self._backward), Census()
        self._now = _Now()
        self._undo: list[Callable[[], None]] = []
        self._pid = os.getpid()

    def start(self) -> None:
        """Install every wrapper and hook. A script that trains nothing does not notice them."""
        self._losses.listen()
        self._undo = [
            self._losses.remove,
            self._census.take(),
            wrap_attribute(Optimizer, "__init__", self._build),
            wrap_attribute(Guard, "__init__", self._build_guard),
            wrap_attribute(GradScaler, "step", self._scaler_steps),
            wrap_clipping(self._clipped, self._contained),
            watch_frameworks(self),
            own_hook(register_optimizer_step_pre_hook(self._stepping)).remove,
            own_hook(register_optimizer_step_post_hook(self._stepped)).remove,
        ]

    # -- attaching guards ----------------------------------------------------------------------------------------

    def _build(
        self, inner: Callable[Concatenate[Optimizer, P], None], optimizer: Optimizer, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        inner(optimizer, *args, **kwargs)
        self._contain("finding a model", self._built, optimizer)

    def _built(self, optimizer: Optimizer) -> None:
        """An optimizer was built: find its model, and guard it when that is first called to train."""
        self.seen.built[type(optimizer).__name__] += 1
        if self._num + len(self._alive()) >= MAX_GUARDS:
            return
        self._waiting.append(weakref.ref(optimizer))
        self._first_calls = [one for one in self._first_calls if one.waiting and one.model() is not None]
        owners = owners_of(params_of(optimizer), self._census.modules())
        self._early[id(optimizer)] = copies_of(owners[-1])
        for model in owners:
            loose = isinstance(model, Parts)  # never called itself: its parts are
            for part in model.children() if loose else [model]:
                if loose or not any(one.model() is part for one in self._first_calls):
                    called = functools.partial(self._called, model) if loose else self._called
                    self._first_calls.append(FirstCall(part, called))

    def _called(self, model: nn.Module, part: nn.Module | None = None) -> None:
        """A model that some optimizer moves is called to train: guard it with all optimizers that move it.

        Of nested modules the outermost is called first. It has the buffers that no optimizer knows of.
        """
        if any(is_lazy(p) for p in model.parameters()):
            return  # this call gives them their shapes: there is nothing to measure yet
        mine = {id(p) for p in model.parameters()}
        theirs = [o for o in self._alive() if any(id(p) in mine for p in params_of(o))]
        held = [id(p) for p in params_of(*theirs)]
        # If one optimizer wraps the other (SAM), the first step shows which one is stepped.
        if theirs and len(held) == len(set(held)):
            self._contain("guarding a model", self._guard, model, theirs)

    def _alive(self) -> list[Optimizer]:
        found = [o for ref in self._waiting if (o := ref()) is not None]
        return [o for o in found if not is_guarded(o)]

    def attach(self, model: nn.Module, optimizer: Any, **found: Any) -> Guard | None:
        """Guard a training that a framework drives, and whose losses it tells; None if that fails."""
        optimizers = self._contain("guarding a training", labelled, optimizer) or {}
        guard = self._contain("guarding a training", self._guard, model, list(optimizers.values()), found)
        if guard is not None:
            self._driven.add(id(guard))
        return guard

    def validated(self, metrics: Mapping[str, Any]) -> None:
        """Tell the guard that was made last what a validation found."""
        guard = next(reversed(list(self._guards.values())), None)
        name = loss_name(key for key, value in metrics.items() if is_number(value))
        if guard is not None and name is not None:
            others = {k.replace("/", "_"): v for k, v in metrics.items() if k != name and is_number(v)}
            guard.validate(metrics[name], **others)

    @property
    def mode(self) -> str:
        """The mode of the guards to come."""
        given = {name: self._settings.get(name) for name in ("preset", "mode")}
        return resolve(self._settings.get("config"), **given).mode

    @property
    def rejects(self) -> bool:
        """Whether the guards that are open reject an update that is not finite."""
        configs = [guard.config for guard in set(self._guards.values())]
        return bool(configs) and all(config.mode != "observe" and config.reject_nonfinite for config in configs)

    @property
    def num_steps(self) -> int:
        """How many steps the guards that are open have seen."""
        return sum(lane.attempts for guard in set(self._guards.values()) for lane in guard.lanes.values())

    def _guard(
        self, model: nn.Module, optimizers: list[Optimizer], found: Mapping[str, Any] | None = None
    ) -> Guard | None:
        self._enter_process()
        if self._num >= MAX_GUARDS or not optimizers:
            return None
        self._num += 1
        if self._num == MAX_GUARDS:
            log.warning("%d models are guarded; models whose optimizers are built from now on are not", MAX_GUARDS)
        self._retire(optimizers)
        self._on_begin([])
        training = GuardedTraining(type(getattr(model, "_orig_mod", model)).__name__)
        given = optimizers[0] if len(optimizers) == 1 else optimizers
        settings = {
            **(found or {}),
            **self._settings,
            "sinks": [*self._settings.get("sinks", ()), *self._sinks(), training],
        }
        resume = settings.pop("resume", False)
        if settings.get("checkpoint") is not None and (why := refusal(model)):
            log.warning("no checkpoints of %s: %s", training.model, why)
            settings["checkpoint"], resume = None, False
        if settings.get("checkpoint") is not None and not shares_parameters(model):
            settings["checkpoint"] = folder_of_rank(settings["checkpoint"])
        if settings.get("checkpoint") is not None and self._num > 1:  # one folder for each training
            settings["checkpoint"] = settings["checkpoint"] / f"training-{self._num}"
        self._ours = True
        try:
            guard = Guard.attach(model, given, **settings)
        finally:
            self._ours = False
        if resume and (snapshot := guard.resume()) is not None:
            log.warning("%s continues from %s; the script itself starts over", training.model, snapshot.path.name)
        training.run_dir, training.recorder = guard.run_dir, guard.recorder
        self._include_buffers(guard, model, optimizers)
        self._trainings[id(guard)] = training
        for one in optimizers:
            self._guards[id(one)] = guard
        self._marked = None
        self._waiting = [ref for ref in self._waiting if (o := ref()) is not None and id(o) not in self._guards]
        if not all(isinstance(o, Optimizer) for o in optimizers) and not self._is_alive(model):
            self._kept.append(guard)  # neither its optimizer nor a model that is called holds a reference to it
        # It may be collected with its optimizer (in a sweep): the record is then completed from what was counted.
        when_collected(guard, self._ended, id(guard))
        self._on_begin([training])
        return guard

    def _is_alive(self, model: nn.Module) -> bool:
        return any(known is model for known in self._census.modules())

    def _enter_process(self) -> None:
        """Replace the guards of the parent in a forked child, which must not write the parent's records."""
        if os.getpid() == self._pid:
            return
        self._pid = os.getpid()
        for guard in set(self._guards.values()):
            self._contain("abandoning a guard of the parent process", guard.abandon)
        self._guards.clear()
        self._marked = None
        self._trainings.clear()
        self._theirs.clear()
        self._kept.clear()
        self._given_up.clear()
        self._num = 0
        for name in ("checkpoint", "resume"):
            self._settings.pop(name, None)  # two processes cannot save to one folder
        self._on_fork()

    def _include_buffers(self, guard: Guard, model: nn.Module, optimizers: list[Optimizer]) -> None:
        """Guard the buffers of modules that nobody optimizes, too, with their values from before the first forward."""
        guarded = [lane.optimizer for g in self._guards.values() for lane in g.lanes.values()]
        owned = {id(p) for p in params_of(*self._alive(), *guarded, *optimizers)}
        shadow = guard.buffers
        shadow.include(bystanders(model, owned, self._census.modules()))
        for one in optimizers:
            shadow.go_back_to(self._early.pop(id(one), []))

    def _build_guard(
        self,
        inner: Callable[..., None],
        guard: Guard,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: object,
        *args: object,
        **kw: Any,
    ) -> None:
        """The script builds a guard itself: ours is closed, and the findings of theirs are reported, too."""
        if self._ours:
            inner(guard, model, optimizer, *args, **kw)
            return
        theirs = self._contain("making room for a guard", labelled, optimizer) or {}
        for mine in {self._guards[id(o)] for o in theirs.values() if id(o) in self._guards}:
            self._close(mine)
        training = GuardedTraining(_name_of(model), own=True)
        inner(guard, model, optimizer, *args, **{**kw, "sinks": [*kw.get("sinks", ()), training]})
        training.run_dir, training.recorder = guard.run_dir, guard.recorder
        self._theirs.append(training)
        self._on_begin([training])

    def _retire(self, optimizers: list[Optimizer]) -> None:
        """Close the guards of optimizers that new ones replace, so that one stage is one record.

        If the old one is stepped again, both are in use: it gets another guard, and neither is closed again.
        """
        new = {id(p) for p in params_of(*optimizers)}
        for guard in set(self._guards.values()):
            old = [o for o in guard._optimizers.values() if id(o) not in self._both_in_use]
            if any(id(p) in new for p in params_of(*old)):
                self._both_in_use.update(id(o) for o in (*old, *optimizers))
                self._close(guard)

    # -- during training -----------------------------------------------------------------------------------------

    @uncompiled
    def _stepping(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Before any optimizer's step and its own hooks: guard it if nobody has yet, and pass its losses on."""
        now = self._now
        if now.depth and (self._contain("looking at the stack", steps_on_stack) or 0) > 1:
            now.depth += 1
            return  # an optimizer that steps another inside its own step makes one step
        now.depth = 1
        try:
            if self._last_guard(optimizer) is None or os.getpid() != self._pid:
                self._contain("guarding an optimizer", self._first_stepped, optimizer)
            self._note_losses(optimizer)
        except Exception as error:
            self._failed("noting losses", error)

    def _last_guard(self, optimizer: Optimizer) -> Guard | None:
        """The guard of the optimizer that was stepped last, if it is this one: looking it up costs more."""
        last = self._last
        guard = None if last is None or last[0]() is not optimizer else last[1]()
        return None if guard is None or guard.closed else guard

    def _first_stepped(self, optimizer: Optimizer) -> None:
        """Another optimizer is stepped than last time: guard it if nobody has yet."""
        if id(optimizer) not in self._guards or os.getpid() != self._pid or optimizer not in GUARDED:
            self._lane_of(optimizer)
        if (guard := self._guards.get(id(optimizer))) is not None and optimizer in GUARDED:
            self._last = weakref.ref(optimizer), weakref.ref(guard)

    @uncompiled
    def _stepped(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        now = self._now
        now.depth = max(now.depth - 1, 0)
        if not now.depth:
            try:
                self._losses.ended(closure=len(args) > 1 or kwargs.get("closure") is not None)
            except Exception as error:
                self._failed("ending a step", error)

    def _scaler_steps(
        self,
        inner: Callable[Concatenate[GradScaler, Optimizer, P], R],
        scaler: GradScaler,
        optimizer: Optimizer,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        lane = self._contain("guarding an optimizer", self._lane_of, optimizer)
        if lane is None:
            return inner(scaler, optimizer, *args, **kwargs)
        if lane.scaler is None:
            lane.use_scaler(scaler)
        before = lane.attempts
        out = inner(scaler, optimizer, *args, **kwargs)
        if lane.attempts == before:  # an optimizer that is not fused is not called at all on an overflow
            self._contain("counting a skipped step", self._skipped, lane)
        return out

    def _skipped(self, lane: Lane) -> None:
        self._note_losses(lane.optimizer)
        lane.skipped()
        self._losses.ended(closure=False)

    def _note_losses(self, optimizer: Optimizer) -> None:
        guard = self._last_guard(optimizer) or self._guards.get(id(optimizer))
        if guard is None:
            return
        observe: Callable[[Tensor], None] = guard.observe
        if id(optimizer) in self._losses.rivals:
            observe = functools.partial(guard.observe, moving=1.0)
        told = id(guard) in self._driven
        for loss in self._losses.take(id(optimizer), id(guard)):
            if told:
                continue
            try:
                observe(loss)
            except Exception as error:
                self._failed("noting a loss", error)

    def _backward(self) -> None:
        """`backward` was called on a loss. If there is no PyTorch optimizer, look for other kinds of optimizers."""
        self.seen.num_backwards += 1
        num = self.seen.num_backwards
        if not self.seen.built and not self._guards and num & (num - 1) == 0:  # the 1st, 2nd, 4th time, and so on
            self._contain("looking for optimizers", self._look_for_lookalikes)

    def _look_for_lookalikes(self) -> None:
        for one in lookalikes():
            self.seen.lookalikes.add(f"{type(one).__module__}.{type(one).__qualname__}")
            if can_be_guarded(one) and not is_guarded(one) and id(one) not in self._given_up:
                self._lane_of(one)
                if id(one) in self._guards:
                    self._undo.append(wrap_method_of(one, "step", self._step_of(weakref.ref(one))))

    def _step_of(self, ref: weakref.ref[Optimizer]) -> Callable[Concatenate[Callable[P, R], P], R]:
        """Wrap the step of an optimizer that is not from PyTorch, and so has no step hooks."""
        me = weakref.ref(self)

        def step(inner: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
            auto_guard, optimizer = me(), ref()
            if auto_guard is not None and optimizer is not None:
                auto_guard._contain("noting losses", auto_guard._note_losses, optimizer)
            out = inner(*args, **kwargs)
            if auto_guard is not None:
                closure = bool(args) or kwargs.get("closure") is not None
                auto_guard._contain("ending a step", auto_guard._losses.ended, closure)
            return out

        return step

    def _marks(self) -> dict[int, object]:
        marked = None if self.seen.num_backwards % RENEW_EVERY == 0 else self._marked
        if marked is None:
            lanes = [lane for guard in set(self._guards.values()) for lane in guard.lanes.values()]
            marked = self._marked = {id(lane.optimizer): marked_params(lane.optimizer) for lane in lanes}
        return {key: mark_of(params) for key, params in marked.items()}

    def _lane_of(self, optimizer: Optimizer) -> Lane | None:
        self._enter_process()
        optimizer = innermost(optimizer)
        if not is_guarded(optimizer) and id(optimizer) not in self._given_up:
            self._given_up.add(id(optimizer))  # tried once: what fails now fails again
            self._guard(self._found(optimizer), [optimizer])
            self._given_up.discard(id(optimizer))
        guard = self._guards.get(id(optimizer))
        return None if guard is None else next(v for v in guard.lanes.values() if v.optimizer is optimizer)

    def _found(self, optimizer: Optimizer) -> nn.Module:
        """The model of an optimizer that is stepped before a call of its model was seen."""
        owners = owners_of(params_of(optimizer), self._census.modules())
        if (compiled := seen_from_outside(owners)) is not None:
            return compiled
        unseen = any(one.model() is owners[0] for one in self._first_calls if one.waiting)
        return uncalled(owners[0]) if unseen else owners[0]  # unseen: it was called inside compiled code

    def _clipped(self, params: list[Tensor], norm: Tensor | float) -> bool:
        """The script clips: the guard that has these parameters notes the norm before it."""
        answers = [guard.clipping(params, norm) for guard in set(self._guards.values())]
        return any(answers)

    def _contain(self, what: str, function: Callable[[*Ts], R], *args: *Ts) -> R | None:
        """Call our own code so that its failure never ends the script; each failure is logged once."""
        try:
            return function(*args)
        except Exception as error:
            self._failed(what, error)
        return None

    def _failed(self, what: str, error: Exception) -> None:
        """Something of ours failed, outside of training. The end that a policy wants is none of that."""
        if isinstance(error, TrainingStopped):
            raise error
        if not isinstance(error, TrimtabError):
            self._contained.report(what, error)
        elif str(error) not in self._warned:
            self._warned.add(str(error))
            log.warning("not guarded: %s", error)

    # -- ending --------------------------------------------------------------------------------------------------

    @property
    def trainings(self) -> list[GuardedTraining]:
        """The trainings that have not ended, those with a guard of the script's own included."""
        return [*self._trainings.values(), *self._theirs]

    def finish(self, reason: str = "closed") -> None:
        """Close every guard, and undo every wrapper and hook."""
        if os.getpid() != self._pid:
            return
        for guard in set(self._guards.values()):
            self._close(guard, reason)
        for one in self._first_calls:
            one.close()
        self.stop_watching()
        for training in self._theirs:
            if training.recorder is not None and not training.reason:
                training.recorder.flush()
            self._on_end(training)
        self._theirs.clear()
        wait_for_finished()

    def stop_watching(self) -> None:
        """Undo every wrapper and hook of `start`. Guards stay as they are, and `start` goes on with them."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _close(self, guard: Guard, reason: str = "closed") -> None:
        for key in [k for k, g in self._guards.items() if g is guard]:
            del self._guards[key]
        self._marked = None
        try:
            self._contain("closing a guard", guard.close, reason)
        except TrainingStopped as stop:
            log.warning("%s", stop)
        self._ended(id(guard))

    def _ended(self, key: int) -> None:
        """A guard was closed, or collected unclosed: complete its record and report its end."""
        self._marked = None  # nothing of ours keeps its parameters
        self._driven.discard(key)
        training = self._trainings.pop(key, None)
        if training is not None:
            training.ended()
            self._on_end(training)


def _name_of(model: nn.Module | Mapping[str, nn.Module]) -> str:
    """The class name of a model, or those of several models together."""
    models = model.values() if isinstance(model, Mapping) else [model]
    return ", ".join(type(getattr(one, "_orig_mod", one)).__name__ for one in models)


def folder_of_rank(folder: Path) -> Path:
    """Where a process saves that holds all of its model: each has its own random numbers and place in the data."""
    rank = os.environ.get("RANK", "0")
    return folder / f"rank{rank}" if rank.isdigit() and rank != "0" else folder
