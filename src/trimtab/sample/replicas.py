"""Parameters that several processes hold alike, and whether each process trains on data of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.sample.measure.reference import plain
from trimtab.sample.reduce import is_everybody
from trimtab.sample.transfer import is_here, number
from trimtab.torchutil.sharded import is_part

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 1 << 52
"""Below it a float64 holds every whole number: checksums travel with other numbers, as one of them."""


class Replicas:
    """What `DistributedDataParallel` keeps alike in all processes, bit for bit."""

    def __init__(self, model: nn.Module) -> None:
        self.data_parallel = is_data_parallel(model)
        """Whether every process has a batch of its own. Tensor parallel ones share a batch."""
        self._params = list(kept_alike(model))

    def checksum(self) -> float | None:
        """A number that depends on every bit of the weights; None where there are none here to compare.

        Of weights on a device nothing is said: reading them would keep the host waiting.
        """
        if not self._params or not all(map(is_here, self._params)):
            return None
        checksum = 0
        for i, param in enumerate(self._params, start=1):
            values = plain(param.detach()).contiguous()
            bits = values.view(_INTEGERS[values.element_size()])
            checksum = (checksum + i * int(number(bits.sum(dtype=torch.int64)))) % _MODULUS
        return float(checksum)


def kept_alike(model: nn.Module) -> Iterator[Tensor]:
    """The parameters that are trained and synchronised in every step.

    Not those that the user took out, such as experts that live in one process each, nor those of a model whose
    processes go their own ways for some steps (`post_localSGD`).
    """
    for module in model.modules():
        if not isinstance(module, nn.parallel.DistributedDataParallel) or _goes_apart(module):
            continue
        ignored = getattr(module, "parameters_to_ignore", ())
        for name, param in module.module.named_parameters():
            if param.requires_grad and name not in ignored and not is_part(param):
                yield param


def _goes_apart(module: Any) -> bool:
    hooks = (hook for hook, _ in getattr(module, "_comm_hooks", ()))
    return any("localsgd" in getattr(hook, "__name__", "").lower() for hook in hooks)


def is_data_parallel(model: nn.Module) -> bool:
    """Whether every process trains on a batch of its own, as far as the placement of parameters tells."""
    parts: list[Any] = [p for p in model.parameters() if is_part(p)]
    if not parts:
        return any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules())
    sharded = any(type(m).__name__.startswith("FSDP") or hasattr(m, "unshard") for m in model.modules())
    meshed = [p for p in parts if hasattr(p, "device_mesh")]
    return (sharded or not meshed) and all(
        is_everybody(p.device_mesh) and (p.device_mesh.ndim == 1 or p.placements[0].is_replicate()) for p in meshed
    )
