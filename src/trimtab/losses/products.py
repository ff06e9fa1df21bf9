"""Large matrix products in the precision a problem asks for, with results always in the dtype sums are kept in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trimtab.losses.problem import Precision

_OUT_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)  # torch.mm(..., out_dtype=)

__all__ = ["multiply", "operand", "products_in"]


@contextmanager
def products_in(precision: Precision, device: torch.device) -> Iterator[None]:
    """No autocast, and on CUDA products in TF32 exactly where ``precision`` says so, whatever the global switch."""
    with torch.autocast(device.type, enabled=False):
        if device.type != "cuda":
            yield
            return
        switch: Any = torch.backends.cuda.matmul
        name = "fp32_precision" if hasattr(switch, "fp32_precision") else "allow_tf32"
        before = getattr(switch, name)
        wanted: Any = precision == "tf32"
        if name == "fp32_precision":  # torch 2.9 and later; reading the old name there mixes two interfaces
            wanted = "tf32" if wanted else "ieee"
        setattr(switch, name, wanted)
        try:
            yield
        finally:
            setattr(switch, name, before)


def operand(x: Tensor, precision: Precision) -> Tensor:
    """``x`` as an operand of `multiply`: rounded to bfloat16 where the product shall be one of those."""
    return x.bfloat16() if precision == "bf16" and x.is_cuda and x.dtype == torch.float32 else x


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``; bfloat16 operands give a float32 result that was never rounded to bfloat16."""
    if a.dtype != torch.bfloat16:
        return a @ b
    if _OUT_DTYPE:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
