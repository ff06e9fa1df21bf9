"""Faults of wiring: a loop, a graph or an optimizer put together wrongly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trimtab.drill.injection import (
    HURT,
    alter,
    around_step,
    fault,
    last,
    middle,
    on_gradient,
    once,
    ours_only,
    owner,
    trained,
)
from trimtab.drill.score import Fault, NotApplicableError
from trimtab.drill.trial import Run

WIRING: list[Fault] = []
NO_GRADIENT = ("missing-gradient", "zero-gradient", "no-grad", "weights-unchanged", "not-learning")
STALE = ("stale-optimizer", "optimizer-misses-parameters", "missing-gradient", "weights-unchanged", "untied-weights")


@fault(WIRING, "wiring", "stale-gradient", *HURT, "update-ratio", silent=True)
def zero_grad_forgotten(run: Run) -> None:
    """Gradients pile up from now on."""
    for one in (*run.optimizers, run.model):
        one.zero_grad = lambda *args, **kwargs: None


@fault(WIRING, "wiring", *NO_GRADIENT, silent=True)
def gradients_dropped(run: Run) -> None:
    """Gradients are set to None after backward and before the step from now on."""
    around_step(run, lambda optimizer: type(optimizer).zero_grad(optimizer, set_to_none=True))


@fault(WIRING, "wiring", "double-step", silent=True)
def stepped_twice(run: Run) -> None:
    """`optimizer.step()` is called twice a batch from now on, by the loop and by a callback."""
    if run.by_closure:
        raise NotApplicableError("the optimizer steps by a closure")
    steps = {id(one): one.step for one in run.optimizers}
    around_step(run, lambda one: steps[id(one)]() if once(run, one) else None)


@fault(WIRING, "wiring", "eval-mode", silent=True)
def eval_mode_left_on(run: Run) -> None:
    """The model stays in evaluation mode after a validation."""
    run.model.eval()

    def look(value: Any) -> Any:
        if run.model.training:
            raise NotApplicableError(
                "step_fn calls model.train() in every step: nobody can leave it in evaluation mode"
            )
        return value

    alter(run, "forward", look)


@fault(WIRING, "wiring", *NO_GRADIENT, silent=True)
def layer_frozen(run: Run) -> None:
    """A gradient hook multiplies the gradient of one layer by zero from now on."""
    on_gradient(run, [middle(run)], lambda g: g * 0)


@fault(WIRING, "wiring", *NO_GRADIENT, silent=True)
def layer_detached(run: Run) -> None:
    """A `detach()` behind one layer cuts the graph from now on: what lies before it gets no gradient."""
    if middle(run) is last(run):
        raise NotApplicableError("there is one layer only: without it nothing is left to train")
    module, _ = owner(run, middle(run))
    module.register_forward_hook(lambda module, args, out: _detached(out))


def _detached(out: Any) -> Any:
    if isinstance(out, Tensor):
        return out.detach()
    return tuple(_detached(one) for one in out) if isinstance(out, tuple) else out


@fault(WIRING, "wiring", *NO_GRADIENT, silent=True)
def loss_weight_zero(run: Run) -> None:
    """The loss is multiplied by a weight that has run down to zero."""
    ours_only(run)
    alter(run, "forward", lambda loss: loss * 0)


@fault(WIRING, "wiring", *STALE, *HURT, silent=True)
def layer_replaced(run: Run) -> None:
    """The last layer is replaced during the run, and the optimizer is not told."""
    param = last(run)
    module, name = owner(run, param)
    if getattr(module, "_flat_weights_names", None) is not None:
        raise NotApplicableError("the last layer is recurrent: its weights cannot be replaced one by one")
    setattr(module, name, nn.Parameter(param.detach().clone()))


@fault(WIRING, "wiring", "optimizer-misses-parameters", "stale-optimizer", from_start=True, silent=True)
def half_of_the_parameters(run: Run) -> None:
    """The optimizer is given the second half of the parameters only, and nothing is frozen."""
    found = trained(run)
    early = {id(p) for p in found[: len(found) // 2]}
    if not early:
        raise NotApplicableError("there is one weight only")
    for one in run.optimizers:
        for group in one.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in early]


@fault(WIRING, "wiring", "accumulation-not-divided", *HURT, from_start=True, silent=True)
def accumulation_not_divided(run: Run) -> None:
    """Four micro-batches are added up, not averaged."""
    ours_only(run)
    run.accumulate = 4


@fault(WIRING, "wiring", "step-exception", silent=True)
def exception_in_step(run: Run) -> None:
    """The forward pass runs out of memory once."""

    def fail(module: nn.Module, args: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")

    for module in run.model.modules():  # the root itself may never be called
        module.register_forward_pre_hook(fail)
