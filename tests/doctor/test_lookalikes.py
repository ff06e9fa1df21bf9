"""Sound trainings in other habits: doctor says nothing against any of them."""

from __future__ import annotations

import pytest

from tests.doctor.bench import Mutation, examined
from tests.doctor.lookalikes import LOOKALIKES
from tests.matrix import sampled


# All of them: python -m tests.doctor.score
@pytest.mark.parametrize(
    "mutation", sampled({one.name: one for one in LOOKALIKES[::3]}, [one.name for one in LOOKALIKES[::9]])
)
def test_e20_no_alarm_about_another_habit(mutation: Mutation) -> None:
    verdict = examined(mutation.projects[0], mutation)
    assert (verdict.fails, verdict.warns) == ((), ())
