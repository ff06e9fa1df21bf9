"""Gradient checkpointing for blocks named by class or path: less memory, the same loss and the same gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MethodType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

log = logging.getLogger("trimtab")

DEFAULT_BLOCKS = ("transformer", "ResidualAttentionBlock", "TransformerEncoderLayer")
_BEFORE = "_forward_before_checkpointing"
"""Set on a wrapped block: the forward that stood on the instance before, or None where the class has it."""
SMALL = 1 << 16
"""Values in a buffer up to which it is taken for statistics that move; a larger one is likely a mask or a table."""

Buffers = list[tuple[nn.Module, str, Tensor, int, Tensor]]
"""Of each buffer: its module and name, the tensor, its version, and a copy of its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed:
    """Which blocks are recomputed in the backward pass; `remove()` makes them plain again."""

    blocks: tuple[str, ...]
    """The paths of the blocks that this call wrapped, or found wrapped by an earlier one."""
    model: nn.Module = field(repr=False)

    def remove(self) -> tuple[str, ...]:
        """Undo it for these blocks; returns those that were still wrapped."""
        return tuple(path for path in self.blocks if _unwrap(path, self.model.get_submodule(path)))


def add_gradient_checkpointing(
    model: nn.Module, modules_to_checkpoint: Iterable[str] | str = DEFAULT_BLOCKS
) -> Checkpointed:
    """Recompute the named blocks in the backward pass instead of keeping what is inside them; says which.

    A name is the class of a block, its path in the model, or the last part of that path. Every block is wrapped once:
    of nested matches the outermost, and where a path names what holds blocks named by class (`transformer` around
    `ResidualAttentionBlock`), the blocks, for one wrap around them all would save nothing at the peak. A `ModuleList`
    or `Sequential` stands for its members.

    Loss and gradients stay bit-identical: random state, buffers (BatchNorm, spectral norm) and autocast are in
    the second pass what they were in the first, and buffers move once a step. It acts in training alone, keeps the keys
    of `state_dict`, survives `copy.deepcopy`, and a second call changes nothing. (A model that was pickled whole comes
    back plain.) Where no name matches, a warning says which there are.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from trimtab.compat.nn import add_gradient_checkpointing
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        >>> handle = add_gradient_checkpointing(model)
        >>> handle.blocks
        ('layers.0', 'layers.1')
        >>> model(torch.randn(3, 5, 8)).sum().backward()
        >>> handle.remove()
        ('layers.0', 'layers.1')
    """
    names = (modules_to_checkpoint,) if isinstance(modules_to_checkpoint, str) else tuple(modules_to_checkpoint)
    modules = dict(model.named_modules())
    wrapped = {path for path, module in modules.items() if _is_wrapped(module)}
    blocks = []
    for path in _matches(modules, names):
        if any(other != path and _related(other, path) for other in wrapped):
            log.info("%s is left alone: a block inside or around it is checkpointed already", path or "the model")
            continue
        if path not in wrapped:
            _wrap(modules[path])
        blocks.append(path)
    if blocks:
        log.info("gradient checkpointing of %d blocks: %s", len(blocks), ", ".join(b or "the model" for b in blocks))
    elif not _matches(modules, names):
        classes = sorted({type(module).__name__ for module in modules.values()})
        parts = sorted({path.rpartition(".")[2] for path in modules if path and not path.rpartition(".")[2].isdigit()})
        log.warning(
            "no module is called %s, so nothing is checkpointed; there are the classes %s and the names %s",
            ", ".join(map(repr, names)),
            ", ".join(classes),
            ", ".join(parts) or "(none)",
        )
    return Checkpointed(blocks=tuple(blocks), model=model)


def remove_gradient_checkpointing(model: nn.Module) -> tuple[str, ...]:
    """Make every checkpointed block of a model plain again; returns their paths.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> _ = add_gradient_checkpointing(model, ["Linear"])
        >>> remove_gradient_checkpointing(model), remove_gradient_checkpointing(model)
        (('0', '1'), ())
    """
    return tuple(path for path, module in model.named_modules() if _unwrap(path, module))


def _matches(modules: dict[str, nn.Module], names: tuple[str, ...]) -> list[str]:
    """The paths to wrap: outermost ones, classes before paths, lists as their members; in the model's order."""
    by_class = _outermost(path for path, module in modules.items() if type(module).__name__ in names)
    by_path = _outermost(
        path
        for path in modules
        if path
        and (path in names or path.rpartition(".")[2] in names)
        and not any(_related(path, block) for block in by_class)
    )
    chosen = {member for path in (*by_class, *by_path) for member in _members(modules, path)}
    return [path for path in modules if path in chosen]


def _members(modules: dict[str, nn.Module], path: str) -> Iterator[str]:
    """The path, or the paths of its members where it is a list of blocks."""
    if isinstance(modules[path], nn.ModuleList | nn.Sequential):
        for name, _ in modules[path].named_children():
            yield from _members(modules, f"{path}.{name}" if path else name)
    else:
        yield path


def _outermost(paths: Iterable[str]) -> list[str]:
    found: list[str] = []
    for path in paths:  # named_modules gives parents before children
        if not any(_related(path, other) for other in found):
            found.append(path)
    return found


def _related(a: str, b: str) -> bool:
    """Whether one of the two paths is, or is inside, the other."""
    short, long = sorted((a, b), key=len)
    return short in ("", long) or long.startswith(f"{short}.")


def _is_wrapped(module: nn.Module) -> bool:
    return _BEFORE in module.__dict__


def _wrap(module: nn.Module) -> None:
    module.__dict__[_BEFORE] = module.__dict__.get("forward")
    module.__dict__["forward"] = MethodType(forward, module)  # a bound method: a deep copy binds to the copy


def _unwrap(path: str, module: nn.Module) -> bool:
    if not _is_wrapped(module):
        return False
    if getattr(module.__dict__.get("forward"), "__func__", None) is not forward:
        log.warning("something else has wrapped the forward of %s since; its checkpointing stays", path)
        return False
    before = module.__dict__.pop(_BEFORE)
    del module.__dict__["forward"]
    if before is not None:
        module.__dict__["forward"] = before
    return True


def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
    """The forward of a wrapped block. It has this name so that a pickle finds the class's own."""
    inner: Callable[..., object] = self.__dict__.get(_BEFORE) or MethodType(type(self).forward, self)
    if not (self.training and torch.is_grad_enabled()):
        return inner(*args, **kwargs)
    run = partial(inner, **kwargs)  # keywords of the block must not meet those of checkpoint
    if torch.compiler.is_compiling():
        compiled: object = checkpoint(run, *args, use_reentrant=False)
        return compiled
    before = _buffers(self)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _as_it_was(self, before)

    out: object = checkpoint(run, *args, use_reentrant=False, context_fn=contexts)
    before[:] = [kept for kept in before if _may_have_moved(*kept)]  # a large constant is not kept for long
    return out


def _buffers(block: nn.Module) -> Buffers:
    found = []
    for module in block.modules():
        for name, tensor in module._buffers.items():
            if tensor is not None:
                found.append((module, name, tensor, tensor._version, tensor.detach().clone()))
    return found


def _may_have_moved(module: nn.Module, name: str, tensor: Tensor, version: int, _value: Tensor) -> bool:
    """BatchNorm moves its statistics without counting it, so only of large buffers the version is believed."""
    return tensor.numel() <= SMALL or module._buffers.get(name) is not tensor or tensor._version != version


@contextmanager
def _as_it_was(block: nn.Module, before: Buffers) -> Iterator[None]:
    """The second pass sees the buffers the first one saw, and leaves no trace in them."""
    now = _buffers(block)
    with torch.no_grad():
        for module, name, tensor, _version, value in before:
            module._buffers[name] = tensor
            tensor.copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, tensor, version, value in now:
                if _may_have_moved(module, name, tensor, version, value):
                    module._buffers[name] = tensor
                    tensor.copy_(value)
