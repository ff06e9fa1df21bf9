"""The pytest fixture `trimtab_doctor`: the checks of `trimtab doctor` as a test of your own training.

pytest finds it by itself where trimtab is installed. Nothing of trimtab is imported before a test asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from trimtab.doctor.checklist import Report

Doctor = Callable[..., "Report"]


@pytest.fixture
def trimtab_doctor() -> Doctor:
    """Examine a training, and fail the test with causes and fixes where a check fails.

    `trimtab_doctor(target, select=(), ignore=(), strict=False, **options)` takes what `trimtab doctor` takes:
    a function that builds the training, the dict it returns, or `"module:function"`. Options are those of the command,
    such as `max_steps=5`. It returns the report.
    """
    return examine_in_test


def examine_in_test(
    target: str | Mapping[str, object] | Callable[[], object],
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    strict: bool = False,
    **options: Any,
) -> Report:
    """What the fixture calls."""
    __tracebackhide__ = True
    from trimtab.doctor.checklist import Status
    from trimtab.doctor.ci_formats import counts
    from trimtab.doctor.examine import examine
    from trimtab.doctor.observed_step import Options
    from trimtab.doctor.target import Target, check_target, load_target

    def build() -> Target:
        if isinstance(target, str):
            return load_target(target, lenient=True)
        return check_target(target() if callable(target) else target, lenient=True)

    again = None if isinstance(target, Mapping) else build  # a dict cannot be built a second time
    report = examine(build(), Options(**options), select=select, ignore=ignore, again=again)
    wrong = [line for line in report.lines if line.status is Status.FAIL or (strict and line.status is Status.WARN)]
    if wrong:
        told = "\n".join(f"{x.code} {x.name}: {x.cause}\n  seen: {x.evidence}\n  fix:  {x.fix}" for x in wrong)
        pytest.fail(f"trimtab doctor: {counts(report)}\n{told}", pytrace=False)
    return report
