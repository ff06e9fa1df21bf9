"""Parameters of which a process holds a part only."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import nn


def is_part(param: object) -> bool:
    """Whether this process may hold only a part of a parameter."""
    return hasattr(param, "device_mesh") or hasattr(param, "_is_flat_param")


def is_first() -> bool:
    """Whether this process is the first of its run, or the only one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def has_replicas(*modules: object) -> bool:
    """Whether other processes hold copies of these models, which `DistributedDataParallel` keeps alike."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return False
    inner = (one for module in modules if isinstance(module, nn.Module) for one in module.modules())
    return any(isinstance(one, nn.parallel.DistributedDataParallel) for one in inner)


def shares_parameters(*modules: object) -> bool:
    """Whether other processes hold parts of these models, so that only all of them together can save them.

    Example:
        >>> shares_parameters(nn.Linear(2, 1), None)
        False
    """
    return any(is_part(param) for _, param in _named(modules))


def refusal(*modules: object) -> str:
    """Why these cannot be saved at all, and what to do; empty where they can.

    Example:
        >>> refusal(nn.Linear(2, 1), None)
        ''
    """
    flat = [name for name, param in _named(modules) if hasattr(param, "_is_flat_param")]
    if not flat:
        return ""
    return (
        f"{len(flat)} parameters are flattened and sharded by FullyShardedDataParallel ({flat[0]} first), and trimtab "
        "cannot save or load those; shard the model with torch.distributed.fsdp.fully_shard instead, or call "
        "torch.distributed.checkpoint's save and load in your loop, on every rank, between two steps"
    )


def _named(modules: tuple[object, ...]) -> Iterator[tuple[str, nn.Parameter]]:
    for one in modules:
        if isinstance(one, nn.Module):
            yield from one.named_parameters()
