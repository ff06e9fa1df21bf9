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
    assert (
        call("tabluar").err
        == f"error: there is no recipe 'tabluar'; expected one of {', '.join(n for n, _ in RECIPES)}\n"
    )
    said = call("tabular", "--quick", "--fault", "flood")
    assert said.code == 2
    assert "tabular has no fault 'flood'; expected one of nan-features" in said.err
    said = call("tabular", "--quick", "--scheduler", "wild")
    assert said.code == 2
    assert "scheduler is 'wild'; expected one of none, onecycle" in said.err


def test_d11_json_with_underscores_and_true_false(call: Any, tmp_path: Path) -> None:
    said = call(
        "tabular", "--quick", "true", "--batch_size", "64", "--epochs=3", "--json", "yes", "--run_dir", tmp_path / "r"
    )
    assert said.code == 0, said.err
    (one,) = json.loads(said.out)["runs"]
    assert (one["arm"], one["num_steps"], len(one["history"])) == ("clean", 15, 3)
    assert (tmp_path / "r" / "run.jsonl").exists()
    assert (tmp_path / "r" / "history.json").exists()


def test_compare_prints_one_table_and_the_control_arm_fails(call: Any, tmp_path: Path) -> None:
    said = call("tabular", "--quick", "--epochs", "6", "--compare", "--fault", "nan-features", "--run-dir", tmp_path)
    assert said.code == 0, said.err
    rows = {
        line.split()[0].rstrip(","): line for line in said.out.splitlines() if "finite" in line or "NaN or Inf" in line
    }
    assert "finite" in rows["clean"]
    assert "finite" in rows["guarded"]
    assert "NaN or Inf" in rows["unguarded"]
    assert "did: step" in said.out
    assert "cut_lr" in said.out


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
