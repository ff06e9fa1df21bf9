"""Sees the losses that a script calls `backward()` on, and brings them to the step that they are for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Round(threading.local):
    """What one thread called backward on since the last step of any optimizer."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.stepped = False
        self.scaled: tuple[Tensor, Tensor, Tensor] | None = None  # what scale() made, of what, and by how much


class Losses:
    """Listens to `torch.autograd.backward` (which `Tensor.backward` calls) and to `GradScaler.scale`."""

    def __init__(self) -> None:
        self._round = _Round()
        self._undo: list[Callable[[], None]] = []

    def listen(self) -> None:
        """Put the wrappers in place."""
        inner_backward, inner_scale = torch.autograd.backward, torch.amp.GradScaler.scale

        @functools.wraps(inner_backward)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self._see(tensors)
            return inner_backward(tensors, *args, **kwargs)

        @functools.wraps(inner_scale)
        def scale(scaler: Any, outputs: Any) -> Any:
            out = inner_scale(scaler, outputs)
            if isinstance(outputs, Tensor) and isinstance(out, Tensor) and out is not outputs:
                by = getattr(scaler, "_scale", None)
                if isinstance(by, Tensor):
                    self._round.scaled = (out, outputs, by.detach().clone())
            return out

        torch.autograd.backward = backward
        torch.amp.GradScaler.scale = scale  # type: ignore[assignment, method-assign]
        self._undo = [
            lambda: setattr(torch.autograd, "backward", inner_backward),
            lambda: setattr(torch.amp.GradScaler, "scale", inner_scale),
        ]

    def remove(self) -> None:
        """Take the wrappers off again."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _see(self, tensors: Any) -> None:
        if torch.compiler.is_compiling():
            return
        mine = self._round
        if mine.stepped:
            mine.losses, mine.stepped = [], False
        scaled, mine.scaled = mine.scaled, None
        for tensor in (tensors,) if isinstance(tensors, Tensor) else tuple(tensors):
            if isinstance(tensor, Tensor) and tensor.numel() == 1 and tensor.is_floating_point():
                mine.losses.append(_unscaled(tensor, scaled))

    def take(self) -> list[Tensor]:
        """The losses of the step that now begins. Another optimizer that steps on the same backward sees them, too."""
        self._round.stepped = True
        return self._round.losses

    def ended(self, closure: bool) -> None:
        """A step is over; what a closure called backward on inside it was told already."""
        self._round.stepped = True
        if closure:
            self._round.losses = []
        else:  # a loss can hold a whole graph: the number is enough from here on
            self._round.losses = [loss.detach() for loss in self._round.losses]


def _unscaled(tensor: Tensor, scaled: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
    if scaled is None:
        return tensor
    made, original, by = scaled
    # Divided for accumulation after scaling: take only the scale out again.
    return original if made is tensor else tensor.detach() / by.to(tensor.device)
