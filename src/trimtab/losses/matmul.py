"""Large matrix products in the precision a problem asks for, with results always in the dtype sums are kept in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

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
        wanted = _Wanted(tf32=precision == "tf32")
        wanted.enter()
        try:
            yield
        finally:
            wanted.leave()


class _Wanted:
    """One use of the switch, which is the whole process's: the last one to leave puts back what the first one found.

    Backward passes of several cards run in threads of their own. Were each to put back what it found, the setting of
    one that ended later could stay for good.
    """

    lock = threading.Lock()
    inside: ClassVar[list[_Wanted]] = []
    before: ClassVar[Any] = None

    def __init__(self, *, tf32: bool) -> None:
        self.switch: Any = torch.backends.cuda.matmul
        # torch 2.9 and later have the first; reading the old name there mixes two interfaces.
        self.name = "fp32_precision" if hasattr(self.switch, "fp32_precision") else "allow_tf32"
        self.value: Any = tf32 if self.name == "allow_tf32" else "tf32" if tf32 else "ieee"

    def enter(self) -> None:
        """Set the switch."""
        with self.lock:
            if not self.inside:
                type(self).before = getattr(self.switch, self.name)
            self.inside.append(self)
            setattr(self.switch, self.name, self.value)

    def leave(self) -> None:
        """Set it for whoever entered last and is still inside, or as it was."""
        with self.lock:
            self.inside.remove(self)
            setattr(self.switch, self.name, self.inside[-1].value if self.inside else self.before)


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
