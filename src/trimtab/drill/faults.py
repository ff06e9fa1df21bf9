"""The fault catalogue: every fault by name, group by group, and the choice among them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from trimtab.core.errors import InputError
from trimtab.core.suggest_name import did_you_mean
from trimtab.doctor.batch_tensors import mapped
from trimtab.doctor.observed_step import scaler_is_on
from trimtab.drill.injection import (
    HURT,
    NONFINITE,
    SQUARES,
    TOO_FAST,
    alter,
    alter_once,
    around_step,
    fault,
    inputs,
    last,
    middle,
    on_gradient,
    once,
    ours_only,
    owner,
    scale_lr,
    some_moments,
    squares,
    targets,
    trained,
    with_value,
)
from trimtab.drill.score import Fault, NotApplicableError
from trimtab.drill.trial import Run
from trimtab.torchutil.optimizers import params_of
from trimtab.torchutil.patch import wrap_on_object

P = ParamSpec("P")
R = TypeVar("R")
CATALOGUE: list[Fault] = []

# -- data --------------------------------------------------------------------------------------------------------------

NO_CLASS = 1 << 24


@fault(CATALOGUE, "data", "nonfinite-input", *NONFINITE)
def nan_in_inputs(run: Run) -> None:
    """One number of one batch is NaN."""
    alter_once(run, "draw", inputs(run, with_value(torch.nan)))


@fault(CATALOGUE, "data", "nonfinite-input", *NONFINITE)
def inf_in_inputs(run: Run) -> None:
    """One number of one batch is infinite."""
    alter_once(run, "draw", inputs(run, with_value(torch.inf)))


@fault(CATALOGUE, "data", "outlier-batch", *HURT, "update-ratio", "weight-jump", silent=True)
def inputs_thousandfold(run: Run) -> None:
    """The inputs of one batch are a thousand times as large."""
    alter_once(run, "draw", inputs(run, lambda x: x * 1000))


@fault(CATALOGUE, "data", "outlier-batch", *HURT, "oscillating-loss", "update-ratio", "collapsed-output", silent=True)
def inputs_not_normalised(run: Run) -> None:
    """The inputs are bytes from now on, 255 times as large."""
    alter(run, "draw", inputs(run, lambda x: x * 255))


@fault(CATALOGUE, "data", "constant-batch", "collapsed-output", *HURT, silent=True)
def inputs_blank(run: Run) -> None:
    """Every sample is zeros from now on."""
    alter(run, "draw", inputs(run, torch.zeros_like, real=False))


@fault(CATALOGUE, "data", "repeated-batch", "data-replayed", "overfitting", silent=True)
def same_batch_again(run: Run) -> None:
    """The loader gives one batch again and again from now on."""
    batch = run.draw()
    run.draw = lambda: batch  # type: ignore[method-assign]


@fault(CATALOGUE, "data", "empty-batch", *NONFINITE, "step-exception", silent=True)
def empty_batch(run: Run) -> None:
    """A filter leaves nothing of one batch."""
    alter_once(run, "draw", lambda batch: mapped(batch, lambda _, t: t[:0] if t.dim() else t))


@fault(CATALOGUE, "data", "label-range", "step-exception")
def label_out_of_range(run: Run) -> None:
    """One label is higher than there are classes."""

    def raised(y: Tensor) -> Tensor:
        y.view(-1)[0] = NO_CLASS
        return y

    alter_once(run, "draw", targets(run, lambda y: raised(y.contiguous()), whole=True))


@fault(CATALOGUE, "data", "targets-do-not-predict", *HURT, "not-learning")
def targets_shuffled(run: Run) -> None:
    """Every sample has another one's target from now on."""

    def mixed(y: Tensor) -> Tensor:
        if len(y) < 2:
            raise NotApplicableError("a batch is one sample: there is no other target")
        return y[torch.randperm(len(y), generator=torch.Generator().manual_seed(run.step)).to(y.device)]

    alter(run, "draw", targets(run, mixed))


@fault(
    CATALOGUE, "data", "constant-batch", "collapsed-output", "targets-do-not-predict", "loss-spike", silent=True
)  # fmt: skip
def one_class_only(run: Run) -> None:
    """Every target is the same class from now on."""
    alter(run, "draw", targets(run, lambda y: torch.zeros_like(y) + y.reshape(-1)[0], whole=True))


# -- numbers -----------------------------------------------------------------------------------------------------------

FIRST_GRADIENT = ("nonfinite-gradient", "nonfinite-weight", "nonfinite-loss")
TOP_BIT = {torch.float32: (torch.int32, 30), torch.float64: (torch.int64, 62), torch.bfloat16: (torch.int16, 14)}


@fault(CATALOGUE, "numerics", *FIRST_GRADIENT)
def nan_in_gradient(run: Run) -> None:
    """One element of one gradient is NaN."""
    on_gradient(run, [middle(run)], with_value(torch.nan), num_steps=1)


@fault(CATALOGUE, "numerics", *FIRST_GRADIENT)
def inf_in_gradient(run: Run) -> None:
    """One element of one gradient is infinite."""
    on_gradient(run, [middle(run)], with_value(torch.inf), num_steps=1)


@fault(CATALOGUE, "numerics", "nonfinite-weight", "weight-corrupted", *NONFINITE)
def nan_in_weight(run: Run) -> None:
    """One weight becomes NaN between two steps."""
    with torch.no_grad():
        middle(run).view(-1)[0] = torch.nan


@fault(CATALOGUE, "numerics", "weight-corrupted", "weight-jump", *HURT, *NONFINITE, silent=True)
def bit_flip(run: Run) -> None:
    """The highest bit of one weight's exponent flips."""
    weight = middle(run).data
    if weight.dtype not in TOP_BIT or not weight.is_contiguous():
        raise NotApplicableError(f"the weights are {weight.dtype}")
    kind, bit = TOP_BIT[weight.dtype]
    weight.view(kind).view(-1)[weight.numel() // 2] ^= 1 << bit


@fault(CATALOGUE, "numerics", "nonfinite-buffer", "nonfinite-validation", *NONFINITE, silent=True)
def nan_in_buffer(run: Run) -> None:
    """A running mean or variance is NaN: training may go on as if nothing had happened, evaluation is lost."""
    found = [b for b in run.model.buffers() if b.is_floating_point() and b.dim() and bool(torch.isfinite(b).all())]
    if not found:
        raise NotApplicableError("the model has no buffers of real numbers")
    found[-1].view(-1)[0] = torch.nan


@fault(CATALOGUE, "numerics", "nonfinite-loss", silent=True)
def nan_in_loss(run: Run) -> None:
    """A constant term of the loss of one batch is NaN; the gradients are right."""
    ours_only(run)
    alter_once(run, "forward", lambda loss: loss + torch.nan)


@fault(CATALOGUE, "numerics", *NONFINITE)
def loss_divided_by_zero(run: Run) -> None:
    """The loss of one batch is divided by a count that is zero."""
    ours_only(run)
    alter_once(run, "forward", lambda loss: loss / 0)


@fault(CATALOGUE, "state", "nonfinite-optimizer-state", *NONFINITE)
def nan_in_moment(run: Run) -> None:
    """One number in the optimizer's memory is NaN."""
    next(some_moments(run)).view(-1)[0] = torch.nan


# -- dynamics ----------------------------------------------------------------------------------------------------------

TOO_SLOW = ("learning-rate", "weights-unchanged", "update-ratio", "not-learning")
DOWNHILL = ("not-learning", "dead-units", "saturated-units", "collapsed-output")
SPIKES = 3


def other_rate(run: Run, factor: Callable[[int], float]) -> None:
    """Take every step at another rate than the schedule's, and put that one back after it."""
    first = run.step
    kept: dict[int, list[float]] = {}

    def begin(optimizer: Optimizer) -> None:
        kept[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
        scale_lr(optimizer, factor(run.step - first))

    def end(optimizer: Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, kept[id(optimizer)], strict=True):
            group["lr"] = rate

    around_step(run, begin, end)


@fault(CATALOGUE, "dynamics", *TOO_FAST, *DOWNHILL)
def rate_30x(run: Run) -> None:
    """The rate is thirty times as high from now on."""
    other_rate(run, lambda num: 30.0)


@fault(CATALOGUE, "dynamics", *TOO_FAST, *DOWNHILL)
def rate_300x(run: Run) -> None:
    """The rate is three hundred times as high from now on."""
    other_rate(run, lambda num: 300.0)


@fault(CATALOGUE, "dynamics", *TOO_FAST, *DOWNHILL)
def rate_grows(run: Run) -> None:
    """The rate grows by a tenth with every step from now on: a schedule with the wrong sign."""
    other_rate(run, lambda num: min(1.1 ** (num + 1), 1e6))


@fault(CATALOGUE, "dynamics", *TOO_SLOW, silent=True)
def rate_zero(run: Run) -> None:
    """The rate is zero from now on: a schedule that has ended too early."""
    other_rate(run, lambda num: 0.0)


@fault(CATALOGUE, "dynamics", "exploding-gradient", *TOO_FAST)
def gradient_spikes(run: Run) -> None:
    """Every gradient is ten thousand times as large, for three steps."""
    on_gradient(run, trained(run), lambda g: g * 1e4, num_steps=SPIKES)


@fault(CATALOGUE, "dynamics", "vanishing-gradient", "zero-gradient", "gradient-underflow", *TOO_SLOW, silent=True)
def gradients_vanish(run: Run) -> None:
    """Every gradient is a billionth of what it was from now on."""
    on_gradient(run, list(run.model.parameters()), lambda g: g * 1e-9)


@fault(CATALOGUE, "dynamics", "diverging-loss", *TOO_FAST)
def sign_flips(run: Run) -> None:
    """The optimizer climbs from now on."""
    on_gradient(run, [p for p in run.model.parameters() if p.requires_grad], torch.neg)


@fault(CATALOGUE, "dynamics", *TOO_FAST, silent=True)
def sum_instead_of_mean(run: Run) -> None:
    """The loss is a sum over 256 samples from now on, no longer their mean."""
    ours_only(run)
    alter(run, "forward", lambda loss: loss * 256)


# -- wiring ------------------------------------------------------------------------------------------------------------

NO_GRADIENT = ("missing-gradient", "zero-gradient", "no-grad", "weights-unchanged", "not-learning")
STALE = ("stale-optimizer", "optimizer-misses-parameters", "missing-gradient", "weights-unchanged", "untied-weights")


@fault(CATALOGUE, "wiring", "stale-gradient", *HURT, "update-ratio", silent=True)
def zero_grad_forgotten(run: Run) -> None:
    """Gradients pile up from now on."""
    for one in (*run.optimizers, run.model):
        wrap_on_object(one, "zero_grad", lambda inner, *args, **kwargs: None)


@fault(CATALOGUE, "wiring", *NO_GRADIENT, silent=True)
def gradients_dropped(run: Run) -> None:
    """Gradients are set to None after backward and before the step from now on."""
    around_step(run, lambda optimizer: type(optimizer).zero_grad(optimizer, set_to_none=True))


@fault(CATALOGUE, "wiring", "double-step", silent=True)
def stepped_twice(run: Run) -> None:
    """`optimizer.step()` is called twice a batch from now on, by the loop and by a callback."""
    if run.by_closure:
        raise NotApplicableError("the optimizer steps by a closure")
    steps = {id(one): one.step for one in run.optimizers}
    around_step(run, lambda one: steps[id(one)]() if once(run, one) else None)


@fault(CATALOGUE, "wiring", "eval-mode", silent=True)
def eval_mode_left_on(run: Run) -> None:
    """The model stays in evaluation mode after a validation."""
    run.model.eval()

    def look(value: object) -> object:
        if run.model.training:
            raise NotApplicableError("step_fn calls model.train() in every step: it cannot be left in evaluation mode")
        return value

    alter(run, "forward", look)


@fault(CATALOGUE, "wiring", *NO_GRADIENT, silent=True)
def layer_frozen(run: Run) -> None:
    """A gradient hook multiplies the gradient of one layer by zero from now on."""
    on_gradient(run, [middle(run)], lambda g: g * 0)


@fault(CATALOGUE, "wiring", *NO_GRADIENT, silent=True)
def layer_detached(run: Run) -> None:
    """A `detach()` behind one layer cuts the graph from now on: what lies before it gets no gradient."""
    if middle(run) is last(run):
        raise NotApplicableError("there is one layer only: without it nothing is left to train")
    module, _ = owner(run, middle(run))
    module.register_forward_hook(lambda module, args, out: _detached(out))


def _detached(out: object) -> object:
    if isinstance(out, Tensor):
        return out.detach()
    return tuple(_detached(one) for one in out) if isinstance(out, tuple) else out


@fault(CATALOGUE, "wiring", *NO_GRADIENT, silent=True)
def loss_weight_zero(run: Run) -> None:
    """The loss is multiplied by a weight that has run down to zero."""
    ours_only(run)
    alter(run, "forward", lambda loss: loss * 0)


@fault(CATALOGUE, "wiring", *STALE, *HURT, silent=True)
def layer_replaced(run: Run) -> None:
    """The last layer is replaced during the run, and the optimizer keeps the old one."""
    param = last(run)
    module, name = owner(run, param)
    if getattr(module, "_flat_weights_names", None) is not None:
        raise NotApplicableError("the last layer is recurrent: its weights cannot be replaced one by one")
    setattr(module, name, nn.Parameter(param.detach().clone()))


@fault(CATALOGUE, "wiring", "optimizer-misses-parameters", "stale-optimizer", from_start=True, silent=True)
def half_of_the_parameters(run: Run) -> None:
    """The optimizer is given the second half of the parameters only, and nothing is frozen."""
    found = trained(run)
    early = {id(p) for p in found[: len(found) // 2]}
    if not early:
        raise NotApplicableError("there is one weight only")
    for one in run.optimizers:
        for group in one.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in early]


@fault(CATALOGUE, "wiring", "accumulation-not-divided", *HURT, from_start=True, silent=True)
def accumulation_not_divided(run: Run) -> None:
    """Four micro-batches are added up, not averaged."""
    ours_only(run)
    run.accumulate = 4


@fault(CATALOGUE, "wiring", "step-exception", silent=True)
def exception_in_step(run: Run) -> None:
    """The forward pass runs out of memory once."""

    def fail(module: nn.Module, args: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")

    for module in run.model.modules():  # the root itself may never be called
        module.register_forward_pre_hook(fail)


# -- state -------------------------------------------------------------------------------------------------------------

CORRUPTED = ("weight-corrupted", "weight-jump", *HURT)


@fault(CATALOGUE, "state", *CORRUPTED, *NONFINITE, silent=True)
def layer_hundredfold(run: Run) -> None:
    """The last layer is multiplied by a hundred between two steps."""
    with torch.no_grad():
        last(run).mul_(100)


@fault(CATALOGUE, "state", *CORRUPTED, silent=True)
def layer_overwritten(run: Run) -> None:
    """A layer is overwritten with noise of its own size."""
    weight = middle(run)
    with torch.no_grad():
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(run.task.seed))
        weight.copy_(noise * weight.float().std(correction=0).cpu())


@fault(CATALOGUE, "state", "optimizer-state-lost", "update-ratio", "weight-jump", *HURT, silent=True)
def optimizer_state_lost(run: Run) -> None:
    """The optimizer's memory is cleared midway."""
    some_moments(run)
    for one in run.optimizers:
        one.state.clear()


@fault(CATALOGUE, "state", "weight-jump", "update-ratio", "optimizer-state-lost", *HURT, *NONFINITE)
def moments_scaled(run: Run) -> None:
    """What the optimizer divides by is a millionth of what it was (its momentum: a thousandfold)."""
    some_moments(run)
    for one in run.optimizers:
        divides = any(key in SQUARES for entry in one.state.values() for key in entry)
        for moment in squares(one):
            moment.mul_(1e-6 if divides else 1e3)


@fault(CATALOGUE, "state", "nonfinite-ema", silent=True)
def ema_poisoned(run: Run) -> None:
    """One NaN gets into the average and stays there; the model is fine."""
    found = [p for p in _average(run) if p.is_floating_point() and p.numel()]
    if not found:
        raise NotApplicableError("the average has no parameters that can be looked at")
    with torch.no_grad():
        found[0].view(-1)[0] = torch.nan


@fault(CATALOGUE, "state", "ema-not-moving", silent=True)
def ema_not_updated(run: Run) -> None:
    """The average is not updated any more."""
    _average(run)
    for name in ("update_parameters", "update"):
        if callable(getattr(run.target.ema, name, None)):
            wrap_on_object(run.target.ema, name, lambda inner, *args: None)


def _average(run: Run) -> list[torch.Tensor]:
    if run.target.ema is None:
        raise NotApplicableError("the target has no ema")
    return list(run.target.ema.parameters()) if hasattr(run.target.ema, "parameters") else []


# -- mixed precision ---------------------------------------------------------------------------------------------------


def _scaler(run: Run) -> GradScaler:
    if run.scaler is None or not scaler_is_on(run.scaler):
        raise NotApplicableError("the target has no scaler")
    return run.scaler


@fault(CATALOGUE, "amp", "scale-collapse", "nonfinite-gradient", silent=True)
def scale_collapses(run: Run) -> None:
    """One gradient overflows in every step from now on: the scaler halves its scale again and again."""
    _scaler(run)
    on_gradient(run, [middle(run)], with_value(torch.inf))


@fault(CATALOGUE, "amp", "clip-before-unscale", "chronic-clipping", from_start=True, silent=True)
def clip_before_unscale(run: Run) -> None:
    """The scaled gradients are clipped to 1.0: after unscaling next to nothing is left."""
    scaler = _scaler(run)
    for name in ("unscale_", "step"):
        wrap_on_object(scaler, name, functools.partial(_clipped_first, scaler))


def _clipped_first(
    scaler: GradScaler,
    inner: Callable[Concatenate[Optimizer, P], R],
    optimizer: Optimizer,
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    states = scaler._per_optimizer_states
    if id(optimizer) not in states or states[id(optimizer)]["stage"].name == "READY":
        torch.nn.utils.clip_grad_norm_(params_of(optimizer), 1.0)
    return inner(optimizer, *args, **kwargs)


# -- the choice among them ---------------------------------------------------------------------------------------------

FAULTS: dict[str, Fault] = {one.name: one for one in CATALOGUE}
GROUPS = tuple(dict.fromkeys(one.group for one in FAULTS.values()))


def choose(select: Sequence[str] = (), ignore: Sequence[str] = ()) -> tuple[Fault, ...]:
    """The faults that are wanted, by name or by group.

    Example:
        >>> [one.name for one in choose(["amp"], ["clip-before-unscale"])]
        ['scale-collapses']
    """
    for word in (*select, *ignore):
        if word not in FAULTS and word not in GROUPS:
            listed = f"groups: {', '.join(GROUPS)}; faults: {', '.join(FAULTS)}"
            hint = did_you_mean(word, (*FAULTS, *GROUPS), otherwise=listed)
            raise InputError(f"there is no fault or group {word!r}; {hint}")
    wanted = [one for one in FAULTS.values() if not select or one.name in select or one.group in select]
    chosen = tuple(one for one in wanted if one.name not in ignore and one.group not in ignore)
    if not chosen:
        raise InputError("no fault is left after --select and --ignore; choose at least one")
    return chosen


def fairly(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """One fault of each group in turn: where time runs out, every group has had some."""
    groups = [[one for one in faults if one.group == group] for group in GROUPS]
    return tuple(one for one in chain.from_iterable(zip_longest(*groups)) if one is not None)
