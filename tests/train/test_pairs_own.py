"""Pairs of the user's own: a CSV with pictures, how they are divided, and every fault with its row."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.errors import InputError
from trimtab.train.data_problems import DataError
from trimtab.train.own_data.picture_files import PictureFiles, read_picture
from trimtab.train.recipe import build_parts, run_recipe, settings_of
from trimtab.train.recipes import load_recipe
from trimtab.train.recipes.pairs.own_pictures import read_pairs

RECIPE = load_recipe("pairs")
SMALL = {"image_size": 8, "batch_size": 4, "pretrain_epochs": 1, "epochs": 1, "width": 16, "layers": 1, "heads": 2}
HEADER = "image_a,image_b,question,answer"


def picture(path: Path, level: int, ending: str) -> None:
    values = np.full((12, 10, 3), level, np.uint8)
    if ending == ".npy":
        np.save(path, values)
        return
    image = pytest.importorskip("PIL.Image")
    image.fromarray(values).save(path)


def lay(folder: Path, num: int = 48, *, ending: str = ".npy", split: bool = True, images: str = "images") -> list[str]:
    """Grey pictures of which the brighter is to be found; the lines of pairs.csv after the header."""
    (folder / images).mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    levels = draw.integers(0, 256, num)
    for i, level in enumerate(levels):
        picture(folder / images / f"p{i}{ending}", int(level), ending)
    lines = []
    for i in range(num):
        other = int(draw.integers(num))
        gap = int(levels[i]) - int(levels[other])
        answer = "Similar" if abs(gap) < 40 else "First" if gap > 0 else "Second"
        part = ",test" if i % 8 == 1 else ",val" if i % 4 == 0 else ",train"
        lines.append(f"p{i}{ending},p{other}{ending},Which is brighter?,{answer}" + (part if split else ""))
    save(folder, lines, split=split)
    return lines


def save(folder: Path, lines: list[str], *, split: bool = True) -> None:
    (folder / "pairs.csv").write_text("\n".join([HEADER + (",split" if split else ""), *lines]) + "\n")


def parts_of(folder: Path, **given_: Any) -> Any:
    return build_parts(RECIPE, settings_of(RECIPE, {"data": str(folder), **SMALL, **given_}))


@pytest.mark.parametrize(("ending", "images"), [(".png", "images"), (".jpg", "."), (".npy", "images")])
def test_a_csv_with_pictures_is_trained_on(tmp_path: Path, ending: str, images: str) -> None:
    lay(tmp_path, ending=ending, images=images)
    said: list[str] = []
    result = run_recipe(RECIPE, {"data_dir": str(tmp_path), **SMALL}, run_dir=False, say=said.append)
    assert result.num_steps > 0
    assert "test_accuracy" in result.facts
    assert any("30 train, 12 val, 6 test pairs (by the column split), 48 pictures at 8 x 8" in line for line in said)


def test_workers_decode_the_same_pictures(tmp_path: Path) -> None:
    lay(tmp_path)
    alone, helped = (next(iter(parts_of(tmp_path, workers=n).val_loader)) for n in (0, 1))
    assert all(bool((alone[key] == helped[key]).all()) for key in alone)


def test_without_a_split_no_picture_is_on_both_sides(tmp_path: Path) -> None:
    lay(tmp_path, split=False)
    parts = parts_of(tmp_path)
    shown = [
        set(one.dataset.asked.first.tolist()) | set(one.dataset.asked.second.tolist())
        for one in (parts.train_loader, parts.val_loader)
    ]
    assert shown[0].isdisjoint(shown[1])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=30, max_size=60), st.integers(0, 9))
def test_no_division_by_pictures_shares_one(pairs: list[tuple[int, int]], seed: int) -> None:
    from trimtab.train.recipes.pairs import own_pictures

    first, second = zip(*pairs, strict=True)
    rows: Any = None
    parts, _ = own_pictures._held_out(rows, first, second, seed)
    shown = [
        {n for pair, part in zip(pairs, parts, strict=True) if part == one for n in pair} for one in ("train", "val")
    ]
    assert shown[0].isdisjoint(shown[1])


@pytest.mark.parametrize(
    ("row", "line", "said"),
    [
        (9, "p999.npy,p1.npy,which,First,train", "column 'image_a': there is no picture 'p999.npy'"),
        (9, "p1.npy,,which,First,train", "column 'image_b': no picture"),
        (9, "p1.npy,p2.npy,,First,train", "column 'question': no question"),
        (9, "p1.npy,p2.npy,which,,train", "column 'answer': no answer"),
        (9, "p1.npy,p2.npy,which,Third,train", "column 'answer': 'Third'; expected First, Second or Similar"),
        (9, "p1.npy,p2.npy,which,First,tain", "column 'split': 'tain'; expected train, val or test"),
        (9, "p1.npy,p2.npy,which", "3 cells; expected 5"),
    ],
)
def test_a_fault_is_named_with_file_and_row(tmp_path: Path, row: int, line: str, said: str) -> None:
    lines = lay(tmp_path)
    lines[row] = line
    save(tmp_path, lines)
    with pytest.raises(DataError) as error:
        parts_of(tmp_path)
    assert f"{tmp_path / 'pairs.csv'}, row {row + 1} (line {row + 2})" in str(error.value)
    assert said in str(error.value)


def test_a_picture_that_cannot_be_read_is_named_with_the_row_that_asks_for_it(tmp_path: Path) -> None:
    lay(tmp_path, ending=".png")
    path = tmp_path / "images" / "p7.png"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError) as error:
        parts_of(tmp_path)
    assert "pairs.csv, row " in str(error.value)
    assert "p7.png cannot be read as a picture" in str(error.value)


def test_an_answer_that_training_never_saw(tmp_path: Path) -> None:
    lines = [line.replace("Similar", "First") for line in lay(tmp_path)]
    lines[4] = lines[4].replace(",First,", ",Similar,").replace(",Second,", ",Similar,")
    save(tmp_path, lines)
    with pytest.raises(DataError, match=r"row 5 \(line 6\), column 'answer': Similar never occurs in training"):
        parts_of(tmp_path)


def test_without_pillow_the_install_line_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path, ending=".png")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"pip install 'trimtab\[images\]'"):
        parts_of(tmp_path)


def test_nothing_there_and_a_column_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no .digts.; expected a folder with pairs\.csv"):
        build_parts(RECIPE, settings_of(RECIPE, {"data": "digts"}))
    (tmp_path / "pairs.csv").write_text("image_a,image_c,question,answer\na,b,c,First\n")
    with pytest.raises(InputError, match="did you mean 'image_"):
        read_pairs(tmp_path / "pairs.csv", 0, 8)


def test_a_pixel_of_nan_is_put_aside_in_own_pictures_too(tmp_path: Path) -> None:
    lay(tmp_path)
    result = run_recipe(RECIPE, {"data": str(tmp_path), **SMALL}, fault="nan-pixel", run_dir=False)
    assert result.weights_finite
    assert result.rejected > 0


def test_what_is_kept_is_bounded_and_changes_nothing(tmp_path: Path) -> None:
    lay(tmp_path, 12)
    paths = sorted((tmp_path / "images").iterdir())
    places = [str(path) for path in paths]
    kept = PictureFiles(paths, places, side=8)
    bounded = PictureFiles(paths, places, side=8, cache_bytes=400)
    for _ in range(2):
        assert all(bool((kept[i] == bounded[i]).all()) for i in range(12))
    assert len(bounded._kept) == 2


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "I;16", "1"])
@pytest.mark.parametrize("planes", [1, 3])
def test_every_mode_of_a_picture(tmp_path: Path, mode: str, planes: int) -> None:
    image = pytest.importorskip("PIL.Image")
    if mode == "I;16":
        image.fromarray(np.full((9, 7), 40_000, np.uint16)).save(tmp_path / "a.png")
    else:
        image.new(mode, (7, 9)).save(tmp_path / "a.png")
    found = read_picture(tmp_path / "a.png", side=8, planes=planes)
    assert found.shape == (planes, 8, 8)
    assert mode != "I;16" or int(found.min()) == round(40_000 / 65_535 * 255 - 0.5)
