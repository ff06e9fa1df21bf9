"""A dry run: the examination that `trimtab doctor` makes, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trimtab.checks.drive import Options
from trimtab.checks.outcome import Status
from trimtab.checks.run import examine
from trimtab.checks.target import check_target
from trimtab.core.errors import TrainingStopped


def dry_run(build: Callable[[], Mapping[str, Any]], say: Callable[[str], object] | None) -> None:
    """Examine a training, say what was found, and stop where something is wrong."""
    report = examine(check_target(build()), Options(), again=lambda: check_target(build()))
    wrong = [f"{line.name}: {line.cause}" for line in report.lines if not line.ok]
    if say is not None:
        passed = len(report.of(Status.PASS))
        say(f"dry run: {passed} checks passed, {len(wrong)} did not, {len(report.of(Status.NA))} do not apply")
        for line in wrong:
            say(f"  {line}")
    if not report.ok:
        raise TrainingStopped(f"the dry run found {'; '.join(wrong)}")
