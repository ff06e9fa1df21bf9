"""Import paths of earlier versions that were documented: they keep working, and lead to the very same modules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

TABLE = {
    "trimtab.checkpoint.quarantine": "trimtab.checkpoint.loader",
    "trimtab.checks": "trimtab.doctor.checks",
    "trimtab.checks.outcome": "trimtab.doctor.checklist",
    "trimtab.checks.sample": "trimtab.doctor.sample_training",
    "trimtab.core.recommendations": "trimtab.advice.recommendations",
    "trimtab.launch": "trimtab.run",
    "trimtab.losses.stable": "trimtab.compat.stable_losses",
    "trimtab.losses.versions": "trimtab.compat.stable_losses",
    "trimtab.monitor": "trimtab.compat.monitors",
    "trimtab.monitor.activations": "trimtab.compat.monitors.activation_monitor",
    "trimtab.monitor.gradients": "trimtab.compat.monitors.gradient_monitor",
    "trimtab.monitor.norms": "trimtab.compat.monitors.norm_functions",
    "trimtab.nn": "trimtab.compat.nn",
    "trimtab.nn.activations": "trimtab.compat.nn.layers",
    "trimtab.nn.checkpointing": "trimtab.compat.nn.gradient_checkpointing",
    "trimtab.nn.compare": "trimtab.compat.nn.activation_comparison",
    "trimtab.nn.noise": "trimtab.compat.nn.layers",
    "trimtab.nn.stabilizer": "trimtab.compat.nn.layers",
    "trimtab.record.line_sink": "trimtab.compat.line_sink",
    "trimtab.record.training_tags": "trimtab.compat.training_tags",
    "trimtab.recover": "trimtab.checkpoint",
    "trimtab.recover.documented": "trimtab.compat.checkpoint_pair",
    "trimtab.recover.sampler": "trimtab.checkpoint.loader",
}
"""Old path: new path. What lies in a package that moved as a whole moved with it."""

NAMESPACES = {
    "trimtab.accelerate": "trimtab.integrations.accelerate",
    "trimtab.composer": "trimtab.integrations.composer",
    "trimtab.fastai": "trimtab.integrations.fastai",
    "trimtab.hf": "trimtab.integrations.huggingface",
    "trimtab.ignite": "trimtab.integrations.ignite",
    "trimtab.keras": "trimtab.integrations.keras",
    "trimtab.lightning": "trimtab.integrations.lightning",
}
"""Short path: where the integration lies. Importing one needs its framework."""


def resolve(name: str) -> str | None:
    """Where an old path leads; None for a path that is none.

    Example:
        >>> resolve("trimtab.recover.loader"), resolve("trimtab.guard")
        ('trimtab.checkpoint.loader', None)
    """
    if name in TABLE:
        return TABLE[name]
    if name in NAMESPACES:
        return NAMESPACES[name]
    package, _, module = name.rpartition(".")
    moved = resolve(package) if package else None
    return f"{moved}.{module}" if moved is not None else None


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = resolve(fullname) if fullname.startswith("trimtab.") else None
        return None if new is None else ModuleSpec(fullname, _Same(new))


class _Same(Loader):
    """Gives the module that is there under the new path: a second copy of it would have classes of its own."""

    def __init__(self, new: str) -> None:
        self._new = new
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has just put the old path there


def install() -> None:
    """Let the old paths lead to the new ones; once is enough."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
