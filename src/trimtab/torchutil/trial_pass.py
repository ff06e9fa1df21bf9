"""A forward and backward pass that leaves no trace, and the in-place operations that break it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.errors import InputError
from trimtab.torchutil.autograd_graph import GraphWalk
from trimtab.torchutil.undo import forward_state


@contextmanager
def without_trace(model: nn.Module | None) -> Iterator[None]:
    """What runs inside finds no gradients; afterwards the model's own are back, and everything else it changed.

    Example:
        >>> model = nn.BatchNorm1d(2)
        >>> with without_trace(model):
        ...     model.train()(torch.randn(4, 2)).sum().backward()
        >>> model.weight.grad is None, model.num_batches_tracked
        (True, tensor(0))
    """
    parameters = [(p, p.grad) for p in model.parameters()] if model is not None else []
    undo = forward_state(model) if model is not None else None
    devices = sorted({p.device.index or 0 for p, _ in parameters if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            for p, _ in parameters:
                p.grad = None
            yield
    finally:
        for p, grad in parameters:
            p.grad = grad
        if undo is not None:
            undo()


def leaves_of(loss: Tensor) -> list[Tensor]:
    """The tensors whose gradient a backward pass from `loss` would compute.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> leaves_of((weight * 2.0).sum())
        [tensor([1.], requires_grad=True)]
    """
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    variables = [getattr(node, "variable", None) for node in GraphWalk(loss)]
    return list({id(v): v for v in variables if isinstance(v, Tensor)}.values())


def gradients_of(loss: Tensor, *, keep_graph: bool = False) -> list[tuple[Tensor, Tensor | None]]:
    """Each leaf and its gradient, without writing to any `.grad`: an optimizer that steps inside backward stays still.

    Only under reentrant checkpointing, which hides its leaves, a true backward pass is made.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> [(_, gradient)] = gradients_of((weight * 2.0).sum())
        >>> gradient, weight.grad
        (tensor([2.]), None)
    """
    leaves = leaves_of(loss)
    if any(node.name() == "CheckpointFunctionBackward" for node in GraphWalk(loss)):
        torch.autograd.backward(loss, retain_graph=keep_graph)
        return [(leaf, leaf.grad) for leaf in leaves]
    if not leaves:
        return []
    grads = torch.autograd.grad(loss, leaves, retain_graph=keep_graph, allow_unused=True)
    return list(zip(leaves, grads, strict=True))


def as_scalar(output: object) -> Tensor:
    """One differentiable number that depends on everything a model returned.

    Example:
        >>> as_scalar({"a": torch.ones(2, requires_grad=True), "b": [torch.ones(1, requires_grad=True)]})
        tensor(3., grad_fn=<AddBackward0>)
    """
    parts = [t.sum() for t in _tensors(output) if t.requires_grad]
    if not parts:
        raise InputError(
            f"the output ({type(output).__name__}) holds no tensor that requires a gradient; expected one that depends "
            "on a trainable parameter: is there a no_grad, a detach, or is everything frozen?"
        )
    total = parts[0]
    for part in parts[1:]:
        total = total + part.to(total.device)
    return total.real if total.is_complex() else total


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for part in inside:
        yield from _tensors(part)


OUTSIDE = "outside of any module"
_WORDS = ("in-place", "inplace")


@dataclass(frozen=True, slots=True, kw_only=True)
class InplaceHazard:
    """A tensor that the backward pass needs as it was, and that was changed after it was saved.

    `saved_in` is the module that ran when it was saved, `changed_in` the one that ran when it was changed, `operation`
    autograd's name for the step that needs it, `shape` the tensor's. `message` says it in a sentence.
    """

    saved_in: str
    changed_in: str
    operation: str
    shape: tuple[int, ...]
    message: str

    def __str__(self) -> str:
        return self.message


class _Saved:
    """A tensor as it was saved for backward."""

    def __init__(self, tensor: Tensor, where: str) -> None:
        self.tensor = tensor.detach()  # shares memory and version counter, but not the graph: no cycle
        self.version = tensor._version
        self.where = where
        self.changed_in: str | None = None

    @property
    def changed(self) -> bool:
        return self.tensor._version != self.version


class _Recorder:
    """Follows which module is running, what is saved, and what is changed thereafter."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.saved: list[_Saved] = []
        self.hazards: list[InplaceHazard] = []

    @property
    def where(self) -> str:
        return self.running[-1] if self.running else OUTSIDE

    def enter(self, name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            self.blame()
            self.running.append(name)

        return hook

    def leave(self, *_: object) -> None:
        self.blame()
        self.running.pop()

    def blame(self) -> None:
        """Whatever changed since the last look was changed by the module that is running now."""
        left = []
        for entry in self.saved:
            if entry.changed:
                entry.changed_in = self.where
            else:
                left.append(entry)
        self.saved = left

    def pack(self, tensor: Tensor) -> _Saved:
        entry = _Saved(tensor, self.where)
        self.saved.append(entry)
        return entry

    def unpack(self, entry: _Saved) -> Tensor:
        """Backward asks for it: only now a change matters."""
        if entry.changed:
            self.hazards.append(_hazard(entry))
        return entry.tensor


def _hazard(entry: _Saved) -> InplaceHazard:
    operation, shape = _current_operation(), tuple(entry.tensor.shape)
    changed_in = entry.changed_in or OUTSIDE
    return InplaceHazard(
        saved_in=entry.where,
        changed_in=changed_in,
        operation=operation,
        shape=shape,
        message=(
            f"a tensor of shape {shape} that {entry.where} saved for {operation} was changed in place in {changed_in}: "
            "its gradient would be wrong. Make that operation out of place, or clone the tensor before it."
        ),
    )


def _current_operation() -> str:
    current = getattr(torch._C, "_current_autograd_node", None)
    node = current() if callable(current) else None
    return str(node.name()) if node is not None else "backward"


def check_inplace_operations(
    model_or_fn: nn.Module | Callable[..., Any],
    *inputs: object,
    loss_fn: Callable[[Any], Tensor] | None = None,
    model: nn.Module | None = None,
) -> list[InplaceHazard]:
    """In-place operations that break the backward pass; run forward and backward once, and leave no trace.

    Give a model and its inputs, or a function that computes a loss (with `model` to have modules named). `loss_fn`
    makes the loss of the output; without it all outputs are summed. An `inplace=True` that harms nothing, as that of a
    ReLU after a linear layer, is not reported: what counts is whether backward needs a value that is gone.

    Example:
        >>> check_inplace_operations(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)), torch.ones(1, 2))
        []
        >>> bad = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid(), nn.ReLU(inplace=True))
        >>> [hazard] = check_inplace_operations(bad, torch.ones(1, 2))
        >>> hazard.saved_in, hazard.changed_in, hazard.operation
        ('1', '2', 'SigmoidBackward0')
    """
    model = model_or_fn if isinstance(model_or_fn, nn.Module) else model
    recorder = _Recorder()
    with without_trace(model), ExitStack() as hooks:
        for name, module in model.named_modules() if model is not None else ():
            called = name or type(module).__name__
            hooks.callback(module.register_forward_pre_hook(recorder.enter(called)).remove)
            hooks.callback(module.register_forward_hook(recorder.leave).remove)
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack), torch.enable_grad():
            try:
                output = model_or_fn(*inputs)
                loss = loss_fn(output) if loss_fn is not None else as_scalar(output)
                recorder.blame()
                gradients_of(loss)
            except RuntimeError as error:
                if not any(word in str(error) for word in _WORDS):
                    raise
                recorder.hazards.append(_refused(recorder.where, error))
    return list(dict.fromkeys(recorder.hazards))


def _refused(where: str, error: RuntimeError) -> InplaceHazard:
    """Autograd itself would not go on: say where."""
    first = str(error).splitlines()[0]
    return InplaceHazard(saved_in="", changed_in=where, operation="", shape=(), message=f"in {where}: {first}")
