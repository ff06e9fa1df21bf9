"""The script behind the figures of what a step costs: its estimate, its tables, and that every arm trains."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import optimizer as torch_optimizer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("overhead_page")


@pytest.fixture
def bench(figures: ModuleType) -> ModuleType:
    return importlib.import_module("overhead")


def timed(figures: ModuleType, name: str, main: Any, background: float = 0.0, rare: float = 0.0) -> Any:
    values = np.array(main, dtype=float)
    return figures.Timed(name=name, main=values, background=np.full_like(values, background), rare=rare)


def noisy(level: float, more: float = 0.0) -> Any:
    """Ten cycles of four blocks; the last block of each has more work, and three whole cycles are disturbed."""
    out = np.full((10, 4), level)
    out[:, 3] += more
    out[[2, 5, 6]] += 500.0
    return out


def test_the_estimate_leaves_disturbances_out_and_keeps_work_that_comes_rarely(figures: ModuleType) -> None:
    arms = [
        timed(figures, figures.BARE, noisy(100.0)),
        timed(figures, figures.CLIP, noisy(120.0)),
        timed(figures, figures.GUARD, noisy(130.0, more=40.0), background=5.0, rare=1.0),
    ]
    found = figures.costs(arms)
    guard = found[figures.GUARD]
    assert found[figures.BARE].step_us == pytest.approx(100.0)
    assert found[figures.CLIP].adds_us == pytest.approx(20.0)
    assert found[figures.CLIP].ratio == 1.0
    assert guard.adds_us == pytest.approx(30.0 + 40.0 / 4 + 5.0 + 1.0)
    assert guard.paired_us == pytest.approx(guard.adds_us)
    assert guard.background_us == pytest.approx(5.0)
    assert guard.percent == pytest.approx(46.0)
    assert guard.ratio == pytest.approx(2.3)
    assert guard.low_us <= guard.adds_us <= guard.high_us


def test_what_comes_at_any_time_within_every_block_is_kept(figures: ModuleType) -> None:
    """Its place in the block does not matter, because blocks are compared as a whole."""
    chance = np.random.default_rng(0)
    steps = np.full((20, 8, 10), 50.0)
    for cycle in steps:
        for block in cycle:
            block[chance.integers(10)] += 30.0
    bare = timed(figures, figures.BARE, np.full((20, 8), 50.0))
    found = figures.costs([bare, timed(figures, figures.GUARD, steps.mean(axis=2))])
    assert found[figures.GUARD].adds_us == pytest.approx(3.0)
    assert np.isnan(found[figures.GUARD].ratio)  # without clipping there is no unit


def test_arms_that_are_disturbed_together_are_drawn_together(figures: ModuleType) -> None:
    chance = np.random.default_rng(1)
    common = chance.exponential(50.0, (12, 4))
    arms = [
        timed(figures, name, common + more)
        for name, more in ((figures.BARE, 100), (figures.CLIP, 120), (figures.GUARD, 130))
    ]
    guard = figures.costs(arms)[figures.GUARD]
    assert guard.high_us - guard.low_us == pytest.approx(0.0, abs=1e-6)
    assert guard.ratio_low == pytest.approx(1.5)


def test_a_unit_that_is_lost_in_noise_is_no_unit(figures: ModuleType) -> None:
    chance = np.random.default_rng(2)
    levels = {figures.BARE: 100.0, figures.CLIP: 100.5, figures.GUARD: 130.0}
    found = figures.costs([timed(figures, name, us + chance.normal(0, 5, (8, 4))) for name, us in levels.items()])
    assert "| n/a |" in figures.cost_table(found)
    assert not figures.claims_of("MLP", found, 1.8)[0].holds


def test_the_share_of_what_comes_once_in_a_thousand_steps(figures: ModuleType) -> None:
    assert figures.rare_share([100.0, 101.0, 99.0], [2_100.0, 2_100.0], 1_000) == pytest.approx(2.0)
    assert figures.rare_share([100.0], [], 1_000) == 0.0


def test_a_limit_holds_or_fails_and_what_was_not_measured_fails(figures: ModuleType) -> None:
    claim = figures.Claim(what="Guard", value=1.25, limit=1.2, unit="x")
    assert claim.line() == "- Guard: 1.25x (at most 1.2x): FAILS"
    assert figures.Claim(what="run", value=12.4, limit=30, unit=" µs").line() == "- run: 12 µs (at most 30 µs): holds"
    assert not figures.Claim(what="Guard", value=float("nan"), limit=1.2, unit="x").holds


def model_of(figures: ModuleType, name: str, num_params: int) -> Any:
    levels = {
        figures.BARE: 100.0,
        figures.CLIP: 120.0,
        figures.GUARD: 130.0,
        figures.GUARD_CLIP: 132.0,
        figures.RUN: 150.0,
    }
    found = figures.costs([timed(figures, arm, noisy(us)) for arm, us in levels.items()])
    findings = {figures.GUARD: ("not-learning",), figures.BARE: ()}
    return figures.Model(
        name=name, num_params=num_params, num_tensors=6, data="batch 1", blocks="few", found=found, findings=findings
    )


def test_a_section_has_a_row_for_each_arm_and_says_what_was_found(figures: ModuleType) -> None:
    model = model_of(figures, "MLP", 8_970)
    text = model.section()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 4
    assert "| Guard | +30 (+30 to +30) | +30.0 | 1.50x (1.50 to 1.50) | +0 | +30 (1.50x) |" in rows
    assert "- findings under Guard: not-learning" in text
    assert "under unguarded" not in text
    values = [round(claim.value, 6) for claim in figures.claims_of("MLP", model.found, 1.8)]
    assert values == [1.5, 0.1, 20.0]


def test_the_figures_of_readme_and_docs_are_replaced_and_nothing_else(figures: ModuleType) -> None:
    models = [model_of(figures, "MLP", 8_970), model_of(figures, "larger GPT", 5_017_600)]
    row = figures.readme_row(models, figures.processor_words("Intel(R) Xeon(R) Processor @ 2.80GHz"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    after = figures.with_row(readme, row)
    changed = [new for old, new in zip(readme.split("\n"), after.split("\n"), strict=True) if old != new]
    assert changed == [row]
    assert "one thread of a 2.8 GHz Xeon, whole step of a 5.0 M-parameter GPT | guard +30.0 %" in row
    assert figures.with_row(after, row) == after
    with pytest.raises(ValueError, match="0 rows"):
        figures.with_row("nothing", row)

    docs = (ROOT / "docs/explanation/performance.md").read_text(encoding="utf-8")
    block = figures.docs_block(models, models, [], "Xeon", "benchmarks/results/x.md")
    after = figures.with_block(docs, block)
    assert figures.with_block(after, block) == after
    assert after.split(figures.BEGIN)[0] == docs.split(figures.BEGIN)[0]
    assert after.split(figures.END)[1] == docs.split(figures.END)[1]
    with pytest.raises(ValueError, match="once each"):
        figures.with_block("nothing", block)


def test_every_table_of_the_docs_stands_in_the_results(figures: ModuleType) -> None:
    """What the documentation quotes is looked up in the results file, line by line."""
    model = model_of(figures, "MLP", 8_970)
    cost = model.found[figures.GUARD]
    start = figures.Start(name="MLP", build_ms=1.0, first=cost, early=cost, late=cost, steady_us=None)
    results = "\n".join([model.section(), figures.sweep_table([model]), figures.start_table([start])]).splitlines()
    block = figures.docs_block([model], [model], [start], "Xeon", "x.md")
    assert {line for line in block.splitlines() if line.startswith("|")} <= set(results)


@pytest.mark.parametrize("name", ["Intel(R) Xeon(R) Processor", "aarch64"])
def test_a_processor_without_a_speed_keeps_its_name(figures: ModuleType, name: str) -> None:
    assert figures.processor_words(name) == name


@pytest.mark.long
def test_every_arm_trains_and_leaves_nothing_behind(bench: ModuleType, tmp_path: Path) -> None:
    backward, hooks = torch.autograd.backward, len(torch_optimizer._global_optimizer_pre_hooks)
    workload = bench.MODELS[0]
    model = bench.measure(workload, 1, 50, tmp_path)
    assert set(model.found) == set(workload.arms)
    assert all(cost.step_us > 0 for cost in model.found.values())
    assert set(model.findings.values()) == {()}
    assert torch.autograd.backward is backward
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks
    recorded = {file.parent.name for file in (tmp_path / "MLP").rglob("run.jsonl")}
    assert recorded == {"Guard", "Guard, clip=1.0", "Guard.attach", "run"}


@pytest.mark.long
def test_first_steps_and_the_switched_off_guard_are_measured(bench: ModuleType, tmp_path: Path) -> None:
    start = bench.measure_start(bench.MODELS[0], 1, tmp_path, None)
    assert start.first.step_us > 0
    assert np.isnan(start.ratio)
    assert np.isfinite(bench.measure_disabled(3, calls=20))
    inside, whole = bench.functions_entered(bench.MODELS[0])
    assert 0 < inside <= whole


@pytest.mark.long
def test_an_old_guard_is_compared_with_a_fresh_one(bench: ModuleType, tmp_path: Path) -> None:
    text, claims = bench.measure_long(2_000, 1, tmp_path)
    assert len(claims) == 3
    assert "Guard, after 2,000 steps" in "\n".join(text)


def test_of_fewer_repetitions_there_are_always_two(bench: ModuleType) -> None:
    small, _, large = bench.MODELS
    assert bench.repetitions(large, 1.0) == (large.cycles, large.cycle)
    assert bench.repetitions(small, 0.5) == (small.cycles // 2, small.cycle)
    assert bench.repetitions(small, 0.01) == (2, small.cycle)
    assert bench.repetitions(large, 0.5) == (2, bench.SHORT_CYCLE)


def test_the_models_of_the_sweep_have_the_tensors_they_say(bench: ModuleType) -> None:
    for workload in bench.sweep()[:4]:
        assert f"{sum(1 for _ in workload.make().parameters()):,} tensors" == workload.name


def test_on_a_gpu_the_results_hold_the_table_of_the_script_that_measures_there(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert bench.results_file().name.startswith("overhead_h200_")
    script = tmp_path / "host.py"
    script.write_text("import sys\nprint('| model |', sys.argv[1:])\n", encoding="utf-8")
    assert bench.gpu_report(True, script).endswith("| model | ['--quick']")
    script.write_text("raise SystemExit(3)", encoding="utf-8")
    with pytest.raises(SystemExit, match="exit code 3"):
        bench.gpu_report(False, script)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--quick", "--write"], "leave out"),
        (["--parts", "nonsense"], "unknown parts"),
        (["--parts", "steps", "--write"], "measure all"),
        (["--write", "--out", "/somewhere/else.md"], "below"),
    ],
)
def test_what_cannot_be_written_is_refused_before_measuring(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    complaint: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["overhead.py", *words])
    with pytest.raises(SystemExit):
        bench.main()
    assert complaint in capsys.readouterr().err
