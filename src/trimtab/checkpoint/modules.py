"""The tensors of a module by name: parameters and all buffers, taken, compared and put back in place. Masks may hold
infinities on purpose."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trimtab.checkpoint.compare import different, kind_of, listed, missing_and_extra
from trimtab.core.errors import CheckpointError
from trimtab.torchutil.undo import tensor_values

log = logging.getLogger("trimtab")

COMPILED = "_orig_mod."
"""What `torch.compile` puts into names; a compiled and a plain model are the same model."""

KEPT_BYTES = 1 << 30
"""A module larger than this is not copied before it is loaded."""


def whole(model: Any) -> Any:
    """The model; several in a dict as one module that holds them under their names, as a guard saves them."""
    if not isinstance(model, Mapping) or isinstance(model, nn.Module):
        return model
    if wrong := {str(name): one for name, one in model.items() if not isinstance(one, nn.Module)}:
        told = ", ".join(f"{name!r} is a {type(one).__name__}" for name, one in wrong.items())
        raise CheckpointError(f"model is a dict, and {told}; expected names with a torch.nn.Module each")
    holder = nn.Module()
    holder._modules.update({str(name): one for name, one in model.items()})
    return holder


def plain_name(module: nn.Module, name: str) -> str:
    """The name without what `torch.compile` and the data-parallel wrappers add to it."""
    name = name.replace(COMPILED, "")
    parallel = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
    return name.removeprefix("module.") if parallel else name


def parameter_names(module: nn.Module | None) -> dict[int, str]:
    """The plain name of every parameter by its identity; the first one where a tensor has several."""
    found: dict[int, str] = {}
    if isinstance(module, nn.Module):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), plain_name(module, name))
    return found


def tensors_of(module: nn.Module) -> dict[str, Any]:
    """Parameters, buffers and extra state under plain names; buffers that `state_dict` leaves out are in it too."""
    state = {plain_name(module, name): value for name, value in module.state_dict().items()}
    return state | _unsaved_buffers(module)


def differences(part: str, module: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """Why `saved` cannot be put into this module, one line each; nothing is changed."""
    here = {plain_name(module, name): value for name, value in module.state_dict(keep_vars=True).items()}
    unsaved = _unsaved_buffers(module)
    lines = missing_and_extra(part, here, (name for name in saved if name not in unsaved), "tensors")
    for name in (name for name in here if name in saved):
        ours, theirs = here[name], saved[name]
        if isinstance(ours, Tensor) and is_lazy(ours):  # takes the shape of what is loaded
            continue
        if isinstance(ours, Tensor) and (not isinstance(theirs, Tensor) or kind_of(ours) != kind_of(theirs)):
            lines.append(different(part, name, kind_of(ours), kind_of(theirs)))
    return lines


@torch.no_grad()
def load(part: str, module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Copy `saved` into the module's own tensors, which stay the same objects.

    Goes through `load_state_dict`, so that hooks on it learn of the change.
    """
    current = module.state_dict()
    state = OrderedDict((name, saved[plain_name(module, name)]) for name in current)
    # The names are those of this version of the module, so its version marks are the right ones.
    state._metadata = getattr(current, "_metadata", OrderedDict())  # type: ignore[attr-defined]
    module.load_state_dict(state)
    left = []
    for name, buffer in _unsaved_buffers(module).items():
        value = saved.get(name)
        if isinstance(value, Tensor) and kind_of(value) == kind_of(buffer):
            buffer.copy_(value)
        else:
            left.append(name)
    if left:
        log.warning("%s: buffers that are not in the checkpoint in this shape stay as they are: %s", part, listed(left))


def keep(module: nn.Module) -> Callable[[], None]:
    """A function that puts the tensors back as they are now, for a module small enough to be copied.

    Shapes were compared before; only a hook of the module's own can still fail, and the copy is for that.
    """
    live = [one for one in (*module.parameters(), *module.buffers()) if not is_lazy(one) and not one.is_meta]
    if sum(one.numel() * one.element_size() for one in live) > KEPT_BYTES:
        return lambda: log.warning("%s was too large to be kept: part of it may be loaded", type(module).__name__)
    return tensor_values(live)


def _unsaved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers registered with persistent=False: `state_dict` leaves them out, the next step may depend on them."""
    found: dict[str, Tensor] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name in sorted(owner._non_persistent_buffers_set):
            buffer = owner._buffers.get(name)
            if buffer is not None:
                found[plain_name(module, f"{prefix}.{name}" if prefix else name)] = buffer.detach()
    return found


@torch.no_grad()
def masks_of(section: str, module: nn.Module | None) -> set[str]:
    """The names (`model.mask`) of buffers that hold nothing but -inf, 0 and 1.

    Statistics that went wrong do not look like that, so a mask may pass where everything else must be finite.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> model.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        >>> model.register_buffer("mean", torch.tensor([0.3, float("-inf")]))
        >>> masks_of("model", model)
        {'model.mask'}
    """
    if not isinstance(module, nn.Module):
        return set()
    found = module.named_buffers(remove_duplicate=False)
    return {f"{section}.{plain_name(module, name)}" for name, buffer in found if _is_mask(buffer)}


def _is_mask(buffer: Tensor) -> bool:
    if buffer.is_meta or buffer.layout is not torch.strided or not buffer.is_floating_point() or buffer.numel() < 2:
        return False
    if buffer.element_size() == 1:  # 8-bit floats know no arithmetic
        buffer = buffer.float()
    return bool((buffer.isneginf() | (buffer == 0) | (buffer == 1)).all())
