"""Treatment trials: after going back, try a few changes on the recorded batches, and keep the one that helps most.

Everything that is tried is undone before the next: the state that was gone back to is bit-identical until the winner is
applied to it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.core.clipping import Agc, Clip
from trimtab.core.config import Config
from trimtab.core.types import Action, Outcome
from trimtab.guard.batches import Batches
from trimtab.guard.protect import clip_host, clip_units, judge
from trimtab.guard.rollback import Rollback
from trimtab.remedies.cut_lr import LrMultiplier
from trimtab.sample.measure import reference as measure
from trimtab.sample.observed import Observed, scalar_loss
from trimtab.sample.reduce import is_one_of_several
from trimtab.sample.transfer import number
from trimtab.sample.watch import Watch
from trimtab.torchutil.optimizers import needs_closure, scale_of
from trimtab.torchutil.patch import wrap_on_object
from trimtab.torchutil.undo import rng
from trimtab.trace.step_replay import cannot_run, undisturbed
from trimtab.trace.values import tensors_in

log = logging.getLogger("trimtab")
WORTH = 0.1
"""A change must end lower than a gentler one by this share of the loss before: a lower rate always ends a bit lower."""
FAR = 8.0
"""A batch stands out if its loss is this many deviations above the usual one."""
LEAST_SPREAD = 0.1
"""Of the usual loss: a smaller deviation is not believed, batches are few."""
LARGE = 5.0
"""The same by its gradient norm: so many times the largest usual one."""
MAX_MEASURED = 8
"""Batches that the loss is measured on after each trial."""
FACTORS = {"half_rate": 0.5, "tenth_of_rate": 0.1}
GO_BACK, SKIP_DATA, CLIP, RESET, FURTHER = "go_back", "skip_data", "clip", "reset_moments", "further"


class Tried(Protocol):
    """One optimizer under a guard, as trials see it."""

    label: str
    optimizer: Any
    scaler: Any
    rewound_at: int
    rollback: Rollback | None
    multiplier: LrMultiplier
    watch: Watch

    @property
    def clip_in_force(self) -> Clip:
        """How gradients are clipped now."""

    def clip_to(self, norm: float) -> None:
        """From now on, let no gradient norm above this through."""

    def went_back(self, at: int) -> None:
        """Note that an earlier state is in place."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # told apart by identity: tensors cannot be compared
class Held:
    """The batches of one step, by reference, and how often each of their tensors had been written to."""

    step: int
    batches: tuple[Any, ...]
    versions: tuple[int, ...]

    @property
    def is_intact(self) -> bool:
        """Whether nobody has written another batch into the same memory since."""
        return self.versions == _versions(self.batches)


def _versions(batches: Sequence[Any]) -> tuple[int, ...]:
    return tuple(0 if t.is_inference() else t._version for t in tensors_in(batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One change to try: its name, in words, and what it does to each step; `loss` is what it ended with."""

    name: str
    words: str
    factor: float = 1.0
    clip: float | None = None
    loss: float = math.nan

    @property
    def told(self) -> str:
        """Its result in words."""
        return f"{self.words}: {self.loss:.4g}" if math.isfinite(self.loss) else f"{self.words}: not finite"


class Trials:
    """Holds the last batches of a guard by reference, and makes the trials."""

    kind: ClassVar[str] = "trials"

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        config: Config,
        *,
        step_fn: Callable[[Any], Any] | None,
        ema: object,
        observed: Observed,
        batches: Batches,
    ) -> None:
        self._model, self._config, self._step_fn, self._ema = model, config, step_fn, ema
        self._observed, self._samples = observed, batches
        self._most = config.policy.trial_batches
        self._told: list[Any] = []
        self._held: deque[Held] = deque()
        self._won: set[str] = set()  # what was chosen since the trouble began, and did not end it
        self._rates_before: dict[str, Any] | None = None  # where the rate was held by the last trials
        self.running = False
        self._why_not = _why_not(optimizers, step_fn)
        if self._why_not:
            log.warning("policy.trial_steps is set, but no trials will be made: %s", self._why_not)

    # -- always on: references, nothing else -----------------------------------------------------------------------

    def told(self, batch: object) -> None:
        """The loop told a batch of the step that is coming."""
        if not self._why_not and len(self._told) < self._most:
            self._told.append(batch)

    def step_done(self, step: int) -> None:
        """The step is over: what was told belongs to it."""
        told, self._told = tuple(self._told), []
        if told:
            self._held.append(Held(step=step, batches=told, versions=_versions(told)))
        while sum(len(one.batches) for one in self._held) > self._most:
            self._held.popleft()

    # -- after a rewind --------------------------------------------------------------------------------------------

    def apply(self, action: Action, target: Tried, at: int) -> Outcome:
        """Try the changes and apply the best. Whatever goes wrong, what remains is the state that was gone back to."""
        if not action.args.get("back") and not action.args.get("again"):
            self._won.clear()
        held = [one for one in self._held if one.is_intact]
        why = self._why_not or cannot_run(self._model)
        if not why and is_one_of_several():
            why = "several processes train this model, and trials are made by one alone"
        if not why and target.rewound_at != at:
            why = "there was no state to go back to"
        if not why and len(held) < 2:
            lost = len(self._held) - len(held)
            overwritten = f" ({lost} more were written over since)" if lost else ""
            why = f"batches of {len(held)} steps are held{overwritten}; call guard.step(loss, batch=...) with new ones"
        if why:
            return Outcome(at=at, action=action, applied=False, detail=f"no trials: {why}")
        if action.args.get("again") and self._rates_before is not None:
            target.multiplier.load_state_dict(self._rates_before)  # the trouble went on at once: it was no help
        self._rates_before = None
        self.running = True
        try:
            with self._observed.ignoring():
                trial = _Trial(self._model, target, self._config, self._step_fn, self._ema, held, action)
                arms = trial.measured()
        except Exception as error:
            log.warning("a trial failed; the state that was gone back to stays", exc_info=error)
            what = f"a trial failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            return Outcome(at=at, action=action, applied=False, detail=f"{what}; the state that was gone back to stays")
        finally:
            self.running = False
        winner = best(arms, trial.usual_loss, self._won)
        self._won.add(winner.name)
        done = self._do(winner, target, trial, action, at)
        numbers = {f"loss_{arm.name}": arm.loss for arm in arms} | {f"kept_{winner.name}": 1.0}
        num = len(trial.sequence)
        told = "; ".join(f"{arm.told}{' (kept)' if arm is winner else ''}" for arm in arms)
        detail = (
            f"mean loss on recorded batches during and after {num} steps of each, "
            f"{trial.usual_loss:.4g} before them: {told}. {done}"
        )
        return Outcome(at=at, action=replace(action, args={**action.args, **numbers}), applied=True, detail=detail)

    def _do(self, winner: Arm, target: Tried, trial: _Trial, action: Action, at: int) -> str:
        """Apply the winner to the run; says what was done."""
        if winner.name == SKIP_DATA:
            num = sum(self._samples.put_aside(one.step)[0] for one in trial.odd)
            aside = f"{num} samples are in quarantine" if num else "which samples they hold is not known"
            return f"The batches of {_steps(trial.odd)} stand out; {aside}"
        if winner.name == CLIP and winner.clip is not None:
            target.clip_to(winner.clip)
            return f"Gradients are clipped to a norm of {winner.clip:.3g} from now on"
        if winner.name in FACTORS:
            self._rates_before = target.multiplier.state_dict()
            return _hold(target.multiplier, winner.factor)
        if winner.name == RESET:
            target.optimizer.state.clear()
            target.watch.renew()
            return "The optimizer's moments begin again"
        before, back = int(action.args["before"]), int(action.args["back"]) + 1
        reached = None
        if winner.name == FURTHER and target.rollback is not None:
            reached = target.rollback.memory.go_back(target.label, before, back)
            target.went_back(at)
        return "Nothing else is changed" if reached is None else f"The state is the one after step {reached.step}"


def best(arms: Sequence[Arm], usual: float, failed: Collection[str] = ()) -> Arm:
    """The finite arm with the lowest loss; the gentlest where the difference is small, the gentlest of all if none is.

    `arms` are sorted from the gentlest on. One that `failed` before is chosen only where no other is finite.

    Example:
        >>> arms = [Arm(name="go_back", words="", loss=0.52), Arm(name="clip", words="", loss=0.5)]
        >>> best(arms, usual=0.5).name
        'go_back'
        >>> best(arms, usual=0.05).name
        'clip'
    """
    finite = [arm for arm in arms if math.isfinite(arm.loss)]
    finite = [arm for arm in finite if arm.name not in failed] or finite
    if not finite:
        return arms[0]
    enough = min(arm.loss for arm in finite) + WORTH * (abs(usual) if math.isfinite(usual) else 0.0)
    return next(arm for arm in finite if arm.loss <= enough)


def _why_not(optimizers: Sequence[Any], step_fn: object) -> str:
    if step_fn is None:
        return "they need step_fn; give the guard step_fn=, which takes a batch, calls backward() and returns the loss"
    if len(optimizers) > 1:
        return f"this guard has {len(optimizers)} optimizers, and which of them a step is for is not known"
    if not isinstance(optimizers[0], Optimizer) or needs_closure(optimizers[0]):
        return f"{type(optimizers[0]).__name__} cannot be stepped by the guard alone"
    return ""


def _steps(held: Sequence[Held]) -> str:
    numbers = [str(one.step) for one in held]
    return f"step{'' if len(numbers) == 1 else 's'} {', '.join(numbers)}"


def _hold(multiplier: LrMultiplier, factor: float) -> str:
    """Hold the rates at a fraction of what they are, until the schedule itself comes below."""
    rates = multiplier.rates()  # a cut that is in force stays on top of it, as in the trial
    if any(map(math.isnan, rates)):  # only a device knows them
        return f"The learning rate is multiplied by {multiplier.cut(factor):.3g}, and recovers"
    multiplier.limit([rate * factor for rate in rates])
    return f"The learning rate ({max(rates):.3g}) is held at {max(rates) * factor:.3g}"


class _Trial:
    """The trials after one rewind: which batches stand out, what is tried, and what each ended with."""

    def __init__(
        self,
        model: nn.Module,
        target: Tried,
        config: Config,
        step_fn: Any,
        ema: object,
        held: Sequence[Held],
        action: Action,
    ) -> None:
        self._model, self._target, self._config, self._step_fn = model, target, config, step_fn
        self._ema, self._held = ema, list(held)
        self._before, self._back = int(action.args["before"]), int(action.args["back"])
        self._again = bool(action.args.get("again"))
        steps = int(action.args["steps"])
        recent = self._held[-steps:]
        self.sequence = [recent[i % len(recent)] for i in range(steps)]
        self.odd: list[Held] = []
        self.measured_on: list[Held] = []
        self.usual_loss = math.nan

    def measured(self) -> list[Arm]:
        """Every arm with the loss it ended with, the gentlest first; everything is as it was before."""
        used = [one.batches for one in self._held]
        roots = (self._step_fn, self._target.scaler, self._ema)
        optimizers = [self._target.optimizer]
        with undisturbed(self._model, *roots, optimizers=optimizers, batch=used) as undo, torch.enable_grad():
            same_numbers = rng()
            largest = self._look(undo)
            arms = []
            for arm in self._arms(largest):
                if arm.name != FURTHER or self._further():
                    losses = self._run(arm)
                    same_numbers()
                    arms.append(replace(arm, loss=fmean([*losses, *self._measure()])))
                undo()
            return arms

    def _look(self, undo: Callable[[], None]) -> float:
        """Find the batches that stand out where nothing is wrong with the weights; the largest usual norm."""
        seen = []
        for one in self._held:
            loss = self._gradients(one)
            seen.append((one, loss, judge(*self._norm(), self._config).norm))
            undo()
        known = [s for s in seen if s[0].step < self._before and math.isfinite(s[1]) and math.isfinite(s[2])]
        if len(known) < 3:
            known = [s for s in seen if math.isfinite(s[1]) and math.isfinite(s[2])]
        if not known:
            raise ValueError("no recorded batch gives a finite loss at the state that was gone back to")
        middle = median(s[1] for s in known)
        spread = max(1.4826 * median(abs(s[1] - middle) for s in known), LEAST_SPREAD * abs(middle))
        usual = [s for s in known if s[1] <= middle + FAR * spread]
        largest = max(s[2] for s in usual if s[2] <= LARGE * median(one[2] for one in usual))
        fine = [s for s in seen if s[1] <= middle + FAR * spread and s[2] <= LARGE * largest]
        self.odd = [s[0] for s in seen if s not in fine]
        self.measured_on = [s[0] for s in fine][-MAX_MEASURED:]
        self.usual_loss = fmean(s[1] for s in fine[-MAX_MEASURED:])
        return largest

    def _arms(self, largest: float) -> Iterator[Arm]:
        """What is tried, the gentlest first."""
        skip = Arm(name=SKIP_DATA, words="leave out the batches that stand out")
        if self._again and self._held[-1] in self.odd:  # the trouble goes on because the data does
            yield skip
            return
        yield Arm(name=GO_BACK, words="go back only")
        if any(one in self.odd for one in self.sequence):
            yield skip
        clip = self._target.clip_in_force
        plain = clip == Clip(norm=clip.norm, above=clip.above)
        if plain and largest > 0 and (clip.norm is None or largest < clip.norm):
            yield Arm(name=CLIP, words=f"clip gradients to {largest:.3g}", clip=largest)
        for name, factor in FACTORS.items():
            yield Arm(name=name, words=f"learning rate x{factor:g}", factor=factor)
        if self._target.optimizer.state:
            yield Arm(name=RESET, words="reset the optimizer's moments")
        yield Arm(name=FURTHER, words="go back one state further")

    def _further(self) -> bool:
        """Put the state before the one that was gone back to in place; False where there is none."""
        rollback, label = self._target.rollback, self._target.label
        if rollback is None:
            return False
        memory, before, back = rollback.memory, self._before, self._back
        if memory.would_reach(label, before, back + 1) == memory.would_reach(label, before, back):
            return False
        return memory.try_out(label, before, back + 1)

    def _run(self, arm: Arm) -> list[float]:
        """Make the steps of a trial: the losses of the usual batches among them.

        Updates that the guard would reject are rejected.
        """
        losses: list[float] = []
        if arm.name == RESET:
            self._target.optimizer.state.clear()
        sequence = self.sequence
        if arm.name == SKIP_DATA:
            good = [one for one in self.sequence if one not in self.odd] or self.measured_on
            sequence = [good[i % len(good)] for i in range(len(self.sequence))]
        for one in sequence:
            loss = self._gradients(one)
            losses += [] if one in self.odd else [loss]
            judged = judge(*self._norm(), self._config)
            if judged.reject:
                continue
            self._clip(arm, judged)
            with self._rates(arm.factor):
                self._target.optimizer.step()
        return losses

    def _measure(self) -> list[float]:
        """The losses of usual batches after it; NaN where a weight is not finite."""
        if not all(bool(torch.isfinite(p).all()) for p in self._model.parameters()):
            return [math.nan]
        return [self._gradients(one) for one in self.measured_on]

    # -- the parts of a step ---------------------------------------------------------------------------------------

    def _gradients(self, one: Held) -> float:
        """Forward and backward on the batches of one step: the mean loss. The gradients are unscaled."""
        for p in self._model.parameters():
            p.grad = None
        scaled: list[int] = []

        def scale(inner: Callable[..., Any], *args: object, **kwargs: object) -> Any:
            scaled.append(1)
            return inner(*args, **kwargs)

        with ExitStack() as stack:
            if self._target.scaler is not None:
                stack.callback(wrap_on_object(self._target.scaler, "scale", scale))
            told = [scalar_loss(self._step_fn(batch), strict=False) for batch in one.batches]
        by = scale_of(self._target.scaler)
        if scaled and by is not None and (grads := self._live()):
            for g in grads:
                measure.stored(g).div_(by.to(g.device) if isinstance(by, Tensor) else by)
        return fmean(float(loss) for loss in told)

    def _live(self) -> list[Tensor]:
        listed = (p for group in self._target.optimizer.param_groups for p in group["params"])
        return [p.grad for p in listed if p.grad is not None]

    def _norm(self) -> tuple[float, list[Tensor]]:
        plain = [measure.plain(g) for g in self._live()]
        return (number(measure.total(measure.norms(plain))) if plain else 0.0), plain

    def _clip(self, arm: Arm, judged: Any) -> None:
        """As the guard does it now, or to the limit that is tried."""
        clip = self._target.clip_in_force if arm.clip is None else Clip(norm=arm.clip)
        live, groups = self._live(), self._target.optimizer.param_groups
        if not clip or not live:
            return
        place = {id(g): i for i, g in enumerate(live)}
        members = [[place[id(p.grad)] for p in group["params"] if p.grad is not None] for group in groups]
        clip_host(judged, clip, live, measure.norms([measure.plain(g) for g in live]), groups, members)
        if isinstance(clip.adaptive, Agc):
            clip_units([p for group in groups for p in group["params"]], clip.adaptive)

    @contextmanager
    def _rates(self, factor: float) -> Iterator[None]:
        """Inside, the rates are those in force, times a factor."""
        multiplier, groups = self._target.multiplier, self._target.optimizer.param_groups
        kept = [group.get("lr") for group in groups]
        multiplier.apply()
        try:
            for group in groups:
                if "lr" in group and factor != 1.0:
                    group["lr"] = group["lr"] * factor
            yield
        finally:
            multiplier.undo()
            for group, rate in zip(groups, kept, strict=True):
                if rate is not None:
                    group["lr"] = rate
