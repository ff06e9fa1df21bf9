"""Every module that a program builds, known from its birth and not kept alive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from trimtab.launch.models import alive


class Census:
    """Notes modules as they are built, copied or loaded. Walking all objects alive would cost 50 ms each time."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[nn.Module]] = {}

    def take(self) -> Callable[[], None]:
        """Begin with those there are; returns how to end."""
        for module in alive():
            self._note(module)
        undo = [self._wrap("__init__"), self._wrap("__setstate__")]  # copies and pickles come through the second

        def stop() -> None:
            for back in undo:
                back()

        return stop

    def modules(self) -> list[nn.Module]:
        """Those alive whose birth is over: one that is still being built has no parts yet."""
        alive = (module for ref in list(self._known.values()) if (module := ref()) is not None)
        return [module for module in alive if "_parameters" in module.__dict__]

    def _note(self, module: nn.Module) -> None:
        key = id(module)
        self._known[key] = weakref.ref(module, functools.partial(_forget, self._known, key))

    def _wrap(self, name: str) -> Callable[[], None]:
        inner = getattr(nn.Module, name)

        @functools.wraps(inner)
        def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._note(module)
            return inner(module, *args, **kwargs)

        setattr(nn.Module, name, wrapper)
        return lambda: setattr(nn.Module, name, inner)


def _forget(known: dict[int, weakref.ref[nn.Module]], key: int, ref: weakref.ref[nn.Module]) -> None:
    if known.get(key) is ref:  # else the place was taken by another module already
        del known[key]
