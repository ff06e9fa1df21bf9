"""Doctor names the cause of a broken training before anything else; all of them are scored by `score.py`.

Each time every second of those chosen here runs; `pytest -m long` runs the others.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.doctor.bench import PROJECTS, Mutation, examined
from tests.doctor.mutations import MISSED, MUTATIONS
from tests.matrix import sampled

PER_CAUSE = 1


def lean() -> list[Mutation]:
    """A few for every name; the score has them all."""
    taken: Counter[str] = Counter()
    chosen = []
    for one in MUTATIONS:
        if one.name in MISSED or taken[one.causes[0]] < PER_CAUSE:
            taken[one.causes[0]] += one.name not in MISSED
            chosen.append(one)
    return chosen


@pytest.mark.parametrize(
    "mutation",
    sampled(
        {one.name: one for one in lean()},
        [one.name for one in lean()[::2]],
        marks=lambda name: [pytest.mark.xfail(reason=MISSED[name])] if name in MISSED else [],
    ),
)
def test_e20_the_cause_is_named_first(mutation: Mutation) -> None:
    verdict = examined(mutation.projects[0], mutation)
    assert verdict.first in mutation.causes
    cause = next(line for line in verdict.report.lines if line.name == verdict.first and not line.ok)
    assert cause.cause
    assert cause.evidence
    assert cause.fix


def test_there_are_enough_of_them_and_each_has_its_place() -> None:
    assert len({one.name for one in MUTATIONS}) == len(MUTATIONS) >= 70
    assert {project for one in MUTATIONS for project in one.projects} <= set(PROJECTS)
    wanted = {"mlp", "cnn", "rnn", "lm", "towers", "finetune", "gan", "moe"}
    assert wanted <= {project for one in MUTATIONS for project in one.projects}
    assert set(MISSED) <= {one.name for one in MUTATIONS}
