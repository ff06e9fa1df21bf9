"""In-place operations that really break a backward pass, found by the version counters of what autograd saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.torchutil.trial_pass import as_scalar, gradients_of, without_trace

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
