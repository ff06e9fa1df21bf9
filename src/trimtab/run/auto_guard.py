"""Puts a guard on every optimizer of a script that knows nothing of it, and takes leave when the script ends."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.core.contain import Contained, when_collected
from trimtab.core.errors import TrainingStopped, TrimtabError
from trimtab.guard.guard import Guard
from trimtab.guard.hooks import on_stack, stepping_frame, uncompiled
from trimtab.record.recorder import wait_for_finished
from trimtab.run.discover import (
    Census,
    Door,
    Kept,
    bystanders,
    copies_of,
    lookalikes,
    marks_of,
    owners_of,
    quacks,
    seen_from_outside,
    still_scaled,
    uncalled,
)
from trimtab.run.guarded_training import Flight
from trimtab.run.patch_training import Losses, wrap_clip_grad_norm
from trimtab.sample.rows import Parts
from trimtab.torchutil.optimizer_argument import innermost, is_guarded, labelled
from trimtab.torchutil.param_groups import params_of
from trimtab.torchutil.patch import own_hook, wrap_attribute, wrap_method_of

log = logging.getLogger("trimtab")
MAX_GUARDS = 64
"""A script that builds more optimizers than this (one per inner loop, say) runs on with the later ones unguarded."""


class _Now(threading.local):
    """Which step a thread is in."""

    def __init__(self) -> None:
        self.outer: FrameType | None = None


class Seen:
    """What there was besides guarded optimizers: for a program in which there was nothing to guard."""

    def __init__(self) -> None:
        self.num_backwards = 0
        self.built: Counter[str] = Counter()
        self.lookalikes: set[str] = set()


class Pilot:
    """Sees optimizers being built and stepped. It knows guards only weakly: they live as long as their optimizers.

    `landed` gets the flight of every guard that has ended, `begun` is called before and after one begins (then with its
    flight), and `forked` in a child process that begins to train. `sinks` makes what each guard writes to besides.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        landed: Callable[[Flight], object],
        *,
        sinks: Callable[[], list[Any]] = list,
        begun: Callable[[list[Flight]], object] = lambda flights: None,
        forked: Callable[[], object] = lambda: None,
    ) -> None:
        self._settings, self._landed = dict(settings), landed
        self._sinks, self._begun, self._forked = sinks, begun, forked
        self.seen = Seen()
        self._theirs: list[Flight] = []
        self._kept: list[Guard] = []
        self._waiting: list[weakref.ref[Any]] = []
        self._doors: list[Door] = []
        self._guards: weakref.WeakValueDictionary[int, Guard] = weakref.WeakValueDictionary()  # by optimizer
        self._flights: dict[int, Flight] = {}  # by guard
        self._early: dict[int, list[Kept]] = {}  # buffers by optimizer, from the time it was built until it is guarded
        self._both_in_use: set[int] = set()
        self._given_up: set[int] = set()
        self._contained, self._told = Contained(), set[str]()
        self._num = 0
        self._ours = False
        self._losses, self._census = Losses(self._marks, self._contained, self._backward), Census()
        self._now = _Now()
        self._undo: list[Callable[[], None]] = []
        self._pid = os.getpid()

    def take_off(self) -> None:
        """Put everything in place. Nothing of it is felt by a script that trains nothing."""
        self._losses.listen()
        self._undo = [
            self._losses.remove,
            self._census.take(),
            wrap_attribute(Optimizer, "__init__", self._building),
            wrap_attribute(Guard, "__init__", self._their_own),
            wrap_attribute(torch.amp.GradScaler, "step", self._scaler_steps),
            wrap_clip_grad_norm(self._clipped, self._contained),
            own_hook(register_optimizer_step_pre_hook(self._stepping)).remove,
            own_hook(register_optimizer_step_post_hook(self._stepped)).remove,
        ]

    # -- getting on board ----------------------------------------------------------------------------------------

    def _building(self, inner: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        inner(optimizer, *args, **kwargs)
        self._contain("finding a model", self._born, optimizer)

    def _born(self, optimizer: Any) -> None:
        """An optimizer was built: find its model, and get on board when that is first called to train."""
        self.seen.built[type(optimizer).__name__] += 1
        if self._num + len(self._alive()) >= MAX_GUARDS:
            return
        self._waiting.append(weakref.ref(optimizer))
        self._doors = [door for door in self._doors if door.open and door.model() is not None]
        owners = owners_of(params_of(optimizer), self._census.modules())
        self._early[id(optimizer)] = copies_of(owners[-1])
        for model in owners:
            loose = isinstance(model, Parts)  # never called itself: its parts are
            for part in model.children() if loose else [model]:
                if loose or not any(door.model() is part for door in self._doors):
                    self._doors.append(Door(part, functools.partial(self._called, model) if loose else self._called))

    def _called(self, model: nn.Module, part: nn.Module | None = None) -> None:
        """A model that some optimizer moves is called to train: guard it together with all that move it.

        Of modules inside each other the outermost is called first. It has the buffers that no optimizer knows of.
        """
        if any(is_lazy(p) for p in model.parameters()):
            return  # this very call gives them their shapes: there is nothing to measure yet
        mine = {id(p) for p in model.parameters()}
        theirs = [o for o in self._alive() if any(id(p) in mine for p in params_of(o))]
        held = [id(p) for p in params_of(*theirs)]
        if theirs and len(held) == len(set(held)):  # one inside the other (SAM): which one is stepped will be seen
            self._contain("guarding a model", self._guard, model, theirs)

    def _alive(self) -> list[Any]:
        found = [o for ref in self._waiting if (o := ref()) is not None]
        return [o for o in found if not is_guarded(o)]

    def _guard(self, model: nn.Module, optimizers: list[Any]) -> None:
        self._enter_process()
        if self._num >= MAX_GUARDS:
            return
        self._num += 1
        if self._num == MAX_GUARDS:
            log.warning("%d models are guarded; those whose optimizers are built from now on are not", MAX_GUARDS)
        self._retire(optimizers)
        self._begun([])
        flight = Flight(type(getattr(model, "_orig_mod", model)).__name__)
        given = optimizers[0] if len(optimizers) == 1 else optimizers
        settings = {**self._settings, "sinks": [*self._settings.get("sinks", ()), *self._sinks(), flight]}
        resume = settings.pop("resume", False)
        if settings.get("checkpoint") is not None and self._num > 1:  # one folder for each of several trainings
            settings["checkpoint"] = settings["checkpoint"] / f"training-{self._num}"
        self._ours = True
        try:
            guard = Guard.attach(model, given, **settings)
        finally:
            self._ours = False
        if resume and (snapshot := guard.resume()) is not None:
            log.warning("%s goes on from %s; the script itself begins anew", flight.model, snapshot.path.name)
        flight.run_dir, flight.recorder = guard.run_dir, guard.recorder
        self._look_after_buffers(guard, model, optimizers)
        self._flights[id(guard)] = flight
        for one in optimizers:
            self._guards[id(one)] = guard
        self._waiting = [ref for ref in self._waiting if (o := ref()) is not None and id(o) not in self._guards]
        if not all(isinstance(o, Optimizer) for o in optimizers) and not self._is_alive(model):
            self._kept.append(guard)  # neither its optimizer nor a model that is called would keep it
        # Collected with its optimizer, in a sweep say: then the record is completed from what is known of it.
        when_collected(guard, self._gone, id(guard))
        self._begun([flight])

    def _is_alive(self, model: nn.Module) -> bool:
        return any(known is model for known in self._census.modules())

    def _enter_process(self) -> None:
        """A forked child has guards of its parent's, whose records are not its own to write: it gets new ones."""
        if os.getpid() == self._pid:
            return
        self._pid = os.getpid()
        for guard in set(self._guards.values()):
            self._contain("leaving a guard of the parent's", guard.abandon)
        self._guards.clear()
        self._flights.clear()
        self._theirs.clear()
        self._kept.clear()
        self._given_up.clear()
        self._num = 0
        for name in ("checkpoint", "resume"):
            self._settings.pop(name, None)  # two processes cannot save to one folder
        self._forked()

    def _look_after_buffers(self, guard: Guard, model: nn.Module, optimizers: list[Any]) -> None:
        """Those of modules that nobody optimizes, too; and as they were before the first forward pass."""
        guarded = [lane.optimizer for g in self._guards.values() for lane in g.lanes.values()]
        owned = {id(p) for p in params_of(*self._alive(), *guarded, *optimizers)}
        shadow = guard.buffers
        shadow.include(bystanders(model, owned, self._census.modules()))
        for one in optimizers:
            shadow.go_back_to(self._early.pop(id(one), []))

    def _their_own(
        self, inner: Callable[..., Any], guard: Guard, model: Any, optimizer: Any, *args: Any, **kw: Any
    ) -> None:
        """The script builds a guard by itself: it is welcome to, and ours steps aside. What it found is told, too."""
        if self._ours:
            inner(guard, model, optimizer, *args, **kw)
            return
        theirs = self._contain("making room for a guard", labelled, optimizer) or {}
        for mine in {self._guards[id(o)] for o in theirs.values() if id(o) in self._guards}:
            self._leave(mine)
        flight = Flight(_name_of(model), own=True)
        inner(guard, model, optimizer, *args, **{**kw, "sinks": [*kw.get("sinks", ()), flight]})
        flight.run_dir, flight.recorder = guard.run_dir, guard.recorder
        self._theirs.append(flight)
        self._begun([flight])

    def _retire(self, optimizers: list[Any]) -> None:
        """Close the guards of optimizers that new ones take over from, so that one stage is one record.

        If the old one is stepped again, both are in use: it gets another guard, and neither is retired any more.
        """
        new = {id(p) for p in params_of(*optimizers)}
        for guard in set(self._guards.values()):
            old = [o for o in guard._optimizers.values() if id(o) not in self._both_in_use]
            if any(id(p) in new for p in params_of(*old)):
                self._both_in_use.update(id(o) for o in (*old, *optimizers))
                self._leave(guard)

    # -- in flight -----------------------------------------------------------------------------------------------

    @uncompiled
    def _stepping(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before any optimizer's step, its own hooks included: nobody steps unguarded, and losses arrive in time."""
        if self._contain("looking at the stack", on_stack, self._now.outer):
            return  # an optimizer that steps another inside its own step makes one step
        self._now.outer = stepping_frame(sys._getframe(1))
        self._contain("guarding an optimizer", self._lane_of, optimizer)
        self._contain("noting losses", self._tell, optimizer)

    @uncompiled
    def _stepped(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if stepping_frame(sys._getframe(1)) is self._now.outer:
            self._now.outer = None
            self._contain("ending a step", self._losses.ended, len(args) > 1 or kwargs.get("closure") is not None)

    def _scaler_steps(self, inner: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
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

    def _skipped(self, lane: Any) -> None:
        self._tell(lane.optimizer)
        lane.skipped()
        self._losses.ended(closure=False)

    def _tell(self, optimizer: Any) -> None:
        guard = self._guards.get(id(optimizer))
        if guard is None:
            return
        told = {"moving": 1.0} if id(optimizer) in self._losses.rivals else {}
        for loss in self._losses.take(id(optimizer), id(guard)):
            self._contain("noting a loss", functools.partial(guard.observe, **told), loss)

    def _backward(self) -> None:
        """A loss was called backward on. Where no optimizer of PyTorch is about, something else may be one."""
        self.seen.num_backwards += 1
        num = self.seen.num_backwards
        if not self.seen.built and not self._guards and num & (num - 1) == 0:  # the 1st, 2nd, 4th time, and so on
            self._contain("looking for optimizers", self._look_for_lookalikes)

    def _look_for_lookalikes(self) -> None:
        for one in lookalikes():
            self.seen.lookalikes.add(f"{type(one).__module__}.{type(one).__qualname__}")
            if quacks(one) and not is_guarded(one) and id(one) not in self._given_up:
                self._lane_of(one)
                if id(one) in self._guards:
                    self._undo.append(wrap_method_of(one, "step", self._step_of(weakref.ref(one))))

    def _step_of(self, ref: weakref.ref[Any]) -> Callable[..., Any]:
        """Around the step of an optimizer that is none of PyTorch's: it has no hooks that would tell of it."""
        me = weakref.ref(self)

        def step(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            pilot, optimizer = me(), ref()
            if pilot is not None and optimizer is not None:
                pilot._contain("noting losses", pilot._tell, optimizer)
            out = inner(*args, **kwargs)
            if pilot is not None:
                closure = bool(args) or kwargs.get("closure") is not None
                pilot._contain("ending a step", pilot._losses.ended, closure)
            return out

        return step

    def _marks(self) -> dict[int, object]:
        return marks_of(lane.optimizer for guard in set(self._guards.values()) for lane in guard.lanes.values())

    def _lane_of(self, optimizer: Any) -> Any:
        self._enter_process()
        optimizer = innermost(optimizer)
        if not is_guarded(optimizer) and id(optimizer) not in self._given_up:
            self._given_up.add(id(optimizer))  # it is tried once; what goes wrong then goes wrong again
            self._guard(self._found(optimizer), [optimizer])
            self._given_up.discard(id(optimizer))
        guard = self._guards.get(id(optimizer))
        return None if guard is None else next(v for v in guard.lanes.values() if v.optimizer is optimizer)

    def _found(self, optimizer: Any) -> nn.Module:
        """The model of an optimizer that is stepped before its model was seen being called."""
        owners = owners_of(params_of(optimizer), self._census.modules())
        if (compiled := seen_from_outside(owners)) is not None:
            return compiled
        shut = any(door.model() is owners[0] for door in self._doors if door.open)
        return uncalled(owners[0]) if shut else owners[0]  # called, but in code that was compiled around it

    def _clipped(self, params: list[Tensor], norm: Tensor | float) -> bool:
        """The script clips: note the norm before it, where it is that of all that an optimizer moves."""
        mine = {id(p) for p in params}
        for guard in set(self._guards.values()):
            for lane in guard.lanes.values():
                live = [p for p in params_of(lane.optimizer) if p.grad is not None]
                if not any(id(p) in mine for p in live):
                    continue
                if all(id(p) in mine for p in live) and not still_scaled(lane):
                    self._contain("noting a norm", functools.partial(guard.observe, norm_before=norm))
                return bool(guard.config.mode != "observe" and guard.config.reject_nonfinite)
        return False

    def _contain(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Nothing of ours ends a script: a failure is told once. That training was stopped is no failure."""
        try:
            return self._contained.call(what, function, *args)
        except TrainingStopped:
            raise
        except TrimtabError as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                log.warning("not guarded: %s", error)
        return None

    # -- landing -------------------------------------------------------------------------------------------------

    @property
    def flights(self) -> list[Flight]:
        """Those that are under way, the program's own among them."""
        return [*self._flights.values(), *self._theirs]

    def land(self, reason: str = "closed") -> None:
        """Close every guard, and put PyTorch back as it was."""
        if os.getpid() != self._pid:
            return
        for guard in set(self._guards.values()):
            self._leave(guard, reason)
        for door in self._doors:
            door.close()
        for undo in self._undo:
            undo()
        self._undo.clear()
        for flight in self._theirs:
            if flight.recorder is not None and not flight.reason:
                flight.recorder.flush()
            self._landed(flight)
        self._theirs.clear()
        wait_for_finished()

    def _leave(self, guard: Guard, reason: str = "closed") -> None:
        for key in [k for k, g in self._guards.items() if g is guard]:
            del self._guards[key]
        try:
            self._contain("closing a guard", guard.close, reason)
        except TrainingStopped as stop:
            log.warning("%s", stop)
        self._gone(id(guard))

    def _gone(self, key: int) -> None:
        """A guard was closed, or collected unclosed: complete its record, and tell how it went."""
        flight = self._flights.pop(key, None)
        if flight is not None:
            flight.ended()
            self._landed(flight)


def _name_of(model: Any) -> str:
    """What a model is called: several together by all their names."""
    models = model.values() if isinstance(model, Mapping) else [model]
    return ", ".join(type(getattr(one, "_orig_mod", one)).__name__ for one in models)
