"""What is needed to run a step again, and a way to do so that changes nothing."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.torchutil.patch import without_own_hooks
from trimtab.torchutil.undo import Memory, forward_state, rng
from trimtab.trace.values import bad_in, tensors_in

LossOf = Callable[[list[Tensor], int], Tensor | None]
_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr
Buffers = Sequence[tuple[Tensor, Tensor]]
"""Buffers, and the values they had before the step."""


@dataclass(slots=True)
class RandomState:
    """Where the random numbers stood."""

    cpu: Tensor | None = None
    cuda: Mapping[int, Tensor] = field(default_factory=dict)

    def put_back(self) -> None:
        """Draw the same numbers again."""
        if self.cpu is not None:
            torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)


@dataclass(slots=True)
class ForwardCall:
    """One call of a root module in the step: its inputs by reference, and what else its result depends on."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    random: RandomState | None = None
    autocast: tuple[str, torch.dtype] | None = None  # the device's type and the type to compute in
    sequence: int = -1  # autograd's count of operations when the call began
    output_gradient: Tensor | None = None


@dataclass(slots=True)
class Replay:
    """A step that can be run again.

    With `step_fn` it is run as a whole, on `batch`. Without it, each call of a root module is: its forward from the
    inputs, its backward from the gradient of its output where that is known, else from one of ordinary size.
    """

    model: nn.Module
    calls: Sequence[ForwardCall] = ()
    step_fn: Callable[[Any], Any] | None = None
    batch: Any = None
    buffers: Buffers = ()
    loss: Tensor | None = None
    dataset_indices: Sequence[Any] = ()
    data: Mapping[str, Tensor] = field(default_factory=dict)  # other tensors of the loop, by their names: targets
    may_be_the_loss: bool = True  # its value or a gradient is bad
    bad_loss: int | None = None  # which micro-batch's loss was bad, where losses were told
    since: Mapping[str, int] = field(default_factory=dict)  # by parameter: the step at which it was seen to be bad
    optimizers: Sequence[Any] = ()


@contextmanager
def undisturbed(
    model: nn.Module | None, *functions: object, optimizers: Sequence[Any] = (), batch: object = None
) -> Iterator[Callable[[], None]]:
    """Whatever runs inside, everything is bit-identical afterwards; the function it gives puts everything back now.

    That is weights, gradients, buffers, modes, the batch, the optimizers, random numbers, and what the functions keep
    for themselves. Hooks of ours do not see what runs inside. Gradients begin as None: those of a bad step are bad.
    """
    parameters = [] if model is None else list(model.parameters())
    modes = None if model is None else forward_state(model)
    data = [(t.data, t.detach().clone()) for t in tensors_in(batch) if not t.requires_grad and not t.is_meta]
    memory = Memory(model, *optimizers, *functions, without=tuple(tensors_in(batch))) if functions else None
    grads = [(p, p.grad) for p in parameters]
    undo_random = rng()
    others: dict[int, Memory] = {}  # optimizers that nobody told of, found when they step

    def about_to_step(optimizer: Any, args: object, kwargs: object) -> None:
        others.setdefault(id(optimizer), Memory(optimizer))

    def undo() -> None:
        for one in others.values():
            one.undo()
        if memory is not None:
            memory.undo()
        if modes is not None:
            modes()
        for tensor, value in data:
            tensor.copy_(value)
        undo_random()
        for p in parameters:
            p.grad = None

    with ExitStack() as stack:
        stack.enter_context(_without_warnings())
        if functions:
            stack.callback(register_optimizer_step_pre_hook(about_to_step).remove)
        stack.enter_context(without_own_hooks([] if model is None else list(model.modules()), parameters, optimizers))
        if model is not None and has_compiled_parts(model):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            for p in parameters:
                p.grad = None
            yield undo
        finally:
            undo()
            for p, grad in grads:
                p.grad = grad


@contextmanager
def _without_warnings() -> Iterator[None]:
    """The step itself has given those that matter. Other filters would make Python give all of them once more later."""
    shown = warnings.showwarning
    warnings.showwarning = lambda *args, **kwargs: None
    try:
        yield
    finally:
        warnings.showwarning = shown


class AtBackward(BaseException):
    """A replay has come to a backward pass from a bad loss: there is nothing more to learn from it."""

    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__("the loss is not finite")
        self.losses = losses


@contextmanager
def without_backward(*, skip: bool) -> Iterator[None]:
    """Inside, a backward pass from a bad loss ends the replay; with `skip`, one from a good loss does nothing."""
    real, thread = torch.autograd.backward, threading.get_ident()

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == thread:
            losses = [t.detach() for t in tensors_in(tensors)]
            if any(bad_in(t) for t in losses):
                raise AtBackward(losses)
            if skip:
                return
        real(tensors, *args, **kwargs)

    torch.autograd.backward = backward  # what `Tensor.backward` calls, too
    try:
        yield
    finally:
        torch.autograd.backward = real


def innermost(module: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The module itself: not its compiled form, nor one that talks to other processes; with what was unwrapped."""
    notes: list[str] = []
    while True:
        inner = getattr(module, "_orig_mod", None)
        if isinstance(inner, nn.Module):
            notes.append("the compiled module was replayed as the eager one")
        elif isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = module.module
            notes.append("replayed on this process alone")
        else:
            return module, tuple(notes)
        module = inner


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether a part of the model is compiled."""
    return any(
        getattr(m, "_orig_mod", None) is not None or getattr(m, "_compiled_call_impl", None) is not None
        for m in model.modules()
    )


def cannot_run(model: nn.Module) -> str:
    """Why a step of this model cannot be run now, by this process alone; empty where it can."""
    if torch._C._current_graph_task_id() != -1:
        return "a backward pass is under way, which needs everything as it is"
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ""
    if torch.distributed.get_world_size() == 1:
        return ""
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            return "a SyncBatchNorm waits for the other processes"
    if any(type(p).__name__ == "DTensor" for p in model.parameters()):
        return "its weights are spread over several processes"
    return ""


def run_forward(call: ForwardCall) -> tuple[list[Tensor], int]:
    """Run a recorded call again: its outputs, and how many operations autograd counted in it."""
    module, _ = innermost(call.module)
    began = _sequence()
    if call.random is not None:
        call.random.put_back()
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        if call.autocast is not None:
            stack.enter_context(torch.autocast(call.autocast[0], dtype=call.autocast[1]))
        output = module(*call.args, **call.kwargs)
    return [t for t in tensors_in(output) if t.is_floating_point() or t.is_complex()], _sequence() - began


def run_call(
    call: ForwardCall, loss_of: LossOf | None = None, others: Sequence[nn.Module] = ()
) -> tuple[list[Tensor], Callable[[], list[Tensor]]]:
    """Run a recorded call again: its outputs, and a function that gives the gradients of the parameters.

    `loss_of` makes a loss of the outputs, for which it is told how many operations autograd counted in the call. Where
    there is one, it comes last among the outputs, and the gradients are its. `others` are modules that it goes back to,
    too.
    """
    outputs, num = run_forward(call)
    loss = None if loss_of is None else loss_of(outputs, num)

    def gradients() -> list[Tensor]:
        roots = [loss] if loss is not None and loss.requires_grad else [t for t in outputs if t.requires_grad]
        modules = dict.fromkeys((call.module, *others))
        wanted: list[Tensor] = [p for one in modules for p in innermost(one)[0].parameters() if p.requires_grad]
        wanted = list({id(p): p for p in wanted}.values())
        wanted += [t for t in tensors_in((call.args, dict(call.kwargs))) if t.requires_grad and t.is_leaf]
        if not roots or not wanted:
            return []
        given = [_gradient_like(t, call, first=i == 0) for i, t in enumerate(roots)]
        found = torch.autograd.grad(roots, wanted, given, allow_unused=True)
        return [g for g in found if g is not None]

    return outputs if loss is None else [*outputs, loss], gradients


def _gradient_like(output: Tensor, call: ForwardCall, *, first: bool) -> Tensor:
    """The gradient that arrived, or one of ordinary size whose entries differ: a softmax would cancel one of ones."""
    known = call.output_gradient
    if first and known is not None and known.shape == output.shape:
        return known.to(output.dtype)
    if not output.dim():
        return torch.ones_like(output)
    num = max(output.numel(), 1)
    size = torch.linspace(0.5, 1.5, num, device=output.device, dtype=torch.float32) / max(output.shape[0], 1)
    return size.reshape(output.shape).to(output.dtype)
