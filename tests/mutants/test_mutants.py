"""Mutants: every operator changes some program into one that compiles, evaluations stay as they are, and they run."""

from __future__ import annotations

import ast
import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.mutants import effects, runs, sets
from tests.mutants.apply import mutate
from tests.mutants.operators import BY_NAME, GROUPS, HELD_OUT, OPERATORS, Operator
from tests.mutants.runs import Job, Made, applies
from tests.mutants.sets import Spread
from tests.runs.shape_runs import FOLDER, SHAPES

PROGRAM = '''"""A program."""
from __future__ import annotations
import torch
from torch.nn import functional as F

def evaluate(model, loader):
    return sum(F.mse_loss(model(x), y) for x, y in loader)

def train(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
'''


@pytest.fixture(autouse=True)
def from_the_start() -> None:
    effects.begin(0)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_operator_changes_a_program_into_one_that_compiles(operator: Operator) -> None:
    program = next(p for p in SHAPES if applies(operator, p))
    source = (FOLDER / f"{program}.py").read_text(encoding="utf-8")
    changed = mutate(source, operator)
    assert changed is not None
    compile(changed, program, "exec")
    clean = ast.unparse(ast.parse(source))
    assert ast.unparse(ast.parse(changed.replace("from tests.mutants import effects as mutant\n", ""))) != clean
    assert operator.group in GROUPS
    assert operator.names


def test_there_are_enough_and_every_second_one_is_held_out() -> None:
    assert len(OPERATORS) == len(BY_NAME) >= 40
    for group in GROUPS:
        names = [one.name for one in OPERATORS if one.group == group]
        assert [name for name in names if name in HELD_OUT] == names[1::2]


def test_evaluations_are_left_alone() -> None:
    changed = mutate(PROGRAM, BY_NAME["targets-shuffled"])
    assert changed is not None
    assert changed.count("mutant.loss('targets_shuffled'") == 1
    assert "@mutant.unmutated\ndef evaluate" in changed
    assert changed.index("__future__") < changed.index("effects as mutant")


def test_an_operator_without_a_site_does_not_apply() -> None:
    assert mutate(PROGRAM, BY_NAME["eval-mode"]) is None


def test_a_layer_of_a_module_is_no_construction_of_one() -> None:
    text = "h = self.dropout(self.LayerNorm(x))\nself.train()\n"
    assert [mutate(text, BY_NAME[name]) for name in ("dropout-0.99", "norms-missing", "eval-mode")] == [None] * 3
    changed = mutate("h = self.conv(x).relu()\n", BY_NAME["activations-missing"])
    assert changed is not None
    assert "h = self.conv(x)\n" in changed


def test_what_stands_inside_another_site_is_changed_too() -> None:
    nested = "from torch.nn import functional as F\nh = F.relu(f(F.relu(x)))\n"
    changed = mutate(nested, BY_NAME["activations-missing"])
    assert changed is not None
    assert "h = f(x)" in changed


def test_steps_are_counted_and_a_later_onset_is_known_for_each_optimizer() -> None:
    effects.begin(2)
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    first, second = (torch.optim.SGD([w], lr=1.0) for w in weights)
    for _ in range(3):
        for w in weights:
            w.grad = torch.ones(2)
        effects.step("never", first)
        effects.step("", second)
    assert weights[0].tolist() == [-1.0, -1.0]
    assert weights[1].tolist() == [-2.0, -2.0]
    assert effects.report() == {"had": 1, "onsets": [2, 2]}


def test_targets_are_what_has_no_gradient_and_evaluations_see_the_right_ones() -> None:
    predicted, target = torch.zeros(4, requires_grad=True), torch.arange(4.0)
    for args in ((predicted, target), (target, predicted)):
        value = effects.loss("targets_constant", torch.nn.functional.mse_loss, *args)
        assert value.item() == 0.0
    with torch.no_grad():
        assert effects.loss("targets_constant", torch.nn.functional.mse_loss, predicted, target).item() > 0
    assert effects.unmutated(effects.wrong_now)() is False


def test_rows_that_are_repeated_keep_their_targets_and_indices_are_no_inputs_to_scale() -> None:
    x, y = effects.drawn("rows_repeated", (torch.arange(4.0), torch.arange(4)))
    assert x.tolist() == y.tolist() == [0.0] * 4
    tokens, _ = effects.drawn("inputs_unscaled", (torch.arange(4), torch.arange(4)))
    assert tokens.tolist() == [0, 1, 2, 3]
    assert effects.report()["had"] == 0


def made(final: float | None, program: str = "gcn", operator: str = "") -> Made:
    return Made(program=program, seed=0, operator=operator, steps=9, final=final, error="", seconds=1.0)


def test_harm_is_worse_than_every_clean_seed_and_by_a_margin() -> None:
    spread = sets.spreads(made(final) for final in (0.8, 0.82, 0.84, 0.86))["gcn"]
    assert not spread.harmed(0.8)
    assert not spread.harmed(0.76)
    assert spread.harmed(0.74)
    assert spread.harmed(math.nan)
    assert spread.harmed(None)
    assert Spread.of([1.0] * 4).limit == pytest.approx(0.95)
    assert sets.spreads([made(1.0)]) == {}


def test_halves_are_whole_operators_in_whole_programs() -> None:
    tuned, held_out = (sets.mutant_jobs(half, 2) for half in ("tuned", "held-out"))
    assert not {job.operator for job in tuned} & {job.operator for job in held_out}
    assert not {job.program for job in tuned} & {job.program for job in held_out}
    assert {job.operator for job in tuned + held_out} == set(BY_NAME)
    assert sets.half_of(tuned[0].program, held_out[0].operator) == "half-seen"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("mutation_score")


@pytest.mark.long
def test_runs_are_recorded_and_judged_from_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: ModuleType
) -> None:
    monkeypatch.setitem(runs.STEPS, "moe", 30)
    runs.import_all()
    for operator in ("", "copies-of-parameters", "nan-rows"):
        job = Job("moe", 0, operator)
        one = runs.make(job, tmp_path / "tuned" / job.name)
        assert (one.error, one.had > 0, one.onsets[:1]) == ("", bool(operator), (10,) * (operator == "nan-rows"))
        assert one == runs.load(tmp_path / "tuned" / job.name)
    clean, copies, rows = bench.judge_half(tmp_path, "tuned", jobs=1)
    assert clean.meta.healthy
    assert (clean.num_steps, clean.findings) == (30, [])
    assert copies.named()
    assert rows.meta.onset == 10
    assert (rows.ours.since_onset, rows.ours.early(10), rows.named()) == (10, False, True)
    assert rows.left_out == "no spread known"


def judged(bench: ModuleType, case: str, harmful: bool = True, step: int | None = 3, name: str = "not-learning") -> Any:
    """A made-up run with at most one finding."""
    operator = BY_NAME.get(case)
    meta = bench.Meta(
        case=case,
        family="gcn",
        seed=0,
        half="tuned",
        healthy=operator is None,
        group=operator.group if operator else "healthy",
        names=tuple(operator.names) if operator else (),
        kind=("silent" if operator.silent else "loud") if operator else "",
        onset=9 if operator and operator.late else 0,
        harmful=harmful and operator is not None,
    )
    one = bench.JudgedProgram(meta, alarms={n: bench.Alarms() for n in (bench.OURS, *bench.PEERS)}, num_steps=1000)
    if step is not None:
        one.findings, one.num_alarms = [(step, name, f"X {name}: because")], 1
        one.ours.add(step, meta.onset)
    return one


def test_the_score_counts_harmful_mutants_names_and_false_alarms(bench: ModuleType) -> None:
    some = [
        judged(bench, "targets-shuffled"),
        judged(bench, "targets-shuffled", step=None),
        judged(bench, "targets-shuffled-later", step=2),
        judged(bench, "rate-x30", name="dead-data"),
        judged(bench, "rate-x30", harmful=False, step=None),
        judged(bench, "clean"),
        judged(bench, "clean", step=None),
    ]
    some[4].left_out = "had no effect"
    text = bench.report("tuned", some, by_operator=True)
    for row in (
        "| recall over harmful mutants | 0.500 (0.150 to 0.850; 2/4) |",
        "| of these silent | 0.333 (0.061 to 0.792; 1/3) |",
        "| harmful and found, first finding rightly named | 0.500 (0.095 to 0.905; 1/2) |",
        "| healthy runs with a finding | 0.500 (0.095 to 0.905; 1/2) |",
        "| alarms per 10,000 healthy steps | 5.00 (1 in 2,000) |",
        "Left out: 1 had no effect.",
        "| rate-x30 | 1 |",
    ):
        assert row in text
    listed = bench.misses(some)
    titles = ("Missed: 1", "A finding before the onset: 1", "Wrong name first: 1", "False alarms: 1")
    assert all(f"### {title}" in listed for title in titles)
