from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from trimtab.cli import train
from trimtab.train.recipes import RECIPES


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`trimtab train ...` as it is registered beside other commands."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    app = typer.Typer()
    app.command(train.NAME, context_settings=train.CONTEXT)(train.run)
    app.command("other")(lambda: None)

    def run(*argv: str) -> Said:
        with pytest.raises(SystemExit) as end:
            app(args=["train", *map(str, argv)], prog_name="trimtab")
        out, err = capsys.readouterr()
        return Said(int(end.value.code or 0), out, err)

    return run


def test_without_a_name_the_recipes_are_listed(call: Any) -> None:
    said = call()
    assert said.code == 0
    assert all(name in said.out for name, _ in RECIPES)


@pytest.mark.parametrize("name", [name for name, _ in RECIPES])
def test_help_shows_options_and_faults_of_a_recipe(call: Any, name: str) -> None:
    from trimtab.train.recipes import load_recipe

    said = call(name, "--help")
    assert said.code == 0
    recipe = load_recipe(name)
    flags = [*(f"--{option.name.replace('_', '-')}"[:20] for option in recipe.options), "--compare", "--resume"]
    assert [flag for flag in flags if flag not in said.out] == []
    assert [fault.name for fault in recipe.faults if fault.name not in said.out] == []


def test_an_unknown_recipe_fault_or_choice_is_told(call: Any) -> None:
    known = ", ".join(name for name, _ in RECIPES)
    said = call("tabluar")
    assert (said.code, said.err) == (
        2,
        f"error: there is no recipe 'tabluar'; did you mean 'tabular'? There are {known}\n",
    )
    said = call("tabular", "--quick", "--fault", "nan-feature")
    assert "tabular has no fault 'nan-feature'; did you mean 'nan-features'? There are nan-features, label" in said.err
    said = call("tabular", "--quick", "--fault", "flood")
    assert said.code == 2
    assert "tabular has no fault 'flood'; expected one of nan-features" in said.err
    said = call("tabular", "--quick", "--scheduler", "wild")
    assert said.code == 2
    assert "scheduler is 'wild'; expected one of none, onecycle" in said.err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("tabular", "--fautl", "x"), "No such option: --fautl (Possible options: --data, --fault)"),
        (("tabular", "--epochs", "0"), "error: epochs is 0; expected at least 1"),
        (
            ("tabular", "--table", "diabets"),
            "error: data is 'diabets', no file (.csv, .jsonl, .parquet); did you mean 'diabetes'?",
        ),
        (("tabular", "--device", "gpu"), "error: device is 'gpu'; expected auto, cpu, cuda or cuda:N"),
        (("tabular", "--resume", "auto"), "error: there is nothing to resume from without checkpoints; give"),
        (("tabular", "--resume", "nowhere"), "error: nowhere does not exist; give auto, a folder of checkpoints"),
        (("tabular", "--unguarded", "--resume", "auto"), "error: a training without a guard keeps no checkpoints"),
        (("charlm", "--d-model", "33", "--metrics-file", ""), "error: d_model is 33 with 4 heads"),
        (("charlm", "--seq", "0"), "error: seq is 0; expected at least 2"),
    ],
)
def test_what_cannot_be_done_ends_with_2_and_says_why(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = call(*argv)
    assert said.code == 2
    assert told in " ".join(said.err.split())
    assert list(tmp_path.iterdir()) == [], "nothing was begun"


def test_help_tells_every_default_on_a_narrow_terminal(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    said = call("tabular", "--help")
    assert max(map(len, said.out.splitlines())) <= 60
    text = " ".join(word for word in said.out.split() if word not in "│╭╰─")
    for words in ("The base rate. Default: 0.001.", "Passes over the data. Default: 40.", "Default: diabetes."):
        assert words in text


def test_d11_json_with_underscores_and_true_false(call: Any, tmp_path: Path) -> None:
    said = call(
        "tabular", "--quick", "true", "--batch_size", "64", "--epochs=3", "--json", "yes", "--run_dir", tmp_path / "r"
    )
    assert said.code == 0, said.err
    (one,) = json.loads(said.out)["runs"]
    assert (one["arm"], one["num_steps"], len(one["history"])) == ("clean", 15, 3)
    assert (tmp_path / "r" / "run.jsonl").exists()
    assert (tmp_path / "r" / "history.json").exists()


def test_compare_in_json_is_one_object_without_a_word_beside(call: Any, tmp_path: Path) -> None:
    said = call("tabular", "--quick", "--epochs", "1", "--compare", "--json", "--run-dir", tmp_path)
    assert said.code == 0, said.err
    runs = json.loads(said.out)["runs"]
    assert [run["arm"] for run in runs] == ["clean", "guarded", "unguarded"]
    assert runs[2]["score"] == "NaN"


def test_a_guarded_run_that_was_stopped_ends_with_1(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from trimtab.train import recipes
    from trimtab.train.recipe import Settings

    recipe = recipes.load_recipe("tabular")

    def build(settings: Settings) -> Any:
        parts = recipe.build(settings)
        return replace(parts, config=replace(parts.config, mode="raise"))

    monkeypatch.setattr(recipes, "load_recipe", lambda name: replace(recipe, build=build))
    said = call("tabular", "--quick", "--fault", "nan-features", "--run-dir", tmp_path / "r")
    assert said.code == 1
    assert "stopped: " in said.out


def test_compare_prints_one_table_and_the_control_arm_fails(call: Any, tmp_path: Path) -> None:
    said = call("tabular", "--quick", "--epochs", "6", "--compare", "--fault", "nan-features", "--run-dir", tmp_path)
    assert said.code == 0, said.err
    rows = {
        line.split()[0].rstrip(","): line for line in said.out.splitlines() if "finite" in line or "NaN or Inf" in line
    }
    assert "finite" in rows["clean"]
    assert "finite" in rows["guarded"]
    assert "NaN or Inf" in rows["unguarded"]
    assert [line for line in said.out.splitlines() if line.startswith("run ")] == [
        "run 1 of 3: clean",
        "run 2 of 3: guarded, nan-features",
        "run 3 of 3: unguarded, nan-features",
    ]
    assert "did: step" in said.out
    assert "the learning rate by" in said.out


def test_b8_lines_on_something_that_is_no_terminal(call: Any, tmp_path: Path) -> None:
    said = call("tabular", "--quick", "--epochs", "2", "--run-dir", tmp_path / "r")
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert lines[0].startswith("Epoch 1/2: 100%|████| 11/11 [")
    assert ", loss=" in lines[0]
    assert ", grad=" in lines[0]
    assert lines[1].startswith("   Gradient norm - Avg: ")
    assert lines[2].startswith("Loss: ")
    assert "r2: " in lines[2]


def test_b16_resume_from_the_command_line(call: Any, tmp_path: Path) -> None:
    where = ("--checkpoint-dir", tmp_path / "c", "--run-dir", tmp_path / "r", "--json")
    assert call("tabular", "--quick", "--epochs", "2", "--scheduler", "none", *where).code == 0
    said = call("tabular", "--quick", "--epochs", "4", "--scheduler", "none", "--resume", "auto", *where)
    assert said.code == 0, said.err
    (one,) = json.loads(said.out)["runs"]
    assert [row["epoch"] for row in one["history"]] == [1, 2, 3, 4]
    assert one["num_steps"] == 44


def test_the_list_needs_no_torch() -> None:
    code = "import sys; from trimtab.cli import train; train._list(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
