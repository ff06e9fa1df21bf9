"""What is in a tensor: whether it holds NaN or Inf, where, and the figures that a person wants to see of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.trace.origin import Operand

LONGEST_VALUE = 60
"""Characters of an argument that is no tensor."""


@dataclass(frozen=True, slots=True)
class Bad:
    """Which kinds of values that are not finite a tensor holds; beside NaN, Inf does not count."""

    nan: bool = False
    inf: bool = False

    def __bool__(self) -> bool:
        return self.nan or self.inf


FINE = Bad()


def bad_in(tensor: Tensor) -> Bad:
    """Whether a tensor holds NaN or Inf.

    The sum of values that are all finite is finite but for an overflow: most tensors need one cheap pass.

    Example:
        >>> bad_in(torch.tensor([1.0, float("inf")]))
        Bad(nan=False, inf=True)
        >>> bool(bad_in(torch.full((2,), 3e38)))
        False
    """
    plain = _plain(tensor)
    if plain is None or math.isfinite(float(plain.sum())):
        return FINE
    least, most = (float(v) for v in torch.aminmax(plain))  # both are NaN where any value is
    return Bad(nan=math.isnan(least), inf=math.isinf(least) or math.isinf(most))


def where_bad(tensor: Tensor) -> Tensor:
    """True where a value is not finite."""
    return ~torch.isfinite(tensor.detach())


def _plain(tensor: Tensor) -> Tensor | None:
    """Its values as a strided tensor of real numbers; None where there are none that could be bad."""
    tensor = tensor.detach()
    if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if tensor.layout is not torch.strided:
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()
        elif tensor.layout in (torch.sparse_csr, torch.sparse_csc):
            tensor = tensor.values()
        else:
            return None
    if getattr(tensor, "is_nested", False) or not tensor.numel():
        return None
    if tensor.itemsize == 1:  # float8 has no sum
        tensor = tensor.float()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_mask(tensor: Tensor) -> bool:
    """Whether its infinities look deliberate: minus infinity, beside nothing or zeros or ones alone.

    Example:
        >>> is_mask(torch.tensor([0.0, -math.inf])), is_mask(torch.tensor([0.3, -math.inf]))
        (True, False)
    """
    values = _plain(tensor)
    if values is None:
        return False
    finite = values[torch.isfinite(values)]
    return bool(((values != math.inf) & ~torch.isnan(values)).all() and ((finite == 0) | (finite == 1)).all())


def tensors_in(value: object, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part, depth + 1)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part, depth + 1)
    elif depth < 3 and hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name, None), depth + 1)


def named_tensors(value: object, name: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """The same, each with the way to it.

    Example:
        >>> [name for name, _ in named_tensors({"x": [torch.ones(1)]}, "batch")]
        ["batch['x'][0]"]
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from named_tensors(part, f"{name}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from named_tensors(part, f"{name}[{i}]", depth + 1)
    elif depth < 3 and hasattr(value, "__dataclass_fields__"):
        for key in value.__dataclass_fields__:
            yield from named_tensors(getattr(value, key, None), f"{name}.{key}", depth + 1)


def described(name: str, value: Any) -> Operand:
    """The figures of one argument.

    Example:
        >>> described("self", torch.tensor([0.0, 2.0, math.nan])).largest
        2.0
    """
    if not isinstance(value, Tensor):
        text = repr(value)
        short = text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"
        return Operand(name=name, shape=(), dtype=type(value).__name__, value=short)
    shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    values = _plain(value)
    if values is None:
        if not value.numel() or value.is_meta or value.layout is not torch.strided:
            return Operand(name=name, shape=shape, dtype=dtype)
        whole = value.detach().to(torch.float64)
        return Operand(
            name=name,
            shape=shape,
            dtype=dtype,
            smallest=float(whole.min()),
            largest=float(whole.max()),
            num_zero=int((whole == 0).sum()),
        )
    finite = values[torch.isfinite(values)]
    return Operand(
        name=name,
        shape=shape,
        dtype=dtype,
        smallest=float(finite.min()) if finite.numel() else None,
        largest=float(finite.max()) if finite.numel() else None,
        num_zero=int((values == 0).sum()),
        num_nan=int(torch.isnan(values).sum()),
        num_inf=int(torch.isinf(values).sum()),
    )
