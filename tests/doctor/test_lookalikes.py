"""Sound trainings in other habits: doctor says nothing against any of them."""

from __future__ import annotations

import pytest

from tests.doctor.bench import Mutation, examined
from tests.doctor.lookalikes import LOOKALIKES


@pytest.mark.parametrize("mutation", LOOKALIKES[::3], ids=lambda m: m.name)  # all of them: python -m tests.doctor.score
def test_e20_no_alarm_about_another_habit(mutation: Mutation) -> None:
    verdict = examined(mutation.projects[0], mutation)
    assert (verdict.fails, verdict.warns) == ((), ())
