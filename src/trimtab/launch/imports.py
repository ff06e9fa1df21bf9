"""Be told when a module has been imported, without importing it: a script may set up its environment first."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` right after the module `name` was executed; at once if it is there already.

    What `then` raises is its own to contain: it would surface in the script's import.
    """
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Stands first in line for one module, lets the others find it, and wraps the loader they give."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # one import is enough, and the search below must not come back here
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader, then = spec.loader, self._then
        inner = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = inner  # type: ignore[method-assign]
            inner(module)
            then()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
