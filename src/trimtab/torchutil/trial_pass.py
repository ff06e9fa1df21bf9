"""Run a model once to learn something about it, and leave no trace: gradients, buffers, mode and random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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
