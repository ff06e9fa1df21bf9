"""Doctor says nothing against a sound training: not a failure, not a warning."""

from __future__ import annotations

import pytest

from tests.doctor.bench import PROJECTS, Mutation, examined
from tests.doctor.lookalikes import LOOKALIKES


@pytest.mark.parametrize("project", PROJECTS)
def test_e20_no_alarm_about_a_sound_project(project: str) -> None:
    verdict = examined(project)
    assert (verdict.fails, verdict.warns) == ((), ())
    assert not [line for line in verdict.report.lines if "the check itself ended" in line.evidence]


@pytest.mark.parametrize("mutation", LOOKALIKES, ids=lambda m: m.name)
def test_e20_no_alarm_about_another_habit(mutation: Mutation) -> None:
    verdict = examined(mutation.projects[0], mutation)
    assert (verdict.fails, verdict.warns) == ((), ())
