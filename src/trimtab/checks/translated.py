"""PyTorch's own error about a step as one line of the list, with the module and the place."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.checks.outcome import Check, Line, failed, not_applicable, passed
from trimtab.checks.probe import Probe


def translated(check: Check, probe: Probe, what: str, fix: str) -> Iterator[Line]:
    """`check` failed where the error of the first steps bears its name; `what` says it in words, `fix` in code."""
    failure = probe.failure
    if failure is not None and probe.failed_as == check.name:
        where = f" in {failure.module}" if failure.module else ""
        yield failed(
            check,
            f"{what}{where}: {failure.text[:200]}",
            f"in the {failure.phase} pass of call {len(probe.calls) - 1}, at {failure.where or 'unknown'}",
            fix,
            (failure.module,) if failure.module else (),
        )
    elif not probe.through:
        yield not_applicable(check, probe.no_steps)
    else:
        yield passed(check, f"{len(probe.through)} calls came to their end")
