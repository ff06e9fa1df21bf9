"""Does the gradient reach every parameter? Asked by running a backward pass, not by looking at old gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from trimtab.core.errors import InputError
from trimtab.core.types import ABSENT
from trimtab.monitor.probe import gradients_of, untouched
from trimtab.monitor.snapshot import snapshot

ZERO_NORM = 1e-8
"""A gradient with a smaller norm counts as zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFlow:
    """Where one backward pass arrived: the norm of every gradient, and the parameters it missed.

    `missing` got no gradient at all, `zero` one with a norm below 1e-8, `nonfinite` one with a NaN or Inf; `frozen`
    want none. `detached` says that the loss depends on no parameter.
    """

    norms: Mapping[str, float]
    missing: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    nonfinite: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    detached: bool = False

    @property
    def ok(self) -> bool:
        """Whether every trainable parameter got a gradient that moves it."""
        return not (self.missing or self.zero or self.nonfinite or self.detached)


def check_gradient_flow(model: nn.Module, loss: Tensor | Callable[..., Any], *inputs: Any) -> GradientFlow:
    """Run a backward pass and see which parameters get a gradient; the model is left as it was.

    `loss` is the loss tensor, whose graph is kept for your own backward, or a function that computes it, called with
    `inputs`. A function that calls backward itself will do as well. Gradients that lie about from earlier are not
    looked at, and are there again afterwards, as are the mode, the buffers and the random numbers.

    Example:
        >>> import torch
        >>> model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
        >>> flow = check_gradient_flow(model, lambda x: model["used"](x).sum(), torch.ones(1, 2))
        >>> flow.ok, flow.missing
        (False, ('unused.weight', 'unused.bias'))
    """
    with untouched(model):
        made = loss if isinstance(loss, Tensor) else loss(*inputs)
        if not any(p.grad is not None for p in model.parameters()):  # else the function called backward itself
            if not isinstance(made, Tensor):
                raise InputError(
                    f"the function returned a {type(made).__name__} and left no gradients; expected a loss tensor, or "
                    "that it calls backward()"
                )
            _fill(model, made, keep_graph=isinstance(loss, Tensor))
        seen = snapshot(model, detailed=False)
    bad = seen.nan + seen.inf > 0
    small = seen.present & (seen.norms < ZERO_NORM)
    return GradientFlow(
        norms={seen.names[i]: float(seen.norms[i]) for i in np.flatnonzero(seen.present)},
        missing=tuple(seen.names[i] for i in np.flatnonzero(seen.norms == ABSENT)),
        zero=tuple(seen.names[i] for i in np.flatnonzero(small)),
        nonfinite=tuple(seen.names[i] for i in np.flatnonzero(bad)),
        frozen=seen.frozen,
        detached=not bool(seen.present.any()),
    )


def _fill(model: nn.Module, loss: Tensor, *, keep_graph: bool) -> None:
    """Put the gradients of a loss into the model."""
    if loss.numel() != 1:
        raise InputError(f"the loss has shape {tuple(loss.shape)}; expected one number, for example loss.mean()")
    mine = {id(p) for p in model.parameters()}
    for p, grad in gradients_of(loss, keep_graph=keep_graph):
        if id(p) in mine:
            p.grad = grad
