"""A table of the user's own: kinds of columns, parts, the task, what is stored, and every fault with its row."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.errors import InputError
from trimtab.train.data_problems import DataError
from trimtab.train.own_data.row_files import RowFile
from trimtab.train.recipe import build_parts, run_recipe, settings_of
from trimtab.train.recipes import load_recipe
from trimtab.train.recipes.tabular import columns_of
from trimtab.train.recipes.tabular.columns import Columns, Goal, as_number, learn_columns

RECIPE = load_recipe("tabular")
HEADER = ["id", "age", "city", "joined", "notes", "income"]


def people(num: int = 120, seed: int = 1) -> list[list[str]]:
    draw = random.Random(seed)
    rows = []
    for i in range(num):
        age, city, good = draw.randint(18, 80), draw.choice(["Rome", "Oslo", "Lima"]), draw.random() < 0.5
        note = draw.choice(["always pays on time", "a reliable customer"] if good else ["late again", "was often late"])
        joined = f"20{draw.randint(10, 23)}-{draw.randint(1, 12):02d}-{draw.randint(1, 28):02d}"
        income = 1000 + 30 * age + 500 * (city == "Oslo") + 400 * good
        blank = i % 17 == 0
        rows.append([str(i + 1), "" if blank else str(age), city, joined, f"{note} {i % 7}", f"{income}.25"])
    return rows


def write(path: Path, rows: list[list[str]], header: list[str] = HEADER, delimiter: str = ",") -> Path:
    path.write_text("\n".join(delimiter.join(row) for row in [header, *rows]) + "\n", encoding="utf-8")
    return path


def parts_of(path: Path, **given_: Any) -> Any:
    return build_parts(RECIPE, settings_of(RECIPE, {"data": str(path), "target": "income", **given_}))


def columns(path: Path, **given_: Any) -> Columns:
    return columns_of(parts_of(path, **given_).model.state_dict())


def test_a_csv_is_learnt_and_its_scaling_is_in_every_checkpoint(tmp_path: Path) -> None:
    said: list[str] = []
    path = write(tmp_path / "people.csv", people())
    result = run_recipe(
        RECIPE,
        {"data": str(path), "target": "income", "epochs": 8, "learning_rate": 0.01},
        run_dir=False,
        checkpoint_dir=tmp_path / "ck",
        say=said.append,
    )
    assert result.score_name == "r2"
    assert result.score > 0.3
    assert any("regression" in line and "--task classification" in line for line in said)
    assert any(line.startswith("not used: id") for line in said)
    known = Columns.from_json((tmp_path / "ck" / "columns.json").read_text())
    from safetensors.torch import load_file

    (weights,) = (tmp_path / "ck" / "best_model").glob("*model*.safetensors")
    stored = next(value for name, value in load_file(weights).items() if name.endswith("columns"))
    assert columns_of({"columns": stored}) == known
    assert known.goal.mean == pytest.approx(2900, rel=0.2)


def test_the_kind_of_each_column(tmp_path: Path) -> None:
    path = write(tmp_path / "people.csv", people())
    known = columns(path)
    assert {c.name: c.kind for c in known.inputs} == {
        "age": "number",
        "city": "category",
        "joined": "date",
        "notes": "text",
    }
    changed = columns(path, kinds="notes=category,city=skip")
    assert {c.name: c.kind for c in changed.inputs} == {"age": "number", "joined": "date", "notes": "category"}
    with pytest.raises(InputError, match="did you mean 'text'"):
        columns(path, kinds="notes=txt")


@pytest.mark.parametrize(("delimiter", "name"), [(";", "a.csv"), ("\t", "a.tsv"), ("|", "a.csv")])
def test_other_delimiters(tmp_path: Path, delimiter: str, name: str) -> None:
    assert columns(write(tmp_path / name, people(), delimiter=delimiter)).goal.name == "income"


def test_a_decimal_comma(tmp_path: Path) -> None:
    rows = [[*row[:-1], row[-1].replace(".", ",")] for row in people()]
    rows[3][1] = "41,5"
    known = columns(write(tmp_path / "leute.csv", rows, delimiter=";"))
    assert known.goal.mean == pytest.approx(columns(write(tmp_path / "people.csv", people())).goal.mean)
    assert {c.name: c.decimal for c in known.inputs}["age"] == ","
    with pytest.raises(DataError, match=r"row 42 \(line 43\), column 'income': '12,5,1'"):
        columns(write(tmp_path / "leute.csv", spoil(rows, 41, "income", "12,5,1"), delimiter=";"))


@given(st.floats(-1e9, 1e9), st.booleans())
def test_numbers_are_read_with_and_without_groups(value: float, comma: bool) -> None:
    text = f"{value:,.2f}"
    if comma:
        text = text.translate(str.maketrans(",.", ".,"))
    assert as_number(text, "," if comma else ".") == pytest.approx(round(value, 2), rel=1e-12, abs=1e-12)


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "people.jsonl"
    lines = [json.dumps(dict(zip(HEADER, row, strict=True)) | {"age": len(row[4])}) for row in people()]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert "age" in {c.name for c in columns(path).inputs}


def test_parquet_asks_for_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "people.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"pip install 'trimtab\[arrow\]'"):
        parts_of(path)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = people()
    table = {name: [row[i] for row in rows] for i, name in enumerate(HEADER)}
    table["income"] = [float(v) for v in table["income"]]
    table["age"] = [float(v) if v else None for v in table["age"]]
    parquet.write_table(pyarrow.table(table), tmp_path / "people.parquet")
    assert {c.name: c.blanks for c in columns(tmp_path / "people.parquet").inputs}["age"]


def test_a_given_split_is_used_and_the_test_rows_are_measured_at_the_end(tmp_path: Path) -> None:
    rows = [[*row, "test" if i % 5 == 0 else "valid" if i % 5 == 1 else "train"] for i, row in enumerate(people())]
    path = write(tmp_path / "people.csv", rows, [*HEADER, "split"])
    made = parts_of(path)
    assert len(made.train_loader.dataset) == 72
    assert len(made.val_loader.dataset) == 24
    result = run_recipe(RECIPE, {"data": str(path), "target": "income", "epochs": 1}, run_dir=False)
    assert {"test_r2", "test_mae"} <= set(result.facts)


def test_a_folder_of_train_and_val(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", people(60))
    write(tmp_path / "val.csv", people(20, seed=2))
    made = parts_of(tmp_path)
    assert (len(made.train_loader.dataset), len(made.val_loader.dataset)) == (60, 20)


def test_the_task_is_recognised_and_can_be_changed(tmp_path: Path) -> None:
    rows = [[*row[:-1], str(i % 3)] for i, row in enumerate(people())]
    path = write(tmp_path / "people.csv", rows)
    assert columns(path).goal.classes == ("0", "1", "2")
    assert columns(path, task="regression").goal.classes == ()
    named = write(tmp_path / "named.csv", [[*row[:-1], "yes" if i % 3 else "no"] for i, row in enumerate(people())])
    result = run_recipe(RECIPE, {"data": str(named), "target": "income", "epochs": 1}, run_dir=False)
    assert result.score_name == "accuracy"


def spoil(rows: list[list[str]], row: int, column: str, cell: str) -> list[list[str]]:
    changed = [list(one) for one in rows]
    changed[row][HEADER.index(column)] = cell
    return changed


@pytest.mark.parametrize(
    ("column", "cell", "said"),
    [
        ("age", "old", "'old'; expected a number"),
        ("age", "inf", "'inf'; expected a number"),
        ("joined", "some day", "'some day'; expected a date"),
        ("income", "", "no target"),
        ("income", "much", "'much'; expected a number"),
    ],
)
def test_a_cell_that_does_not_fit_is_named_with_file_and_row(tmp_path: Path, column: str, cell: str, said: str) -> None:
    path = write(tmp_path / "people.csv", spoil(people(), 41, column, cell))
    with pytest.raises(DataError) as error:
        parts_of(path)
    (problem,) = error.value.problems
    assert problem.startswith(f"{path}, row 42 (line 43), column {column!r}: ")
    assert said in problem


def test_a_label_that_training_never_saw_is_named(tmp_path: Path) -> None:
    rows = [[*row[:-1], "yes" if i % 2 else "no", "val" if i % 5 == 0 else "train"] for i, row in enumerate(people())]
    rows[50][-2] = "maybe"
    path = write(tmp_path / "people.csv", rows, [*HEADER, "split"])
    with pytest.raises(DataError, match=r"row 51 \(line 52\).*'maybe' never occurs in training"):
        parts_of(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n3\n", r"row 2 \(line 3\): 1 cells; expected 2"),
        ("a,a\n1,2\n", "'a' is there twice"),
        ("a,b\n", "no rows"),
        ("", "expected the names of the columns"),
        ('a,b\n1,"2\n', "expected cells with quotes that close"),
    ],
)
def test_a_file_that_is_no_table(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        parts_of(path)


def test_a_file_of_other_bytes_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(b"a,b\n1,2\n3,\xff\xfe\n")
    with pytest.raises(DataError, match="line 3: not UTF-8"):
        parts_of(path)


@given(
    st.lists(
        st.one_of(st.just(""), st.integers(-(10**6), 10**6).map(str), st.floats(-1e6, 1e6).map(str)),
        min_size=12,
        max_size=40,
    )
)
def test_numbers_are_scaled_and_blanks_are_the_mean(cells: list[str]) -> None:
    rows = RowFile(path=Path("x.csv"), cells={"x": list(cells), "y": ["1"] * len(cells)}, lines=[0] * len(cells))
    every = range(len(cells))
    try:
        known = learn_columns(rows, every, Goal(name="y"), kinds={"x": "number"})
    except InputError:
        assert len({as_number(cell) for cell in cells if cell}) <= 1
        return
    x = known.encode(rows, every)
    assert x.shape == (len(cells), known.width)
    assert bool(x.isfinite().all())
    there = torch.tensor([bool(cell) for cell in cells])
    assert float(x[~there, 0].abs().sum()) == 0.0
    assert float(x[there, 0].mean()) == pytest.approx(0.0, abs=1e-4)
    assert Columns.from_json(known.to_json()) == known
