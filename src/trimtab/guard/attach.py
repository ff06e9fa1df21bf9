"""Where a guard is attached: what can be guarded, the lanes and hooks of each optimizer, and how to leave again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trimtab.checkpoint.loader import Quarantine
from trimtab.core.config import Config
from trimtab.core.contain import Contained
from trimtab.core.errors import InputError
from trimtab.core.screen import Screen
from trimtab.core.types import Decision, Sample, Verdict
from trimtab.guard.batches import Batches
from trimtab.guard.buffers import BufferShadow
from trimtab.guard.hooks import ScalerHook, StepHooks
from trimtab.guard.lane import Lane
from trimtab.guard.provenance import Kept, Provenance
from trimtab.guard.ranks import Together
from trimtab.guard.resources import Resources, gpu_of
from trimtab.guard.rollback import RecentStates, Rollback
from trimtab.guard.trials import Trials
from trimtab.sample.observed import Observed
from trimtab.sample.probes.activations import ActivationTap
from trimtab.sample.probes.batch import Epoch
from trimtab.sample.probes.forward import ForwardTap
from trimtab.sample.probes.unstepped import LEAST, UnsteppedPasses
from trimtab.sample.reduce import Peers, Stages, is_one_of_several, is_replicated
from trimtab.sample.replicas import Replicas
from trimtab.sample.rows import Rows, parameter_names, roots_of
from trimtab.sample.watch import Watch
from trimtab.torchutil.optimizers import GUARDED, innermost, needs_closure, params_of
from trimtab.torchutil.patch import own_hook

MIN_EPOCH = 8


def choose(optimizers: Mapping[str, object], wanted: object, closure: bool) -> list[Any]:
    """The optimizers a step is for: of those meant by `wanted`, none may miss a closure it needs."""
    chosen = _meant(optimizers, wanted)
    for one in chosen:
        if not closure and needs_closure(one):
            raise InputError(
                f"{type(one).__name__} needs a closure and got a loss; call guard.step(closure), where closure() "
                "zeroes the gradients, computes the loss, calls backward() and returns the loss"
            )
    return chosen


def _meant(optimizers: Mapping[str, object], wanted: object) -> list[Any]:
    """The only one there is; of several one of them, a wrapper of one, its key, or "all"."""
    known = ", ".join(repr(k) for k in optimizers)
    if wanted is None:
        if len(optimizers) == 1:
            return list(optimizers.values())
        first = next(iter(optimizers))
        raise InputError(
            f"this guard has {len(optimizers)} optimizers ({known}) and the step does not say which it is for; call "
            f'guard.step(loss, optimizer={first!r}), or optimizer="all" to step every one of them'
        )
    if isinstance(wanted, str | int):
        if str(wanted) in optimizers:
            return [optimizers[str(wanted)]]
        if wanted == "all":
            return list(optimizers.values())
    elif any(one is innermost(wanted) for one in optimizers.values()):
        return [innermost(wanted)]
    raise InputError(
        f'optimizer {wanted!r} is not one of this guard\'s; expected one of them, a key of {known}, or "all"'
    )


def _length(loader: Any) -> int | None:
    """How many batches an epoch has; None where it does not say, or too few to tell a repetition from chance."""
    try:
        num = len(loader)
    except TypeError:
        return None
    return num if num >= MIN_EPOCH else None


def _both(first: Callable[[Any], object], second: Callable[[Any], object]) -> Callable[[Any], None]:
    def call(batch: object) -> None:
        first(batch)
        second(batch)

    return call


class Attachment:
    """The lanes of all optimizers and every hook that leads to them; `remove` takes every hook off again."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        *,
        scaler: object,
        ema: object,
        loader: object,
        quarantine: Quarantine,
        config: Config,
        lag: int,
        observed: Observed,
        contained: Contained,
        deliver: Callable[[Lane, Sample], Verdict | None],
        act: Callable[[Lane, Decision], None],
        absorb: Callable[[Lane, list[Sample]], None],
        passed: Callable[[Sample, int], None],
        screens: Mapping[str, Screen],
        instead: Callable[[int], str],
        step_fn: Callable[[Any], Any] | None = None,
        keep_incident: Kept | None = None,
    ) -> None:
        self._model, self.shadow = model, BufferShadow(model)
        moved = [p for p in params_of(*optimizers.values()) if p.requires_grad]
        self._unstepped = UnsteppedPasses(moved, self._never_stepped, contained)
        self.provenance = None
        if config.trace:
            self.provenance = Provenance(
                model,
                list(optimizers.values()),
                step_fn=step_fn,
                observed=observed,
                shadow=self.shadow,
                loader=loader,
                lag=lag,
                contained=contained,
                kept=keep_incident,
            )
        called = None if self.provenance is None else self.provenance.called
        tap = self._tap = ForwardTap(model, self._forward_begins, contained, self._unstepped, called)
        tap.batch.epoch = Epoch(_length(loader))
        activations = ActivationTap(model, contained) if config.activations else None
        self.lanes: dict[str, Lane] = {}
        weight = next(iter(params_of(*optimizers.values())), None)
        self._resources = Resources(None if weight is None else gpu_of(weight.device))
        self.rollback, batches, trials = None, None, None
        together = is_one_of_several() and (config.stages or is_replicated(model))
        peers = Peers(model, acts=config.mode == "act", stages=config.stages) if together else None
        self._stages = Stages(model) if config.stages and together else None
        replicas = None if peers is None else Replicas(model)
        tap.batch.compares = peers is not None
        if config.mode == "act":
            self.rollback = Rollback(RecentStates(model, optimizers, ema, self.lanes, config.policy, instead))
            num_tried = config.policy.trial_batches if config.policy.trial_steps else 0
            batches = Batches(loader, lag, quarantine, least=num_tried)
            if num_tried:
                trials = Trials(
                    model,
                    list(optimizers.values()),
                    config,
                    step_fn=step_fn,
                    ema=ema,
                    observed=observed,
                    batches=batches,
                )
        observed.on_loss, observed.on_batch = tap.loss, tap.told if batches is None else _both(tap.told, batches.told)
        if self.provenance is not None:
            observed.on_batch = _both(observed.on_batch, self.provenance.told)
        if trials is not None:
            observed.on_batch = _both(observed.on_batch, trials.told)
        for i, (label, one) in enumerate(optimizers.items()):
            self.lanes[label] = Lane(
                one,
                label=label,
                config=config,
                lag=lag,
                rows=self._row_maker(one, label, optimizers, with_others=i == 0),
                observed=observed,
                shadow=self.shadow,
                tap=tap,
                watch=Watch(
                    model,
                    one,
                    tap,
                    ema=ema,
                    optimizers=list(optimizers.values()),
                    first=i == 0,
                    activations=activations,
                    contained=contained,
                ),
                contained=contained,
                deliver=deliver,
                act=act,
                absorb=absorb,
                passed=passed,
                screen=screens.get(label),
                scaler=scaler,
                rollback=self.rollback,
                batches=batches if i == 0 else None,
                peers=peers,
                together=None if peers is None or config.mode != "act" else Together(peers),
                provenance=self.provenance,
                trials=trials,
                replicas=replicas,
                resources=self._resources,
            )
        self._undo = [StepHooks(lane.optimizer, lane, contained).remove for lane in self.lanes.values()]
        if scaler is not None:
            by_optimizer = {id(lane.optimizer): lane for lane in self.lanes.values()}
            self._undo.append(ScalerHook(scaler, by_optimizer, contained).remove)
        for root in roots_of(model):
            hook = root.register_forward_pre_hook(tap, with_kwargs=True)
            self._undo.append(own_hook(hook, listed=False).remove)
        self._undo += [tap.remove, self._unstepped.remove]
        if activations is not None:
            self._undo.append(activations.remove)
        GUARDED.update(optimizers.values())
        for lane in self.lanes.values():
            contained.call("preparing the first step", lane.prepare)

    def _forward_begins(self) -> None:
        """The first training forward after a step: what comes of it are gradients of the weights there are now."""
        self._resources.forward_begins()
        if not self.shadow.is_empty:
            self.shadow.renew()
        for lane in self.lanes.values():
            lane.forward_begins()

    @property
    def in_step(self) -> bool:
        """Whether the model was called for training since the last step."""
        return self._tap.num_forwards > 0

    def _never_stepped(self, num: int) -> None:
        next(iter(self.lanes.values())).never_stepped(num)

    def finish(self) -> None:
        """The run is over: if gradients were computed and no step was ever made, that is said."""
        self._unstepped.finish(LEAST)

    def _row_maker(
        self, optimizer: Any, label: str, optimizers: Mapping[str, Any], *, with_others: bool
    ) -> Callable[[], Rows]:
        def make() -> Rows:
            moved = {id(p) for p in params_of(*optimizers.values())}
            # Parameters that no optimizer moves are weighed by the first lane: their norm is part of the whole.
            others = [p for p in self._model.parameters() if id(p) not in moved] if with_others else []
            names = parameter_names(self._model)
            return Rows(optimizer, names, label=label, others=others, stages=self._stages)

        return make

    def also_remove(self, undo: Callable[[], None]) -> None:
        """Call this, too, when everything is taken off."""
        self._undo.append(undo)

    def remove(self) -> None:
        """Leave no trace on the model, the optimizers or the scaler."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        for lane in self.lanes.values():
            lane.multiplier.remove()
            lane.watch.remove()
            GUARDED.discard(lane.optimizer)
