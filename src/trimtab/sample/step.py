"""What is known of one step while it is under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trimtab.core.types import Layout
from trimtab.sample.full import FullLook

NO_TABLE = torch.zeros(0, 1, dtype=torch.float32, device="cpu")


@dataclass(slots=True)
class Step:
    """One attempted optimizer step, from its gradients to its sample."""

    number: int
    cadence: bool
    layout: Layout
    loss: Tensor | float | None
    scalars: dict[str, float | Tensor]
    table: Tensor = NO_TABLE
    device_names: tuple[str, ...] = ()  # of the values that stand behind the table in one device buffer
    look: FullLook | None = None
    withheld: Any = None
    rejected: bool = False
    bad_buffers: list[tuple[int, int]] = field(default_factory=list)
    undo_flag: Tensor | None = None  # set where the device decides: the host does not know yet
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    frozen: tuple[int, ...] = ()
    captured: bool = False  # recorded into a CUDA graph: there is nobody to tell
