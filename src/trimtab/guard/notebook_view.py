"""A guard as text and as a piece of HTML for notebooks. Nothing is waited for: it shows what the host knows by now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trimtab.core.notebook import box

if TYPE_CHECKING:
    from trimtab.guard.guard import Guard
    from trimtab.guard.lane import Lane


def _facts(guard: Guard, lanes: Mapping[str, Lane]) -> list[tuple[str, object]]:
    steps = ", ".join(f"{label} {lane.attempts:,}" if label else f"{lane.attempts:,}" for label, lane in lanes.items())
    # What is on its way from a device is not asked for: that would wait for it.
    return [("mode", guard.config.mode), ("steps", steps or "0"), ("findings", len(guard.findings))]


def guard_words(guard: Guard, model: str, lanes: Mapping[str, Lane]) -> str:
    """One line: what is guarded, how far it is, what was found."""
    if not lanes:
        return f"<trimtab.Guard of {model}: switched off by TRIMTAB_DISABLE>"
    facts = ", ".join(f"{name} {value}" for name, value in _facts(guard, lanes))
    where = f", recorded in {guard.run_dir}" if guard.run_dir is not None else ""
    return f"<trimtab.Guard of {model}: {facts}{where}{', closed' if guard.closed else ''}>"


def guard_html(guard: Guard, model: str, lanes: Mapping[str, Lane]) -> str:
    """The same with the first findings and what to do first."""
    facts = _facts(guard, lanes)
    if guard.run_dir is not None:
        facts.append(("recorded in", guard.run_dir))
    ended = "closed" if guard.closed else "attached" if lanes else "switched off by TRIMTAB_DISABLE"
    return box(f"trimtab guard of {model}, {ended}", facts, guard.findings)
