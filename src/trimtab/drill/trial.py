"""One run of a user's training, with or without a guard, with or without a fault: the loop that is put to the test.

After it: what is left of a run when it is over, and what a guard costs (guarded and unguarded steps in turn).
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.core.contain import Contained
from trimtab.core.errors import InputError, TrainingStopped
from trimtab.core.types import Finding
from trimtab.doctor.batch_tensors import tensor_hash
from trimtab.doctor.observed_step import Options, amp_dtype, as_loss, update_schedule_and_ema
from trimtab.doctor.target import Target, backward, endless, raw_loss
from trimtab.drill.score import Alarm, Fault, NotApplicableError, Result, Task
from trimtab.guard.guard import Guard
from trimtab.guard.loop_clipping import wrap_clipping
from trimtab.guard.loop_losses import Losses
from trimtab.run.discover import mark_of, marked_params
from trimtab.torchutil.optimizers import needs_closure, params_of


class Run:
    """A training loop. Every method below `one_step` is a part that a fault may replace on the instance."""

    def __init__(self, target: Target, task: Task, fault: Fault | None = None) -> None:
        self.target, self.task, self.fault = target, task, fault
        self.model, self.optimizers, self.scaler = target.model, target.optimizers, target.scaler
        self.onset = 0 if fault is not None and fault.from_start else task.onset
        self.steps_itself = task.steps_itself  # whether step_fn steps by itself; None until the first step has shown it
        self.step, self.accumulate = 0, 1
        self.last_stepped: dict[int, int] = {}  # by optimizer: the step of the loop that it stepped in last
        self.losses: list[object] = []
        self.alarms: list[Alarm] = []
        self.guard: Guard | None = None
        self._batches = endless(target)
        self._amp = amp_dtype(target, Options())
        self.by_closure = any(needs_closure(one) for one in self.optimizers)
        self._undo: list[Callable[[], object]] = []

    def begin(self) -> None:
        """Prepare the run; a fault that is there from the start is injected before the guard is attached."""
        self.model.train()
        if self.fault is not None and self.fault.from_start:
            self.fault.inject(self)
        if self.task.guarded:
            kept = {"scaler": self.scaler, "ema": self.target.ema, "loader": self.target.loader}
            self.guard = Guard.attach(
                self.model,
                self.target.optimizer,
                mode=self.task.mode,
                run_dir=False,
                on_finding=self._note_alarm,
                **kept,
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
        result = Result(error=error, reason=reason, steps_itself=bool(self.steps_itself), broken=True)
        with suppress(RuntimeError):
            self.end()
            nonfinite, mark = tuple(nonfinite_parts(self.target)), fingerprint(self.model)
            result = replace(result, broken=False, nonfinite=nonfinite, mark=mark)
        return replace(
            result,
            losses=tuple(number_of(loss) for loss in self.losses),
            alarms=tuple(self.alarms),
            rejected=0 if self.guard is None else self.guard.rejected,
            seconds=time.perf_counter() - began,
        )

    def end(self) -> None:
        """Close the guard, which judges the steps that are still pending."""
        self.unlisten()
        if self.guard is not None:
            self.guard.close()

    # -- one step ------------------------------------------------------------------------------------------------

    def one_step(self) -> None:
        """Draw, forward, backward, step: or all of it by the user's own function."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.steps_itself is None and self.target.step_fn is None:
                self.steps_itself = False
            if self.by_closure and self.steps_itself is False:
                self._one_closure()
            elif self.steps_itself is None:
                self._first()
            elif self.steps_itself:
                self._whole(self.draw())
            else:
                self._one()

    def _one(self) -> None:
        self.zero_grad()
        for _ in range(self.accumulate):
            batch = self.draw()
            loss = self.forward(batch)
            self.backward(loss)
            self.observe(loss, batch)
        self.losses.append(loss.detach())
        self.update()
        self.after_step()

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
        self.after_step()

    def _first(self) -> None:
        """The first call of a `step_fn`: what it leaves behind says whether backward and step are its own."""
        batch, stepped = self.draw(), list[bool]()
        self._listen()
        hook = register_optimizer_step_pre_hook(lambda *_: stepped.append(True))
        try:
            loss = self._whole(batch)
        finally:
            hook.remove()
        grads = (p.grad for p in params_of(*self.optimizers))
        self.steps_itself = bool(stepped) or any(grad is not None for grad in grads)
        if not self.steps_itself:
            self.unlisten()
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise InputError("step_fn returned no loss with a gradient and made no step; expected one or the other")
            self.backward(loss)
            self.observe(loss, batch)
            self.update()
            self.after_step()

    def _whole(self, batch: object) -> object:
        if not self._undo:
            self._listen()
        if self.guard is not None:
            self.guard.observe(batch=batch)
        loss = self.forward(batch)
        self.losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        return loss

    # -- parts ---------------------------------------------------------------------------------------------------

    def draw(self) -> object:
        """The next batch."""
        return next(self._batches)

    def forward(self, batch: object) -> Any:
        """The loss of a batch."""
        with self._precision():
            return as_loss(raw_loss(self.target, batch))

    def backward(self, loss: Tensor) -> None:
        """Gradients, scaled where there is a scaler."""
        backward(loss if self.scaler is None else self.scaler.scale(loss))

    def observe(self, loss: Tensor, batch: object) -> None:
        """Pass to the guard what hooks cannot see."""
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

    def after_step(self) -> None:
        """Move the schedule and the average."""
        update_schedule_and_ema(self.target)

    # -- listening -----------------------------------------------------------------------------------------------

    def _note_alarm(self, finding: Finding) -> None:
        self.alarms.append(
            Alarm(
                code=finding.code,
                name=finding.name,
                step=finding.step,
                said_at=self.step,
                severity=finding.severity.name.lower(),
                message=finding.message,
            )
        )

    def _listen(self) -> None:
        """Hear the losses and the norms of a loop that is not ours, as `trimtab run` does."""
        if self._undo or self.guard is None:
            return
        contained = Contained()
        losses = Losses(lambda: {id(o): mark_of(marked_params(o)) for o in self.optimizers}, contained)
        losses.listen()
        hook = register_optimizer_step_pre_hook(lambda one, *_: self._pass_on(losses, one))
        self._undo = [losses.remove, hook.remove, wrap_clipping(self._clipped, contained)]

    def unlisten(self) -> None:
        """Stop listening to a loop that is not ours; the next step listens again."""
        while self._undo:
            self._undo.pop()()

    def _pass_on(self, losses: Losses, optimizer: Optimizer) -> None:
        if self.guard is not None and any(optimizer is one for one in self.optimizers):
            for loss in losses.take(id(optimizer), id(self.guard)):
                self.guard.observe(loss=loss)

    def _clipped(self, params: list[Tensor], norm: Tensor | float) -> bool:
        mine = {id(p) for p in params}
        live = [p for p in params_of(*self.optimizers) if p.grad is not None]
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


def place(error: BaseException) -> str:
    """Where an error was raised, in a few words."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def number_of(loss: object) -> float:
    """A loss as a number; NaN where it is none."""
    if not isinstance(loss, SupportsFloat):
        return math.nan
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def nonfinite_parts(target: Target) -> Iterator[str]:
    """What holds a number that is not finite.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> _ = nn.init.constant_(model.bias, math.nan)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> list(nonfinite_parts(Target(model=model, optimizer=optimizer, loader=[])))
        ['weights']
    """
    states = [entry for one in target.optimizers for entry in getattr(one, "state", {}).values()]
    parts: dict[str, list[object]] = {
        "weights": list(target.model.parameters()),
        "buffers": list(target.model.buffers()),
        "optimizer state": [v for entry in states if isinstance(entry, dict) for v in entry.values()],
        "average": list(target.ema.parameters()) if hasattr(target.ema, "parameters") else [],
    }
    for name, values in parts.items():
        real = [v.detach() for v in values if isinstance(v, Tensor) and v.is_floating_point() and not v.is_meta]
        if not all(bool(torch.isfinite(v).all()) for v in real):
            yield name


def fingerprint(model: nn.Module) -> str:
    """A short hash of all weights."""
    return hashlib.sha256(" ".join(str(tensor_hash(p)) for p in model.parameters()).encode()).hexdigest()[:16]


WARM_UP = 8
MAX_S = 40.0


def measure_cost(bare: Target, watched: Target, task: Task) -> Result:
    """How much longer guarded steps take than unguarded ones, in pairs, each in the other order than the one before."""
    began = time.perf_counter()
    runs = (Run(bare, replace(task, guarded=False)), Run(watched, task))
    busy = is_busy() and not next(bare.model.parameters()).is_cuda
    clock = time.thread_time if busy else time.perf_counter
    times: tuple[list[float], list[float]] = ([], [])
    for run in runs:
        run.begin()
    try:
        for step in range(WARM_UP + task.num_steps):
            for which in (0, 1) if step % 2 else (1, 0):
                seconds = _timed(runs[which], step, clock)
                if step >= WARM_UP:
                    times[which].append(seconds)
            if time.perf_counter() - began > MAX_S and len(times[0]) >= 5:
                break
    finally:
        for run in runs:
            run.end()
    percent, noise = added_cost(*times)
    return Result(
        cost_percent=percent,
        noise_percent=noise,
        step_ms=1e3 * median(times[0]),
        cpu_time=busy,
        seconds=time.perf_counter() - began,
    )


def added_cost(unguarded: Sequence[float], guarded: Sequence[float]) -> tuple[float | None, float]:
    """What the guard adds to a step, None where these times do not show it, and their noise; both in per cent.

    The difference of each pair counts, and it is only believed where its 95 % interval lies above zero: a guard does
    something, so a cost of zero or less is noise.

    Example:
        >>> percent, noise = added_cost([8.0, 8.0, 9.0, 8.0, 8.0, 7.0], [9.0, 9.0, 10.0, 9.5, 9.0, 8.0])
        >>> percent, noise
        (12.5, 18.75)
        >>> added_cost([8.0, 24.0, 8.0, 8.0, 24.0, 8.0], [8.0, 8.0, 24.0, 8.0, 8.0, 24.0])
        (None, 200.0)
    """
    step = median(unguarded)
    apart = sorted(b - a for a, b in zip(unguarded, guarded, strict=True))
    skip = max(int((len(apart) - 1.96 * math.sqrt(len(apart))) / 2), 0)  # the order statistics around the median
    low, high = apart[skip], apart[-1 - skip]
    return 100.0 * median(apart) / step if low > 0 else None, 100.0 * max(-low, high) / step


def is_busy() -> bool:
    """Whether more processes want to run than there are cores: then wall-clock time includes other processes."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load > (os.cpu_count() or 1)


def _timed(run: Run, step: int, clock: Callable[[], float]) -> float:
    run.step = step
    began = clock()
    run.one_step()
    if next(run.model.parameters()).is_cuda:
        torch.cuda.synchronize()
    seconds = clock() - began
    run.unlisten()  # or it would hear the other run, too
    return seconds
