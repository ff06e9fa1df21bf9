"""Where trimtab meets the loop: hooks around `optimizer.step`, its closure included, and around a GradScaler that skips
it."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.optim import Optimizer

from trimtab.core.contain import Contained
from trimtab.core.errors import TrimtabError
from trimtab.guard.protect import Owned
from trimtab.sample.measure import reference as measure
from trimtab.sample.transfer import number
from trimtab.torchutil.optimizers import innermost, params_of
from trimtab.torchutil.patch import own_hook, wrap_method_of

Method = TypeVar("Method", bound=Callable[..., Any])
_OPTIMIZER_FILE = inspect.getfile(Optimizer)


class StepObserver(Protocol):
    """What a seam calls: before and after every step, and when a scaler skipped one."""

    @property
    def attempts(self) -> int:
        """How many steps it has seen."""
        ...

    def before(self) -> None:
        """Gradients are ready; the step comes next."""
        ...

    def after(self) -> None:
        """The step is over."""
        ...

    def skipped(self) -> None:
        """A GradScaler decided not to step."""
        ...

    def closure_begins(self) -> None:
        """A closure is called."""
        ...

    def told(self, loss: object) -> None:
        """A closure returned this loss."""
        ...

    def release(self) -> bool:
        """Give withheld gradients back; True if this step's update was rejected."""
        ...

    def revoked(self) -> None:
        """A closure-driven step ended in non-finite weights and was undone."""
        ...

    def abandon(self) -> None:
        """Undo whatever was begun: the step goes through unguarded."""
        ...


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as compiled code may call it: the graph ends before it and goes on after it.

    That costs no more than PyTorch's own break in every optimizer's step.
    """
    disabled: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def uncompiled(method: Method) -> Method:
    """A method that a compiled function may call: it never becomes part of a graph."""

    held: dict[str, Callable[..., Any]] = {}  # made once: PyTorch 2.6 compiles again for each new function it meets

    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> Any:
        if torch.compiler.is_compiling():
            if "outside" not in held:
                held["outside"] = outside_graphs(method)
            return held["outside"](*args, **kwargs)
        return method(*args, **kwargs)

    return cast("Method", call)


def steps_on_stack(optimizer: object = None) -> int:
    """How many calls of this optimizer's `step`, or of any one's, are under way: frames that run PyTorch's hooks."""
    num = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if "wrapper" in code.co_name and code.co_filename == _OPTIMIZER_FILE:
            given = frame.f_locals
            of = given.get("self") if "self" in given else (given.get("args") or (None,))[0]
            num += optimizer is None or of is optimizer
        frame = frame.f_back
    return num


class StepHooks:
    """The hooks on one optimizer; `remove` leaves no trace.

    They are the outermost frames of ours in a step: if anything fails behind them, whatever was begun is undone and the
    step goes through unguarded. Errors that trimtab raises on purpose pass.
    """

    def __init__(self, optimizer: object, observer: StepObserver, contained: Contained) -> None:
        self._optimizer = optimizer
        self._observer, self._contained = observer, contained
        self._closures = ClosureGuard(optimizer, contained)
        self._undo: list[Callable[[], None]] = []
        self._depth = 0  # of calls of `step` under way
        self._pre_outside, self._post_outside = outside_graphs(self._pre), outside_graphs(self._post)
        if isinstance(optimizer, Optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks"):
            self._undo.append(own_hook(optimizer.register_step_pre_hook(self._pre)).remove)
            self._undo.append(own_hook(optimizer.register_step_post_hook(self._post)).remove)
        else:
            self._undo.append(wrap_method_of(optimizer, "step", self._step))

    def _pre(self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():  # nothing of ours becomes part of a compiled step
            return self._pre_outside(optimizer, args, kwargs)
        try:
            # PyTorch wraps `step` of every class that was ever instantiated, so a subclass that calls `super().step()`
            # runs the hooks twice. A step that raised left its depth behind, but nothing on the stack.
            if self._depth and steps_on_stack(self._optimizer) > 1:
                self._depth += 1
                return None
            self._depth = 1
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is None:
                self._observer.before()
                return None
            return self._with_closure(closure, args, kwargs)
        except TrimtabError:
            raise
        except Exception as error:
            self._failed("measuring a step", error)
            return None

    def _post(self, optimizer: object, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            self._post_outside(optimizer, args, kwargs)
            return
        try:
            if self._depth > 1:
                self._depth -= 1
                return
            self._depth = 0
            if self._closures.owned is not None:
                self._closures.finish(self._observer)
            self._observer.after()
        except TrimtabError:
            raise
        except Exception as error:
            self._failed("finishing a step", error)

    def _with_closure(self, closure: Callable[[], Any], args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
        guarded = self._closures.wrap(closure, self._observer)
        if len(args) > 1:
            return (args[0], guarded, *args[2:]), kwargs
        return args, {**kwargs, "closure": guarded}

    def _failed(self, what: str, error: Exception) -> None:
        self._contained.report(what, error)
        self._contained.call("cleaning up after a failure", self._observer.abandon)

    def _step(self, inner: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """For a class that only looks like an optimizer: the same hooks around its `step`."""
        optimizer = self._optimizer
        changed = self._pre(optimizer, (optimizer, *args), kwargs)
        if changed is not None:
            (_, *args), kwargs = changed
        try:
            out = inner(*args, **kwargs)
        except BaseException:
            self._depth = 0
            raise
        self._post(optimizer, (optimizer, *args), kwargs)
        return out

    def remove(self) -> None:
        """Take every hook off."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._depth = 0


class ScalerHook:
    """Sees the steps that a GradScaler skips: an optimizer that is not fused is then never called at all."""

    def __init__(self, scaler: object, observers: Mapping[int, StepObserver], contained: Contained) -> None:
        self._observers, self._contained = observers, contained
        self._undo = wrap_method_of(scaler, "step", self._step)

    def _step(self, inner: Callable[..., Any], optimizer: object, *args: object, **kwargs: object) -> Any:
        found = self._contained.call("finding a scaled optimizer", self._find, optimizer)
        out = inner(optimizer, *args, **kwargs)
        if found is not None:
            self._contained.call("counting a skipped step", self._skipped, *found)
        return out

    def _find(self, optimizer: object) -> tuple[StepObserver, int] | None:
        observer = self._observers.get(id(innermost(optimizer)))
        return None if observer is None else (observer, observer.attempts)

    def _skipped(self, observer: StepObserver, before: int) -> None:
        if observer.attempts == before:
            try:
                observer.skipped()
            except Exception:
                observer.abandon()
                raise

    def remove(self) -> None:
        """Give the scaler its own step back."""
        self._undo()


class ClosureGuard:
    """Wraps the closures of one optimizer.

    torch.optim's classes call it once, before anything else (LBFGS excepted): gating after that one call is exact.
    Others may call it several times or move weights first (LBFGS's line search, SAM). They are copied before the step
    and put back if it ends in non-finite weights. A class that is seen to call once, first, is not copied again.
    """

    def __init__(self, optimizer: Any, contained: Contained) -> None:
        self._optimizer, self._contained = optimizer, contained
        kind = type(optimizer)
        self._calls_once = kind.__module__.startswith("torch.optim") and "LBFGS" not in kind.__name__
        self._learning = not self._calls_once and "LBFGS" not in kind.__name__
        self.owned: Owned | None = None  # what a step with a closure may have to be put back
        self._calls = 0
        self._moved_first = False

    def wrap(self, closure: Callable[[], Any], observer: StepObserver) -> Callable[[], Any]:
        """The closure the optimizer gets to call."""
        params = params_of(self._optimizer)
        self.owned = None if self._calls_once else Owned(self._optimizer, params)
        self._calls, self._moved_first = 0, False
        versions = [p._version for p in params] if self._learning else []

        def guarded() -> Any:
            if self._calls == 0 and self._learning:
                self._moved_first = versions != [p._version for p in params]
            if self._calls == 0:
                self._contained.call("entering a closure", observer.closure_begins)
            loss = closure()
            self._calls += 1
            if self._calls == 1:
                self._contained.call("measuring a step", self._called, loss, observer)
            return loss

        return guarded

    @staticmethod
    def _called(loss: object, observer: StepObserver) -> None:
        try:
            observer.told(loss)
            observer.before()
        except Exception:
            observer.abandon()
            raise

    def finish(self, observer: StepObserver) -> None:
        """After the step: put everything back if it ended in non-finite weights, and learn how the class behaves."""
        owned, self.owned = self.owned, None
        if owned is None:
            return
        rejected = observer.release()
        norm = number(measure.total(measure.wide_norms([measure.plain(p) for p in params_of(self._optimizer)])))
        if rejected or not math.isfinite(norm):
            owned.restore()
            if not rejected:
                observer.revoked()
        elif self._learning and self._calls == 1 and not self._moved_first:
            self._calls_once, self._learning = True, False
        elif self._learning and self._calls > 1:
            self._learning = False
