"""How to declare a fault, and the tools to make one: changes to parts of a run, whether its loop is ours or not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.doctor.batch_tensors import leaves, mapped, roles_of
from trimtab.drill.score import Fault, NotApplicableError
from trimtab.torchutil.optimizers import params_of
from trimtab.torchutil.patch import wrap_on_object

if TYPE_CHECKING:
    from trimtab.drill.trial import Run


NONFINITE = ("nonfinite-loss", "nonfinite-gradient", "nonfinite-weight")
HURT = ("loss-spike", "exploding-gradient", "diverging-loss")
TOO_FAST = (
    "learning-rate", "update-ratio", "loss-spike", "diverging-loss", "exploding-gradient", "weight-jump",
    "oscillating-loss", *NONFINITE,
)  # fmt: skip
"""What a step that is far too long can rightly be called."""

Inject = Callable[["Run"], None]


def fault(
    table: list[Fault], group: str, *names: str, from_start: bool = False, silent: bool = False
) -> Callable[[Inject], Inject]:
    """List a fault under its function's name; the docstring says what happens.

    Example:
        >>> table = []
        >>> @fault(table, "data", "constant-batch")
        ... def all_blank(run):
        ...     "Every sample is zeros."
        >>> table[0].name, table[0].what
        ('all-blank', 'Every sample is zeros.')
    """

    def declare(inject: Inject) -> Inject:
        name, what = inject.__name__.replace("_", "-"), inspect.cleandoc(inject.__doc__ or "")
        timing = {"from_start": from_start, "silent": silent}
        table.append(Fault(name=name, group=group, what=what, names=names, inject=inject, **timing))
        return inject

    return declare


P = ParamSpec("P")
R = TypeVar("R")
Change = Callable[[Tensor], Tensor]
SQUARES = ("exp_avg_sq", "square_avg")
BY_THEM = "step_fn runs backward and the optimizer itself: nothing can be changed in between"


# ------------------------------------------------------------------------------------------------- parts of the loop


def alter(run: Run, part: str, change: Callable[[Any], object]) -> None:
    """From now on, change what a part of the loop gives back."""
    original = getattr(run, part)
    setattr(run, part, lambda *args: change(original(*args)))


def alter_once(run: Run, part: str, change: Callable[[Any], object]) -> None:
    """In this step only, change what a part of the loop gives back."""
    now = run.step
    alter(run, part, lambda value: change(value) if run.step == now else value)


def ours_only(run: Run) -> None:
    """Refuse where the loop between forward and step is the user's own."""
    if run.steps_itself:
        raise NotApplicableError(BY_THEM)


def around_step(
    run: Run, begin: Callable[[Optimizer], object], end: Callable[[Optimizer], object] = lambda optimizer: None
) -> None:
    """From now on, do something before and after every `optimizer.step()`, also those of a loop that is not ours."""

    def around(optimizer: Optimizer, inner: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        begin(optimizer)
        try:
            return inner(*args, **kwargs)
        finally:
            end(optimizer)

    for one in run.optimizers:
        wrap_on_object(one, "step", functools.partial(around, one))


def once(run: Run, optimizer: Optimizer) -> bool:
    """Whether this is the first step of an optimizer in this step of the loop."""
    if run.last_stepped.get(id(optimizer)) == run.step:
        return False
    run.last_stepped[id(optimizer)] = run.step
    return True


# ------------------------------------------------------------------------------------------------- weights, gradients


def trained(run: Run) -> list[nn.Parameter]:
    """What the optimizers move: matrices, or whatever there is where there are none; idle experts are left out."""
    held = {id(p) for p in params_of(*run.optimizers)}
    found = [p for p in run.model.parameters() if id(p) in held and p.requires_grad and p.is_floating_point()]
    if not found:
        raise NotApplicableError("the optimizer moves no weight of the model")
    busy = [p for p in found if p.grad is not None and not p.grad.is_sparse and bool(p.grad.any())]
    return [p for p in busy or found if p.dim() > 1] or busy or found


def middle(run: Run) -> nn.Parameter:
    """A weight in the middle of the model."""
    found = trained(run)
    return found[(len(found) - 1) // 2]


def last(run: Run) -> nn.Parameter:
    """The last weight of the model."""
    return trained(run)[-1]


def owner(run: Run, param: Tensor) -> tuple[nn.Module, str]:
    """The module that holds a weight, and its name there."""
    for module in run.model.modules():
        for name, own in module.named_parameters(recurse=False):
            if own is param:
                return module, name
    raise NotApplicableError("no module holds the weight")


def on_gradient(run: Run, params: list[nn.Parameter], change: Change, num_steps: int | None = None) -> None:
    """Change gradients as backward makes them, from now on or for some steps."""
    until = None if num_steps is None else run.step + num_steps

    def hook(grad: Tensor) -> Tensor:
        return change(grad) if until is None or run.step < until else grad

    for param in params:
        param.register_hook(hook)  # type: ignore[no-untyped-call]


def with_value(value: float) -> Change:
    """The same tensor with one element replaced."""

    def write(x: Tensor) -> Tensor:
        x = x.to_dense().clone() if x.is_sparse else x.clone()
        x.view(-1)[min(7, x.numel() - 1)] = value
        return x

    return write


# --------------------------------------------------------------------------------------------------------- optimizers


def scale_lr(optimizer: Optimizer, factor: float) -> None:
    """Multiply the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor


def moments(optimizer: Optimizer) -> list[Tensor]:
    """What an optimizer remembers of past gradients."""
    return [v for s in optimizer.state.values() for k, v in s.items() if torch.is_tensor(v) and k != "step" and v.dim()]


def squares(optimizer: Optimizer) -> list[Tensor]:
    """What an optimizer divides by, or its momentum where it divides by nothing."""
    found = [v for s in optimizer.state.values() for k, v in s.items() if k in SQUARES]
    return found or moments(optimizer)


def some_moments(run: Run) -> Iterator[Tensor]:
    """All moments of all optimizers; refuses where there are none."""
    found = [m for o in run.optimizers for m in moments(o) if m.is_floating_point() and m.numel()]
    if not found:
        raise NotApplicableError("the optimizer remembers nothing: no momentum, no second moment")
    return iter(found)


# ------------------------------------------------------------------------------------------------------------ batches


def inputs(run: Run, change: Change, *, real: bool = True) -> Callable[[object], object]:
    """A change of a batch's inputs; only those with real numbers where `real` is set."""
    return _parts(run, change, "inputs", lambda t: t.is_floating_point() or not real, "inputs of real numbers")


def targets(run: Run, change: Change, *, whole: bool = False) -> Callable[[object], object]:
    """A change of a batch's targets; those that are classes only, where they must be `whole` numbers."""
    kind = "targets that are classes" if whole else "targets beside its inputs"
    return _parts(run, change, "targets", lambda t: t.dtype is torch.int64 or not whole, kind)


def _parts(
    run: Run, change: Change, role: str, wanted: Callable[[Tensor], bool], kind: str
) -> Callable[[object], object]:
    def changed(batch: object) -> object:
        roles = roles_of(batch, [], None, by_contract=run.target.step_fn is None)
        paths = {p for p, t in leaves(batch) if p in getattr(roles, role) and wanted(t) and t.numel() and t.dim()}
        if not paths:
            raise NotApplicableError(f"a batch has no {kind}")
        return mapped(batch, lambda path, t: change(t.clone()) if path in paths else t)

    return changed
