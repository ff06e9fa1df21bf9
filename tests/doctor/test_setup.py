"""What is configured and does nothing, or happens at the wrong place, is named; what only looks like it is not."""

from __future__ import annotations

import pytest

from tests.doctor.bench import Mutation, examined
from tests.doctor.mutations_setup import LOOKALIKES, MUTATIONS
from tests.matrix import sampled


@pytest.mark.parametrize("mutation", sampled({one.name: one for one in MUTATIONS}, [m.name for m in MUTATIONS[::3]]))
def test_it_is_named_first(mutation: Mutation) -> None:
    assert examined(mutation.projects[0], mutation).first in mutation.causes


@pytest.mark.parametrize("same", sampled({one.name: one for one in LOOKALIKES}, [m.name for m in LOOKALIKES[::3]]))
def test_its_sound_look_alikes_pass(same: Mutation) -> None:
    verdict = examined(same.projects[0], same)
    assert (verdict.fails, verdict.warns) == ((), ())
