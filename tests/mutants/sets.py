"""Which runs belong to which half, and which mutants did harm."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.mutants.operators import HELD_OUT as HELD_OUT_OPERATORS
from tests.mutants.operators import OPERATORS
from tests.mutants.runs import Job, Made, applies
from tests.runs.shape_runs import HELD_OUT as HELD_OUT_PROGRAMS
from tests.runs.shape_runs import SHAPES

HALVES = ("tuned", "held-out", "half-seen")
CLEAN_SEEDS = 11
FEWEST_CLEAN = 4
MUTANT_SEED = 100
"""Mutants have other seeds than clean runs."""
MARGIN_SD = 3.0
MARGIN_FRAC = 0.05


def half_of(program: str, operator: str = "") -> str:
    """Tuned: a tuned operator in a tuned program. Held out: both are. A healthy run is of the half of its program."""
    held_out = program in HELD_OUT_PROGRAMS
    if operator and (operator in HELD_OUT_OPERATORS) is not held_out:
        return "half-seen"
    return "held-out" if held_out else "tuned"


def clean_jobs(half: str, seeds: Iterable[int]) -> list[Job]:
    return [Job(program, seed) for seed in seeds for program in SHAPES if half_of(program) == half]


def mutant_jobs(half: str, per_operator: int) -> list[Job]:
    """At most so many programs for each operator: the first ones of a fixed random order of its own.

    The first programs of all operators come before the second ones, so that a part of the set is spread over all.
    """
    columns: list[list[Job]] = []
    for operator in OPERATORS:
        programs = [p for p in SHAPES if half_of(p, operator.name) == half]
        random.Random(operator.name).shuffle(programs)
        jobs = (Job(p, MUTANT_SEED, operator.name) for p in programs if applies(operator, p))
        columns.append(list(itertools.islice(jobs, per_operator)))
    longest = max(len(column) for column in columns)
    return [column[i] for i in range(longest) for column in columns if i < len(column)]


@dataclass(frozen=True)
class Spread:
    """How well the clean runs of one program do in the end."""

    mean: float
    sd: float
    worst: float

    @classmethod
    def of(cls, finals: Sequence[float]) -> Spread:
        return cls(statistics.fmean(finals), statistics.stdev(finals), min(finals))

    @property
    def limit(self) -> float:
        """What is below is harm: worse than every clean seed, and than their mean by three deviations and by 5 %."""
        return min(self.worst, self.mean - max(MARGIN_SD * self.sd, MARGIN_FRAC * abs(self.mean)))

    def harmed(self, final: float | None) -> bool:
        return final is None or not math.isfinite(final) or final < self.limit


def spreads(clean: Iterable[Made]) -> dict[str, Spread]:
    """By program; of those with enough clean runs."""
    finals: dict[str, list[float]] = {}
    for made in clean:
        if made.final is not None and not made.operator:
            finals.setdefault(made.program, []).append(made.final)
    return {program: Spread.of(some) for program, some in finals.items() if len(some) >= FEWEST_CLEAN}
