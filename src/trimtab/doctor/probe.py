"""Everything the checks share: the training, its data, its first steps under observation, and the experiments."""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.doctor.batch_tensors import Roles, fresh, roles_of
from trimtab.doctor.loader_scan import Scan, scan
from trimtab.doctor.loss_graph import LossFacts
from trimtab.doctor.observed_step import Options, in_order, make_call, trouble_of
from trimtab.doctor.recording import Call, Event, Failure, Watch
from trimtab.doctor.target import Scheduler, Target
from trimtab.sample.probes.wiring import parameter_at, split_twins, tied_pairs
from trimtab.torchutil.averaged_weights import average_mark
from trimtab.torchutil.optimizers import params_of, rates_of
from trimtab.torchutil.patch import wrap_on_object
from trimtab.torchutil.undo import remembered, untouched

MAX_CALLS = 40
SCAN_S, TRIAL_S = 1.5, 3.0
SLOW_S = 1.5  # a step that takes longer leaves no time for experiments, unless they were asked for
LOOK_AHEAD = 2_000
NUM_GRAPHS = 3
"""Calls whose graphs are read: they do not change from call to call."""
NOISE = 1e-6
"""Below this part of itself a change of a float32 loss is rounding."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overfit:
    """The losses of steps on one batch, again and again.

    A ratio is how far a step moves the weights, as a part of their size; the largest is that of the first few steps.
    """

    losses: tuple[float, ...]
    num_steps: int
    median_ratio: float
    largest_ratio: float
    norm: float

    @classmethod
    def of_calls(cls, calls: list[Call]) -> Overfit | None:
        """From the calls; None where fewer than three returned a loss."""
        losses = [c.loss for c in calls if c.failure is None and c.loss is not None]
        if len(losses) < 3:
            return None
        steps = [e for c in calls for e in c.of("step")]
        ratios = [e.facts["update_ratio"] for e in steps]
        return cls(
            losses=tuple(losses),
            num_steps=len(steps),
            median_ratio=sorted(ratios)[len(ratios) // 2] if ratios else 0.0,
            largest_ratio=max((v for v in ratios[:5] if math.isfinite(v)), default=0.0),
            norm=math.hypot(*steps[0].facts["gradients"].present.values()) if steps else 0.0,
        )

    @property
    def first(self) -> float:
        """The loss before the first step."""
        return self.losses[0]

    @property
    def last(self) -> float:
        """The loss at the end; where it ended in NaN, that."""
        return self.losses[-1]

    @property
    def num(self) -> int:
        """How many calls there were."""
        return len(self.losses)

    @property
    def fell(self) -> bool:
        """Whether it came down, and is down at the end."""
        late = [v for v in self.losses[len(self.losses) // 2 :] if math.isfinite(v)]
        if not late or not math.isfinite(self.last):
            return False
        slack = NOISE * max(abs(self.first), 1e-12)
        return sorted(late)[len(late) // 2] < self.first - slack

    @property
    def peak(self) -> float:
        """The highest loss, in units of the first; infinite where it was not finite."""
        top = max(v if math.isfinite(v) else math.inf for v in self.losses)
        return top / abs(self.first) if self.first else math.inf


class Probe:
    """One training under examination.

    `of_target` makes one that you use as a context: it runs the first steps, and at the end puts everything back.
    `of_recording` makes one of steps that were recorded elsewhere and cannot be run again.
    """

    def __init__(
        self,
        target: Target,
        options: Options,
        watch: Watch,
        *,
        schedulers: tuple[Scheduler, ...] = (),
        calls: Sequence[Call] = (),
        data: Scan | None = None,
        again: Callable[[], Target] | None = None,
        watched_only: str = "",
    ) -> None:
        self.target, self.options, self.watch, self.schedulers = target, options, watch, schedulers
        self.calls, self.scan = list(calls), Scan() if data is None else data
        self.again, self.watched_only = again, watched_only
        self.doctor_steps = not watched_only  # whether doctor runs backward and step, as step_fn does not
        self.nonfinite_at_start = self.split_twins = self.broken_ties = tuple[str, ...]()
        self.average_at_start: float | None = None
        self.num_ties = len(tied_pairs(target.model))
        self.rewind: Callable[[], None] = lambda: None
        self._stack = ExitStack()
        self._cache: dict[Hashable, Any] = {}
        self._began = time.perf_counter()

    @classmethod
    def of_target(
        cls, target: Target, options: Options | None = None, again: Callable[[], Target] | None = None
    ) -> Probe:
        """A training whose steps are yet to be run; `again` builds it a second time."""
        found = remembered(target, deep=True)
        schedulers = {id(s): s for s in (*found.schedulers, target.scheduler) if s is not None}
        optimizers = (*target.optimizers, *found.optimizers)
        watch = Watch(target.model, optimizers, schedulers.values(), num_graphs=NUM_GRAPHS)
        return cls(target, options or Options(), watch, schedulers=tuple(schedulers.values()), again=again)

    @classmethod
    def of_recording(
        cls,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        watch: Watch,
        options: Options,
        schedulers: Sequence[Scheduler],
    ) -> Probe:
        """A training whose steps were recorded, as a script made them."""
        calls = [c for c in watch.calls if c.events or c.failure is not None]
        for call in calls:
            call.note_losses()
        return cls(
            Target(model=model, optimizer=optimizers, loader=[], step_fn=lambda model, batch: None),
            options,
            watch,
            schedulers=tuple(schedulers),
            calls=calls,
            data=scan([tuple(c.inputs) for c in calls if c.inputs], budget_s=SCAN_S),
            watched_only="the training is a script: its steps cannot be made again",
        )

    def __enter__(self) -> Probe:
        self.rewind = self._stack.enter_context(untouched(self.target, deep=True))
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        self.nonfinite_at_start = tuple(n for n, t in tensors if holds_nonfinite(t))
        ties = tied_pairs(self.model)
        self.split_twins = tuple(split_twins(self.model))
        self.reseed()
        self.scan = scan(self.target.loader, budget_s=SCAN_S)
        self.average_at_start = average_mark(self.target.ema)
        self._observe()
        self.broken_ties = tuple(
            f"{a} and {b}" for a, b in ties if parameter_at(self.model, a) is not parameter_at(self.model, b)
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    # -- what is known without running anything ------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.target.model

    @cached_property
    def names(self) -> dict[int, str]:
        """Parameters by identity."""
        found = {id(p): f"a parameter of {tuple(p.shape)} outside the model" for p in self.held.values()}
        return found | {id(p): n for n, p in self.model.named_parameters()}

    @cached_property
    def held(self) -> dict[int, Tensor]:
        """What the optimizers hold, all that are known."""
        return {id(p): p for p in params_of(*self.optimizers)}

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Those of the target, and those that its step was seen to use."""
        known = {id(o): o for o in self.target.optimizers}
        stepped = {e.who for e in self.events("step")} | {e.who for e in self.events("scaler-step")}
        known |= {key: o for key, o in self.watch.optimizers.items() if key in stepped}
        return tuple(known.values())

    @cached_property
    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters of the model that want a gradient."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    # -- the observed steps --------------------------------------------------------------------------------------

    def _observe(self) -> None:
        """The first steps of the training, from where it stands."""
        doctor_steps: bool | None = None
        wanted = max(self.options.max_steps, 3)
        with self.watch.listening():
            for i in range(MAX_CALLS if self.scan.batches else 0):
                late = time.perf_counter() - self._began > 10.0
                if i >= wanted and (self.num_steps >= wanted or doctor_steps or late):
                    break
                call, done = make_call(
                    self.target, fresh(self.batch(i)), self.watch, self.options, doctor_steps=doctor_steps
                )
                call.average = average_mark(self.target.ema)
                self.calls.append(call)
                if call.failure is not None:
                    break
                doctor_steps = done
        self.doctor_steps = doctor_steps is not False

    @property
    def num_steps(self) -> int:
        """Optimizer steps that were seen."""
        return len(self.events("step")) + len(
            [e for e in self.events("scaler-step") if not any(s.who == e.who for s in self.calls[e.call].of("step"))]
        )

    def events(self, kind: str) -> list[Event]:
        """Events of one kind, of all observed calls."""
        return [e for call in self.calls for e in call.of(kind)]

    @property
    def through(self) -> list[Call]:
        """Calls that came to their end."""
        return [c for c in self.calls if c.failure is None]

    def batch(self, i: int) -> object:
        """One of the batches that were kept, in turn."""
        return self.scan.batches[i % len(self.scan.batches)]

    @cached_property
    def roles(self) -> Roles:
        """Which tensors of a batch are inputs, and which are targets."""
        given = self.calls[0].inputs if self.calls else []
        compared = self.calls[0].facts.target if self.calls else None
        return roles_of(self.batch(0), given, compared, by_contract=self.target.step_fn is None)

    @cached_property
    def failure(self) -> Failure | None:
        """The exception that ended the observed steps."""
        return next((c.failure for c in self.calls if c.failure is not None), None)

    @property
    def traces(self) -> tuple[str, ...]:
        """The traceback of each call that ended with an exception."""
        return tuple(c.failure.trace for c in self.calls if c.failure is not None)

    @cached_property
    def failed_as(self) -> str:
        """Its name; empty where every step came to its end."""
        if self.failure is None:
            return ""
        name = trouble_of(self.failure)
        forwards = self.calls[-1].of("forward")
        if name == "loss-detached" and forwards and not any(e.facts["grad"] for e in forwards):
            return "no-grad"
        return name

    @property
    def no_steps(self) -> str:
        """Why nothing can be said about steps; empty where something can."""
        if self.failure is not None and not self.num_steps:
            return f"the first step ended with {self.failure.kind}"
        return "" if self.num_steps else "no step was made"

    @cached_property
    def facts(self) -> LossFacts:
        """What the graph of the first loss says."""
        return next((c.facts for c in self.calls if c.facts.num_nodes or c.facts.kind), LossFacts())

    @cached_property
    def module_names(self) -> dict[int, str]:
        """Modules by identity."""
        return {id(m): n or type(m).__name__ for n, m in self.model.named_modules()}

    def modes_of(self, module: nn.Module) -> list[tuple[bool, bool]]:
        """For each call that used a module: whether it was in training mode, and whether gradients were on."""
        return [c.modules[id(module)] for c in self.calls if id(module) in c.modules]

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns; it is called once for each key."""
        if key not in self._cache:
            self._cache[key] = make()
        found: T = self._cache[key]
        return found

    # -- experiments ---------------------------------------------------------------------------------------------

    @property
    def step_s(self) -> float:
        """How long a step takes."""
        return min((c.seconds for c in self.through), default=0.0)

    @property
    def too_slow(self) -> str:
        """Why there are no experiments; empty where there are."""
        if self.watched_only:
            return self.watched_only
        if not self.through:
            return "no step came to its end"
        if self.step_s > SLOW_S and not self.options.full:
            return f"a step takes {self.step_s:.1f} s; --full runs it"
        return ""

    @property
    def no_experiments(self) -> str:
        """Why no experiment can be made on the steps; empty where one can."""
        return self.no_steps or self.too_slow

    def affordable(self, most: int, least: int = 3, seconds: float = TRIAL_S) -> int:
        """How many steps an experiment may take."""
        return most if self.options.full else max(least, min(most, int(seconds / max(self.step_s, 1e-4))))

    @contextmanager
    def trial(self, *, rates: bool = True) -> Iterator[None]:
        """From the beginning again, in training as it was, with the schedule standing at its peak; undone after."""
        self.rewind()
        self.reseed()
        with ExitStack() as stack:
            if rates and self.schedulers:
                set_rates(self.optimizers, self.peak_rates)
                for scheduler in self.schedulers:
                    stack.enter_context(frozen_schedule(scheduler))
            try:
                yield
            finally:
                self.rewind()

    def run(self, batches: Sequence[object], *, listen: bool = False, seeds: Sequence[int] | None = None) -> list[Call]:
        """Some calls, one per batch, ended by the first exception; each begins with its own seed where given."""
        watch = Watch(self.model, self.optimizers, num_graphs=0)
        calls: list[Call] = []
        with ExitStack() as stack:
            if listen or not self.doctor_steps:
                stack.enter_context(watch.listening())
            for i, batch in enumerate(batches):
                if seeds is not None:
                    self.reseed(seeds[i])
                call, _ = make_call(self.target, fresh(batch), watch, self.options, doctor_steps=self.doctor_steps)
                call.average = average_mark(self.target.ema)
                calls.append(call)
                if call.failure is not None:
                    break
        return calls

    @cached_property
    def peak_rates(self) -> list[list[float]]:
        """For every optimizer and group the highest rate that its schedule will reach in the steps ahead."""
        self.rewind()
        found = peaks(self.optimizers, self.schedulers, LOOK_AHEAD)
        self.rewind()
        return found

    def scale_rates(self, factor: float) -> None:
        """All learning rates times a factor, until the end of a trial."""
        set_rates(self.optimizers, current_rates(self.optimizers), factor)

    @cached_property
    def fixed(self) -> list[Call]:
        """One batch, again and again, with one seed: the loss of a fixed function under its own optimizer."""
        num = self.affordable(30, least=8)
        with self.trial():
            return self.run([self.batch(0)] * num, listen=True, seeds=[self.options.seed] * num)

    def overfit(self, factor: float = 1.0) -> Overfit | None:
        """Train on one batch at the training's own rate times a factor; None where the step returns no loss."""
        if factor == 1.0:
            return Overfit.of_calls(self.fixed)
        return self.cached(("overfit", factor), lambda: self._overfit_at(factor))

    def _overfit_at(self, factor: float) -> Overfit | None:
        num = self.affordable(20, least=6, seconds=1.5)
        with self.trial():
            self.scale_rates(factor)
            return Overfit.of_calls(self.run([self.batch(0)] * num, listen=True, seeds=[self.options.seed] * num))

    @cached_property
    def varied(self) -> list[Call]:
        """Some steps on the batches there are, in turn."""
        num = self.affordable(24, least=6)
        with self.trial():
            return self.run([self.batch(i) for i in range(num)], listen=True)

    def once(self, batch: object, seed: int = 0) -> Call:
        """One call on a batch from the very beginning."""
        with in_order(self.device), self.trial(rates=False):  # such calls are compared bit by bit
            return self.run([batch], listen=True, seeds=[seed])[0]

    def reseed(self, seed: int | None = None) -> None:
        """Seed every generator: with the seed of the options, or another."""
        for sow in (torch.manual_seed, random.seed, np.random.seed):
            sow(self.options.seed if seed is None else seed)


def holds_nonfinite(tensor: Tensor) -> bool:
    """Whether it holds NaN or Inf and is no mask of 0 and -inf."""
    if tensor.is_meta or not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
        return False
    return (
        bool(torch.isnan(tensor).any())
        or bool(tensor[torch.isfinite(tensor)].any())
        or bool((tensor == torch.inf).any())
    )


def current_rates(optimizers: Sequence[Optimizer]) -> list[list[float]]:
    """The rates of every optimizer and group, as they are."""
    return [rates_of(optimizer, wait=True) for optimizer in optimizers]


def peaks(optimizers: Sequence[Optimizer], schedulers: Sequence[Scheduler], num: int) -> list[list[float]]:
    """The highest rates within `num` steps of the schedules, which are not put back here."""
    top = current_rates(optimizers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for scheduler in schedulers:
            if hasattr(scheduler, "num_bad_epochs"):
                continue  # its step needs a loss
            try:
                for _ in range(num):
                    scheduler.step()
                    now = current_rates(optimizers)
                    top = [[max(a, b) for a, b in zip(x, y, strict=True)] for x, y in zip(top, now, strict=True)]
            except Exception:
                continue  # it ends before that, or wants arguments
    return top


def set_rates(optimizers: Sequence[Optimizer], rates: list[list[float]], factor: float = 1.0) -> None:
    """Put other rates in their place."""
    for optimizer, mine in zip(optimizers, rates, strict=True):
        for group, rate in zip(optimizer.param_groups, mine, strict=True):
            if isinstance(group.get("lr"), Tensor):
                group["lr"].fill_(rate * factor)
            elif "lr" in group:
                group["lr"] = rate * factor


@contextmanager
def frozen_schedule(scheduler: Scheduler) -> Iterator[None]:
    """A schedule whose steps do nothing."""
    undo = wrap_on_object(scheduler, "step", lambda inner, *args, **kwargs: None)
    try:
        yield
    finally:
        undo()
