"""Sees a script's own `clip_grad_norm_`: it hides the norm, spreads a NaN to every gradient, and zeroes huge ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trimtab.core.contain import Contained
from trimtab.sample import measure
from trimtab.sample.host import number

Told = Callable[[list[Tensor], Tensor | float], bool]
"""Called with the parameters and their norm before clipping; says whether a bad update is kept out by a guard."""


def wrap_clip_grad_norm(told: Told, contained: Contained) -> Callable[[], None]:
    """Put a wrapper in the place of `torch.nn.utils.clip_grad_norm_`; returns how to take it off again.

    On finite gradients the result is bit for bit that of PyTorch. Where a guard keeps the update out anyway, a
    non-finite gradient stays where it arose, so that it can be named; and finite gradients whose norm overflows are
    clipped, not zeroed.
    """
    homes: tuple[Any, ...] = (torch.nn.utils, torch.nn.utils.clip_grad)
    inner = torch.nn.utils.clip_grad_norm_
    total_norm, scale = torch.nn.utils.get_total_norm, torch.nn.utils.clip_grads_with_norm_

    def kept_out(params: list[Tensor], grads: list[Tensor], norm: Tensor) -> float | None:
        """The true norm where a guard keeps a bad update out, else None."""
        true = number(norm)
        if not math.isfinite(true):
            true = number(measure.total(measure.wide_norms([measure.plain(g) for g in grads])))
        return true if told(params, true) else None

    @functools.wraps(inner)
    def clip_grad_norm_(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        params = list(parameters)
        if not params:
            return inner((p for p in params), max_norm, norm_type, error_if_nonfinite, foreach)  # it warns of these
        grads = [p.grad for p in params if p.grad is not None]
        plain = all(type(g) is Tensor and g.is_cpu and g.layout is torch.strided for g in grads)
        if not grads or float(norm_type) != 2.0 or torch.compiler.is_compiling():
            return inner(params, max_norm, norm_type, error_if_nonfinite, foreach)
        if not plain or error_if_nonfinite:  # an error is PyTorch's own to raise
            norm = inner(params, max_norm, norm_type, error_if_nonfinite, foreach)
            contained.call("noting a norm", told, params, norm)
            return norm
        norm = total_norm(grads, norm_type, error_if_nonfinite, foreach)
        finite = math.isfinite(float(norm))
        true: float | None = contained.call("noting a norm", kept_out, params, grads, norm)
        if finite or true is None:
            scale(params, max_norm, norm, foreach)
        elif math.isfinite(true):
            with torch.no_grad():
                torch._foreach_mul_(grads, float(max_norm) / true)
        return norm

    for home in homes:
        home.clip_grad_norm_ = clip_grad_norm_

    def undo() -> None:
        for home in homes:
            home.clip_grad_norm_ = inner

    return undo
