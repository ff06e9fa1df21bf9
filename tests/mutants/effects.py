"""What a mutated program does wrong while it runs: each function stands where the program's own call stood.

A mutated program imports this module as `mutant`. `begin` sets, before the program starts, from which step on it goes
wrong. An effect is a function of this module, named in the program by its name, so that the program's text shows it.
Loss and data are left alone while a program evaluates itself: in the functions that `unmutated` decorates, and where no
gradients are recorded.
"""

from __future__ import annotations

import functools
import itertools
import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Batch = Any


class _Progress:
    """How far the run is: steps of each optimizer in the order of their first ones, and how often an effect was had."""

    def __init__(self) -> None:
        self.onset, self.evaluating, self.had = 0, 0, 0
        self.steps: dict[int, int] = {}
        self.kept: list[Any] = []  # optimizers stay alive, so that no other one gets their id
        self.onsets: list[int] | None = None


progress = _Progress()
ever = mmap.mmap(-1, 1)
"""Whether an effect was had, in this process or in one forked from it."""


def begin(onset: int) -> None:
    """Start counting; effects are had from the optimizer step `onset` on."""
    global progress
    progress = _Progress()
    progress.onset = onset
    ever[0] = 0


def report() -> dict[str, Any]:
    """How often an effect was had, and how many steps each optimizer had made before the first time."""
    return {"had": max(progress.had, ever[0]), "onsets": progress.onsets or []}


def wrong_now(*, training_only: bool = True) -> bool:
    """Whether an effect is due at this call."""
    if progress.evaluating or (training_only and not torch.is_grad_enabled()):
        return False
    if max(progress.steps.values(), default=0) < progress.onset:
        return False
    if progress.onsets is None:
        progress.onsets = list(progress.steps.values())
    progress.had += 1
    ever[0] = 1
    return True


def unmutated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have no effect in a function of the program that evaluates."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        progress.evaluating += 1
        try:
            return function(*args, **kwargs)
        finally:
            progress.evaluating -= 1

    return inner


def had(times: int) -> bool:
    """Whether this is the first of so many effects, to have one only now and then."""
    return progress.had % times == 1


# ---------------------------------------------------------------------------------------------------------- the step


def step(effect: str, optimizer: Any, *args: Any) -> Any:
    """`optimizer.step()`, with what happens around it."""
    around = EFFECTS[effect] if effect else None
    if around is not None and wrong_now(training_only=False):
        out = around(optimizer, *args)
    else:
        out = optimizer.step(*args)
    return stepped(optimizer, out)


def stepped(optimizer: Any, out: Any) -> Any:
    """Count a step; one that is only passed on to an inner optimizer is counted there."""
    if not hasattr(optimizer, "optimizer"):
        if id(optimizer) not in progress.steps:
            progress.kept.append(optimizer)
        progress.steps[id(optimizer)] = progress.steps.get(id(optimizer), 0) + 1
    return out


def params_of(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def zero_first(optimizer: Any, *args: Any) -> Any:
    optimizer.zero_grad()
    return optimizer.step(*args)


def twice(optimizer: Any, *args: Any) -> Any:
    optimizer.step(*args)
    return optimizer.step(*args)


def seldom(optimizer: Any, *args: Any) -> Any:
    return optimizer.step(*args) if had(20) else None


def never(optimizer: Any, *args: Any) -> Any:
    return None


def rate_grows(optimizer: Any, *args: Any) -> Any:
    for group in optimizer.param_groups:
        group["lr"] *= 1.05
    return optimizer.step(*args)


def moments_lost(optimizer: Any, *args: Any) -> Any:
    optimizer.state.clear()
    return optimizer.step(*args)


def moments_shrunk(optimizer: Any, *args: Any) -> Any:
    """A state restored with the wrong scale, every 40 steps."""
    if had(40):
        for state in optimizer.state.values():
            for name in ("exp_avg_sq", "square_avg", "sum"):
                if isinstance(state.get(name), Tensor):
                    state[name].mul_(1e-8)
            if isinstance(state.get("momentum_buffer"), Tensor):
                state["momentum_buffer"].mul_(1e3)
    return optimizer.step(*args)


@torch.no_grad()
def weights_disturbed(optimizer: Any, *args: Any) -> Any:
    """Something else writes to the weights, every 20 steps."""
    out = optimizer.step(*args)
    if had(20):
        for p in params_of(optimizer):
            p.add_(torch.randn_like(p) * p.abs().mean())
    return out


@torch.no_grad()
def weights_reloaded(optimizer: Any, *args: Any) -> Any:
    """The first weights are loaded again, every 30 steps."""
    out = optimizer.step(*args)
    params = params_of(optimizer)
    old = first_weights.setdefault(id(optimizer), [p.clone() for p in params])
    if progress.had % 30 == 0:
        for p, w in zip(params, old, strict=True):
            p.copy_(w)
    return out


first_weights: dict[int, list[Tensor]] = {}


@torch.no_grad()
def weights_rounded(optimizer: Any, *args: Any) -> Any:
    """Weights kept in a format of eight bits of precision."""
    out = optimizer.step(*args)
    for p in params_of(optimizer):
        p.copy_(p.bfloat16())
    return out


@torch.no_grad()
def gradients_flushed(optimizer: Any, *args: Any) -> Any:
    """Gradients that went through half precision without being scaled."""
    for p in params_of(optimizer):
        if p.grad is not None:
            p.grad.copy_((p.grad * 1e-6).half().float() * 1e6)
    return optimizer.step(*args)


@torch.no_grad()
def gradients_reversed(optimizer: Any, *args: Any) -> Any:
    for p in params_of(optimizer):
        if p.grad is not None:
            p.grad.neg_()
    return optimizer.step(*args)


def part_freezes(optimizer: Any, *args: Any) -> Any:
    params = params_of(optimizer)
    for p in params[: len(params) // 2]:
        p.requires_grad_(False)
        p.grad = None
    return optimizer.step(*args)


scaler: Any = None


def scaled_step(optimizer: Any, *args: Any) -> Any:
    """A loss scaler whose scale is far too large and hardly ever falls: every step is skipped."""
    out = the_scaler().step(optimizer, *args)
    the_scaler().update()
    return out


def the_scaler() -> Any:
    global scaler
    if scaler is None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=0.9999)
    return scaler


# ------------------------------------------------------------------------------------------------------- the backward


def backward(effect: str, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    """`loss.backward()`."""
    if wrong_now():
        EFFECTS[effect](loss, *args, **kwargs)
    else:
        loss.backward(*args, **kwargs)


def backward_twice(loss: Tensor, *args: Any, **kwargs: Any) -> None:
    loss.backward(*args, **{**kwargs, "retain_graph": True})
    loss.backward(*args, **kwargs)


def backward_tiny(loss: Tensor, *args: Any, **kwargs: Any) -> None:
    (loss * 1e-12).backward(*args, **kwargs)


def backward_scaled(loss: Tensor, *args: Any, **kwargs: Any) -> None:
    the_scaler().scale(loss).backward(*args, **kwargs)


# ------------------------------------------------------------------------------------------------ making the optimizer


def made(effect: str, kind: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Any:
    """The construction of an optimizer."""
    wrong_now(training_only=False)
    groups = list(params)
    return EFFECTS[effect](kind, groups, args, kwargs)


def _tensors(groups: list[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for one in groups:
        found += list(one["params"]) if isinstance(one, dict) else [one]
    return found


def _map(groups: list[Any], keep: Callable[[list[Tensor]], list[Tensor]]) -> list[Any]:
    """The same groups with other tensors in them."""
    if groups and isinstance(groups[0], dict):
        return [{**group, "params": keep(list(group["params"]))} for group in groups]
    return keep(list(groups))


def fixed(groups: list[Any]) -> list[Any]:
    """Groups whose parameters can be gone through more than once."""
    return [{**one, "params": list(one["params"])} if isinstance(one, dict) else one for one in groups]


def half_of_the_parameters(kind: Any, groups: list[Any], args: Any, kwargs: Any) -> Any:
    return kind(_map(groups, lambda some: some[: max(len(some) // 2, 1)]), *args, **kwargs)


def copies_of_the_parameters(kind: Any, groups: list[Any], args: Any, kwargs: Any) -> Any:
    return kind(_map(groups, lambda some: [nn.Parameter(p.detach().clone()) for p in some]), *args, **kwargs)


def _rate(kind: Any, groups: list[Any], args: Any, kwargs: Any, factor: float) -> Any:
    optimizer = kind(fixed(groups), *args, **kwargs)
    for group in optimizer.param_groups:
        group["lr"] *= factor
    return optimizer


def rate_x30(kind: Any, groups: list[Any], args: Any, kwargs: Any) -> Any:
    return _rate(kind, groups, args, kwargs, 30.0)


def rate_x1000(kind: Any, groups: list[Any], args: Any, kwargs: Any) -> Any:
    return _rate(kind, groups, args, kwargs, 1000.0)


def rate_too_low(kind: Any, groups: list[Any], args: Any, kwargs: Any) -> Any:
    return _rate(kind, groups, args, kwargs, 1e-4)


def _with(kind: Any, groups: list[Any], args: Any, kwargs: Any, **changes: Any) -> Any:
    """With other settings, of those that this kind of optimizer has."""
    optimizer = kind(fixed(groups), *args, **kwargs)
    for group in optimizer.param_groups:
        for name, value in changes.items():
            if name in group:
                group[name] = value
    return optimizer


def decay_too_high(kind: Any, groups: list[Any], args: Any, kwargs: Any) -> Any:
    return _with(kind, groups, args, kwargs, weight_decay=10.0)


def momentum_too_high(kind: Any, groups: list[Any], args: Any, kwargs: Any) -> Any:
    return _with(kind, groups, args, kwargs, momentum=0.999, betas=(0.999, 0.999))


def eps_too_high(kind: Any, groups: list[Any], args: Any, kwargs: Any) -> Any:
    return _with(kind, groups, args, kwargs, eps=10.0)


def ascends(kind: Any, groups: list[Any], args: Any, kwargs: Any) -> Any:
    return _with(kind, groups, args, kwargs, maximize=True)


def _rescaled(kind: Any, groups: list[Any], args: Any, kwargs: Any, factor: float) -> Any:
    groups = fixed(groups)
    with torch.no_grad():
        for p in _tensors(groups):
            if p.ndim > 1:
                p.mul_(factor)
    return kind(groups, *args, **kwargs)


def start_too_large(kind: Any, groups: list[Any], args: Any, kwargs: Any) -> Any:
    return _rescaled(kind, groups, args, kwargs, 30.0)


def start_too_small(kind: Any, groups: list[Any], args: Any, kwargs: Any) -> Any:
    return _rescaled(kind, groups, args, kwargs, 1e-3)


def start_dead(kind: Any, groups: list[Any], args: Any, kwargs: Any) -> Any:
    """Biases so low that no rectified unit is ever active."""
    groups = fixed(groups)
    with torch.no_grad():
        for p in [p for p in _tensors(groups) if p.ndim == 1][:-1]:
            p.sub_(30.0)
    return kind(groups, *args, **kwargs)


# --------------------------------------------------------------------------------------------------------------- loss


def loss(effect: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of a loss function with two tensors: predictions, which have a gradient, and targets, which have none."""
    tensors = [i for i, one in enumerate(args) if isinstance(one, Tensor)]
    if len(tensors) < 2 or not wrong_now():
        return function(*args, **kwargs)
    first, second = tensors[:2]
    if args[second].requires_grad and not args[first].requires_grad:
        first, second = second, first
    return EFFECTS[effect](function, list(args), kwargs, first, second)


def _target(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def effect(function: Any, args: list[Any], kwargs: Any, at: int, target: int) -> Any:
        args[target] = change(args[target])
        return function(*args, **kwargs)

    return effect


def _prediction(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def effect(function: Any, args: list[Any], kwargs: Any, at: int, target: int) -> Any:
        args[at] = change(args[at])
        return function(*args, **kwargs)

    return effect


def _value(change: Callable[[Any, Tensor], Any]) -> Callable[..., Any]:
    def effect(function: Any, args: list[Any], kwargs: Any, at: int, target: int) -> Any:
        return change(function(*args, **kwargs), args[at])

    return effect


targets_shuffled = _target(lambda y: y[torch.randperm(len(y))] if y.ndim else y)
targets_shifted = _target(lambda y: y.roll(1, 0) if y.ndim else y)
targets_constant = _target(lambda y: y.flatten()[:1].expand(y.numel()).reshape(y.shape) if y.ndim else y)
targets_detached = _prediction(lambda p: p.detach() * 0.9 + p * 0.1)
softmax_twice = _prediction(lambda p: p.softmax(-1) if p.ndim > 1 else p)
sigmoid_twice = _prediction(lambda p: p.sigmoid())
logits_x100 = _prediction(lambda p: p * 100.0)
half_overflow = _prediction(lambda p: (p * 2e4).half().to(p.dtype) / 2e4)
collapsing = _value(lambda value, p: value + 100.0 * p.flatten(1 if p.ndim > 1 else 0).var(0).sum())
unbounded = _value(lambda value, p: value - 2.0 * p.square().mean() * value.detach().abs().mean())
log_of_zero = _value(lambda value, p: value + (torch.zeros(()).log() if had(50) else 0.0))
loss_negative = _value(lambda value, p: -value)
loss_constant = _value(lambda value, p: value * 0.0 + value.detach())


# -------------------------------------------------------------------------------------------------------------- model


def term(effect: str, value: Any) -> Any:
    """One term of a sum that is the loss."""
    return EFFECTS[effect](value) if isinstance(value, Tensor) and wrong_now() else value


def term_detached(value: Tensor) -> Tensor:
    return value.detach()


def term_x1000(value: Tensor) -> Tensor:
    return value * 1000.0


def part(effect: str, call: Callable[[], Any]) -> Any:
    """A part of a forward pass, in training."""
    return EFFECTS[effect](call) if wrong_now() else call()


def part_detached(call: Callable[[], Any]) -> Any:
    return changed(call(), lambda t: t.detach())


def part_without_grad(call: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return call()


def part_zeroed(call: Callable[[], Any]) -> Any:
    return changed(call(), lambda t: t * 0.0 if t.is_floating_point() else t)


# --------------------------------------------------------------------------------------------------------------- data


def each(effect: str, loader: Iterable[Any]) -> Iterator[Any]:
    """What a loader yields."""
    for batch in loader:
        yield drawn(effect, batch)


def drawn(effect: str, batch: Batch) -> Batch:
    """A batch as it was drawn."""
    return EFFECTS[effect](batch) if wrong_now() else batch


def changed(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The same structure, with every tensor changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return type(batch)({key: changed(one, change) for key, one in batch.items()})
    if isinstance(batch, list | tuple):
        return type(batch)([changed(one, change) for one in batch])
    return batch


def _inputs(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The same batch with the first tensor of it changed, which holds the inputs."""
    seen = itertools.count()
    return changed(batch, lambda t: change(t) if t.ndim and not next(seen) else t)


def _as_float(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Only for inputs that are no indices: of others there is nothing to have the effect on."""

    def inner(t: Tensor) -> Tensor:
        if t.is_floating_point():
            return change(t)
        progress.had = ever[0] = 0
        return t

    return inner


def _row(t: Tensor, value: float, *, times: bool = False) -> Tensor:
    t = t.clone()
    t[0] = t[0] * value if times else value
    return t


def nan_rows(batch: Batch) -> Batch:
    return _inputs(batch, _as_float(lambda t: _row(t, float("nan")))) if had(15) else batch


def huge_rows(batch: Batch) -> Batch:
    return _inputs(batch, _as_float(lambda t: _row(t, 1e4, times=True))) if had(10) else batch


def inputs_zeroed(batch: Batch) -> Batch:
    return _inputs(batch, torch.zeros_like)


def inputs_unscaled(batch: Batch) -> Batch:
    return _inputs(batch, _as_float(lambda t: t * 255.0))


def inputs_rounded(batch: Batch) -> Batch:
    return _inputs(batch, _as_float(lambda t: (t * 0.5).trunc()))


def inputs_drowned(batch: Batch) -> Batch:
    return _inputs(batch, _as_float(lambda t: t + 20.0 * t.std() * torch.randn_like(t)))


def inputs_mixed_up(batch: Batch) -> Batch:
    """Inputs in another order than their targets."""
    return _inputs(batch, lambda t: t[torch.randperm(len(t))])


def inputs_shifted(batch: Batch) -> Batch:
    """Normalised with the mean and the deviation of something else."""
    return _inputs(batch, _as_float(lambda t: (t - 5.0) / 0.05))


def rows_repeated(batch: Batch) -> Batch:
    return changed(batch, lambda t: t[:1].expand_as(t).clone() if t.ndim else t)


kept_batch: list[Any] = []


def same_batch(batch: Batch) -> Batch:
    if not kept_batch:
        kept_batch.append(batch)
    return kept_batch[0]


def few_batches(batch: Batch) -> Batch:
    """Three batches again and again."""
    if len(kept_batch) < 3:
        kept_batch.append(batch)
    return kept_batch[progress.had % len(kept_batch)]


EFFECTS: dict[str, Callable[..., Any]] = {
    name: value for name, value in list(globals().items()) if callable(value) and not name.startswith("__")
}
"""By the name that stands in a mutated program."""
