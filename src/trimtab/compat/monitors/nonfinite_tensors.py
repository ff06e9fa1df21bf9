"""NaN and Inf in tensors: where they are, and, only when asked for, replaced."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from trimtab.core.errors import InputError
from trimtab.sample.measure import reference as measure
from trimtab.sample.transfer import number, to_host

log = logging.getLogger("trimtab")


def find_nonfinite(named: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, int]]:
    """How many NaN and Inf each tensor holds, for those that hold any; one transfer to the host for all of them.

    Example:
        >>> find_nonfinite([("good", torch.ones(2)), ("bad", torch.tensor([1.0, float("nan"), float("inf")]))])
        {'bad': (1, 1)}
    """
    kept = [(name, measure.plain(t)) for name, t in named if _can_be_bad(t)]
    if not kept:
        return {}
    counts = to_host(measure.sizes([t for _, t in kept]))[:, 3:5]
    return {name: (int(nan), int(inf)) for (name, _), (nan, inf) in zip(kept, counts, strict=True) if nan or inf}


def _can_be_bad(tensor: Tensor) -> bool:
    """Whole numbers cannot be NaN; what is not built yet, or has no memory, holds nothing."""
    return (tensor.is_floating_point() or tensor.is_complex()) and not is_lazy(tensor) and not tensor.is_meta


def check_nan_inf(tensor: Tensor | float, name: str) -> bool:
    """Whether there is a NaN or an Inf; logs `NaN detected in {name}` or `Inf detected in {name}`. Changes nothing.

    Example:
        >>> check_nan_inf(torch.tensor([1.0, float("inf")]), "logits"), check_nan_inf(0.5, "loss")
        (True, False)
    """
    if isinstance(tensor, Tensor):
        nan, inf = find_nonfinite([(name, tensor)]).get(name, (0, 0))
    else:
        nan, inf = int(math.isnan(tensor)), int(math.isinf(tensor))
    report_nonfinite(name, nan, inf)
    return bool(nan or inf)


def report_nonfinite(name: str, nan: float, inf: float) -> None:
    """The documented warnings, for what there is."""
    if nan:
        log.warning("NaN detected in %s", name)
    if inf:
        log.warning("Inf detected in %s", name)


def handle_nan_inf(tensor: Tensor, replacement_value: float = 0.0) -> Tensor:
    """A new tensor with every NaN and Inf replaced; the one given stays as it is.

    An explicit choice for a named tensor, such as a feature that may be missing: nothing in trimtab calls it by itself.
    A weight or gradient that is replaced by 0 is a wrong one that looks healthy; skip that step instead. The result is
    differentiable: what was replaced gets no gradient. How many were replaced is logged.

    Example:
        >>> handle_nan_inf(torch.tensor([1.0, float("nan"), float("-inf")]), replacement_value=2.0)
        tensor([1., 2., 2.])
    """
    if tensor.layout is not torch.strided:
        raise InputError(f"the tensor is {tensor.layout}; expected a dense one: call to_dense() or use its values()")
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.clone()
    if not abs(replacement_value) <= torch.finfo(tensor.dtype).max:
        raise InputError(
            f"replacement_value is {replacement_value}; expected a finite number that {tensor.dtype} can hold"
        )
    fine = torch.isfinite(tensor)
    replaced = int(tensor.numel() - number(fine.sum()))
    if replaced:
        log.warning("replaced %d of %d values that were NaN or Inf by %g", replaced, tensor.numel(), replacement_value)
    return torch.where(fine, tensor, torch.full_like(tensor, replacement_value))
