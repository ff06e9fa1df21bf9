"""The guard: one step from the optimizer's hooks through protection to the record, and the states it can go back to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.guard.guard import Guard

__all__ = ["Guard"]


def __getattr__(name: str) -> Any:
    if name == "Guard":
        from trimtab.guard.guard import Guard

        return Guard
    raise AttributeError(f"module 'trimtab.guard' has no attribute {name!r}")
