"""Healthy oddities: the guard, free to act, says nothing, rejects nothing, and the run learns what it should.

Each time the cases in `USUAL` run; `pytest -m long` runs the others.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest

from tests.faults.base import Run
from tests.faults.families import FAMILIES
from tests.faults.harness import run_case
from tests.faults.healthy import HEALTHY
from tests.faults.healthy_tools import val_loss
from tests.matrix import sampled

SLOW = ("rnn", "lm", "segment")  # three times as slow as the others: they count double, so that the file stays quick
USUAL = """
    accumulated_by_four averages_swapped_in clipped_by_the_loop differential_equation erased_at_random
    frozen_at_the_end half_of_inputs_always_zero likelihood_below_zero one_batch_for_ever rate_and_batch_x8
    rows_renormed temperature_at_its_limit trunk_left_out warm_restarts weights_quantised
"""


def spread() -> dict[str, str]:
    """One family for each case, so that families share the time about equally: the choosy ones come first."""
    used: Counter[str] = Counter()
    chosen = {}
    for case in sorted(HEALTHY.values(), key=lambda case: len(case.families)):
        chosen[case.name] = min(case.families, key=lambda family: used[family])
        used[chosen[case.name]] += 2 if chosen[case.name] in SLOW else 1
    return dict(sorted(chosen.items()))


def learned(run: Run, family: str) -> bool:
    """Whether the run did what it is for: lowered the held-out loss, unless the case has a measure of its own."""
    if "learned" in run.extra:
        return bool(run.extra["learned"]())
    fresh = FAMILIES[family](run.seed)
    return val_loss(run.task, run.model) < 0.9 * val_loss(fresh, fresh.model)


@pytest.mark.parametrize(
    ("name", "family"), sampled({name: (name, family) for name, family in spread().items()}, USUAL)
)
def test_not_a_word(name: str, family: str) -> None:
    run = run_case(HEALTHY[name], family, seed=0, mode="act", run_dir=False)
    assert run.guard is not None
    assert "error" not in run.extra, repr(run.extra["error"])
    assert [(finding.step, finding.name, finding.message) for finding in run.guard.findings] == []
    assert run.guard.rejected == 0
    assert all(map(math.isfinite, run.losses))
    assert learned(run, family)


def test_there_are_enough() -> None:
    assert len(HEALTHY) >= 40
    assert all(case.healthy and case.group == "healthy" and case.doc for case in HEALTHY.values())
    uses = Counter(spread().values())
    assert set(uses) == set(FAMILIES)
    assert min(uses.values()) >= 12, uses
