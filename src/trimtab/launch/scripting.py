"""`torch.jit.script` compiles a model's hooks, too, and ours are no TorchScript: they step aside for the moment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def wrap_jit_script() -> Callable[[], None]:
    """Put a wrapper in the place of `torch.jit.script`; returns how to take it off again."""
    inner = torch.jit.script

    @functools.wraps(inner)
    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(obj, nn.Module):
            return inner(obj, *args, **kwargs)
        with _without_ours(obj):
            return inner(obj, *args, **kwargs)

    torch.jit.script = script

    def undo() -> None:
        torch.jit.script = inner

    return undo


@contextmanager
def _without_ours(model: nn.Module) -> Iterator[None]:
    hooks = [getattr(module, name) for module in model.modules() for name in HOOKS]
    before = [(table, dict(table)) for table in hooks if any(map(_is_ours, table.values()))]
    try:
        for table, _ in before:
            for key in [k for k, hook in table.items() if _is_ours(hook)]:
                del table[key]
        yield
    finally:
        for table, all_of_them in before:
            table.clear()
            table.update(all_of_them)


def _is_ours(hook: object) -> bool:
    return type(hook).__module__.startswith("trimtab.")
