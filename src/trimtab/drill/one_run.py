"""One run of a user's training, with or without a guard, with or without a fault: the loop that is put to the test."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.checks.drive import Options, _follow, _wants_closure, amp_dtype, as_loss
from trimtab.checks.target import Target
from trimtab.checks.target_steps import endless, raw_loss
from trimtab.core.contain import Contained
from trimtab.core.errors import InputError, TrainingStopped
from trimtab.core.types import Finding
from trimtab.drill.after import fingerprint, number_of, place, sick
from trimtab.drill.outcome import Fault, NotApplicableError, Result, Task, Told
from trimtab.guard.guard import Guard
from trimtab.run.discover import marks_of, params_of
from trimtab.run.patch_training import Losses, wrap_clip_grad_norm


class Run:
    """A training loop. Every method below `one_step` is a part that a fault may replace on the instance."""

    def __init__(self, target: Target, task: Task, fault: Fault | None = None) -> None:
        self.target, self.task, self.fault = target, task, fault
        self.model, self.optimizers, self.scaler = target.model, target.optimizers, target.scaler
        self.onset = 0 if fault is not None and fault.from_start else task.onset
        self.theirs = task.theirs  # whether step_fn steps by itself; None until the first step has shown it
        self.step, self.accumulate = 0, 1
        self.extra: dict[str, Any] = {}  # what a fault wants to remember
        self.losses: list[Any] = []
        self.told: list[Told] = []
        self.guard: Guard | None = None
        self._batches = endless(target)
        self._amp = amp_dtype(target, Options())
        self.by_closure = any(_wants_closure(one) for one in self.optimizers)
        self._undo: list[Callable[[], object]] = []

    def begin(self) -> None:
        """Make everything ready, the guard at last; a fault of the wiring is there before it."""
        self.model.train()
        if self.fault is not None and self.fault.from_start:
            self.fault.inject(self)
        if self.task.guarded:
            kept = {"scaler": self.scaler, "ema": self.target.ema, "loader": self.target.loader}
            self.guard = Guard.attach(
                self.model, self.target.optimizer, mode=self.task.mode, run_dir=False, on_finding=self._hear, **kept
            )

    def train(self) -> Result:
        """Run all steps. An exception in one ends the run, as it would a user's."""
        began, error, reason = time.perf_counter(), "", ""
        try:
            self.begin()
            for step in range(self.task.num_steps):
                self.step = step
                if self.fault is not None and step == self.onset and not self.fault.from_start:
                    self.fault.inject(self)
                self.one_step()
        except NotApplicableError as no:
            reason = str(no)
        except (InputError, TrainingStopped) as raised:
            error = f"{type(raised).__name__}: {raised}"
        except Exception as raised:
            error = f"{type(raised).__name__}: {' '.join(str(raised).split())[:300]}{place(raised)}"
            with suppress(RuntimeError):  # a device that has failed may fail again
                if self.guard is not None:
                    self.guard.__exit__(type(raised), raised, raised.__traceback__)
        result = Result(error=error, reason=reason, theirs=bool(self.theirs), broken=True)
        with suppress(RuntimeError):
            self.end()
            result = replace(result, broken=False, sick=tuple(sick(self.target)), mark=fingerprint(self.model))
        return replace(
            result,
            losses=tuple(number_of(loss) for loss in self.losses),
            told=tuple(self.told),
            rejected=0 if self.guard is None else self.guard.rejected,
            seconds=time.perf_counter() - began,
        )

    def end(self) -> None:
        """Take leave: the guard judges what is still under way."""
        self.unlisten()
        if self.guard is not None:
            self.guard.close()

    # -- one step ------------------------------------------------------------------------------------------------

    def one_step(self) -> None:
        """Draw, forward, backward, step: or all of it by the user's own function."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.theirs is None and self.target.step_fn is None:
                self.theirs = False
            if self.by_closure and self.theirs is False:
                self._one_closure()
            elif self.theirs is None:
                self._first()
            elif self.theirs:
                self._whole(self.draw())
            else:
                self._one()

    def _one(self) -> None:
        self.zero_grad()
        for _ in range(self.accumulate):
            batch = self.draw()
            loss = self.forward(batch)
            self.backward(loss)
            self.tell(loss, batch)
        self.losses.append(loss.detach())
        self.update()
        self.follow()

    def _one_closure(self) -> None:
        batch, seen = self.draw(), list[Tensor]()

        def closure() -> Any:
            self.zero_grad()
            loss = self.forward(batch)
            self.backward(loss)
            seen.append(loss.detach())
            return loss

        if self.guard is not None:
            self.guard.observe(batch=batch)
        for one in self.optimizers:
            one.step(closure)
        self.losses.append(seen[0])
        self.follow()

    def _first(self) -> None:
        """The first call of a `step_fn`: what it leaves behind says whether backward and step are its own."""
        batch, stepped = self.draw(), list[bool]()
        self._listen()
        hook = register_optimizer_step_pre_hook(lambda *_: stepped.append(True))
        try:
            loss = self._whole(batch)
        finally:
            hook.remove()
        grads = (p.grad for one in self.optimizers for p in params_of(one))
        self.theirs = bool(stepped) or any(grad is not None for grad in grads)
        if not self.theirs:
            self.unlisten()
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise InputError("step_fn returned no loss with a gradient and made no step; expected one or the other")
            self.backward(loss)
            self.tell(loss, batch)
            self.update()
            self.follow()

    def _whole(self, batch: Any) -> Any:
        if not self._undo:
            self._listen()
        if self.guard is not None:
            self.guard.observe(batch=batch)
        loss = self.forward(batch)
        self.losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        return loss

    # -- parts ---------------------------------------------------------------------------------------------------

    def draw(self) -> Any:
        """The next batch."""
        return next(self._batches)

    def forward(self, batch: Any) -> Any:
        """The loss of a batch."""
        with self._precision():
            return as_loss(raw_loss(self.target, batch))

    def backward(self, loss: Tensor) -> None:
        """Gradients, scaled where there is a scaler."""
        whole = loss if self.scaler is None else self.scaler.scale(loss)
        whole.backward()

    def tell(self, loss: Tensor, batch: Any) -> None:
        """Tell the guard what hooks cannot see."""
        if self.guard is not None:
            self.guard.observe(loss=loss, batch=batch)

    def update(self) -> None:
        """One step of every optimizer."""
        for one in self.optimizers:
            if self.scaler is None:
                one.step()
            else:
                self.scaler.unscale_(one)
                self.scaler.step(one)
        if self.scaler is not None:
            self.scaler.update()

    def zero_grad(self) -> None:
        """Drop the gradients of the step before."""
        for one in self.optimizers:
            one.zero_grad()

    def follow(self) -> None:
        """Move the schedule and the average."""
        _follow(self.target)

    # -- listening -----------------------------------------------------------------------------------------------

    def _hear(self, finding: Finding) -> None:
        severity = finding.severity.name.lower()
        what = {"code": finding.code, "name": finding.name, "message": finding.message, "severity": severity}
        self.told.append(Told(step=finding.step, said_at=self.step, **what))

    def _listen(self) -> None:
        """Hear the losses and the norms of a loop that is not ours, as `trimtab run` does."""
        if self._undo or self.guard is None:
            return
        contained = Contained()
        losses = Losses(lambda: marks_of(self.optimizers), contained)
        losses.listen()
        hook = register_optimizer_step_pre_hook(lambda one, *_: self._pass_on(losses, one))
        self._undo = [losses.remove, hook.remove, wrap_clip_grad_norm(self._clipped, contained)]

    def unlisten(self) -> None:
        """Hear no more of a loop that is not ours; the next step listens again."""
        while self._undo:
            self._undo.pop()()

    def _pass_on(self, losses: Losses, optimizer: Any) -> None:
        if self.guard is not None and any(optimizer is one for one in self.optimizers):
            for loss in losses.take(id(optimizer), id(self.guard)):
                self.guard.observe(loss=loss)

    def _clipped(self, params: list[Tensor], norm: Tensor | float) -> bool:
        mine = {id(p) for p in params}
        live = [p for one in self.optimizers for p in params_of(one) if p.grad is not None]
        if self.guard is not None and live and self.scaler is None and all(id(p) in mine for p in live):
            self.guard.observe(norm_before=norm)
        return self.task.mode != "observe"

    @contextmanager
    def _precision(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._amp is not None:
                device = next(self.model.parameters()).device.type
                stack.enter_context(torch.autocast(device, dtype=self._amp))
            yield
