"""Own files as other programs write them: quotes, byte order marks, endings, words for a blank, names of any system."""

from __future__ import annotations

import codecs
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from trimtab.train.data_problems import DataError
from trimtab.train.own_data.modalities import ArrayColumn
from trimtab.train.own_data.picture_files import PictureFiles, find_picture
from trimtab.train.own_data.row_files import parts_of, read_rows
from trimtab.train.recipes.charlm.text import Bytes, file_problems, pieces_of, stream_of
from trimtab.train.recipes.clip6.own_views import How, read_views
from trimtab.train.recipes.segment.pictures import find_pictures
from trimtab.train.recipes.tabular.columns import Goal
from trimtab.train.recipes.tabular.own_table import read_table

MARK = codecs.BOM_UTF8


@pytest.mark.parametrize(
    ("head", "columns"),
    [
        ('"price, in EUR, net";name', ("price, in EUR, net", "name")),
        ('"a; b; c",name', ("a; b; c", "name")),
        ('"two\nlines, and, more";name', ("two\nlines, and, more", "name")),
        ('"said ""a,b,c""";name', ('said "a,b,c"', "name")),
        ("name", ("name",)),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_delimiters_within_quotes_do_not_count(head: str, columns: tuple[str, ...], end: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    between = ";" if ";name" in head else ","
    path.write_bytes(MARK + (head + end + between.join("1" * len(columns)) + end).encode())
    assert read_rows(path).columns == columns


def test_every_usual_word_for_a_part(tmp_path: Path) -> None:
    words = ["Train", "training", "val", "valid", "validation", "dev", "test", " Testing "]
    (tmp_path / "a.csv").write_text("\n".join(["split,x", *(f"{word},1" for word in words)]))
    assert parts_of(read_rows(tmp_path / "a.csv"), "split") == ["train"] * 2 + ["val"] * 4 + ["test"] * 2


@pytest.mark.parametrize("words", [("none", "mild", "severe"), ("-", "+"), ("Nil", "some")])
def test_a_class_may_be_called_none(words: tuple[str, ...], tmp_path: Path) -> None:
    lines = [f"{i % 7},{words[i % len(words)]},{words[(i + 1) % len(words)] if i % 4 else ''}" for i in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["x,grade,other", *lines]))
    table = read_table(str(tmp_path / "a.csv"), "grade", held_out=0.2, seed=0)
    assert table.columns.goal.classes == tuple(sorted(words))
    other = next(column for column in table.columns.inputs if column.name == "other")
    assert other.values == tuple(sorted(["(blank)", *words])), "a word and a blank are two values"


def test_none_is_a_blank_among_numbers(tmp_path: Path) -> None:
    lines = [f"{'none' if i % 9 == 0 else i},{i * 2}" for i in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["x,y", *lines]))
    table = read_table(str(tmp_path / "a.csv"), "y", held_out=0.2, seed=0)
    assert table.columns.inputs[0].kind == "number"
    assert table.columns.inputs[0].blanks


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("a.jpg", "a.JPG"),
        ("a.JPG", "a.jpg"),
        ("a", "a.JPG"),
        ("a", "a.png"),
        ("scan.v2", "scan.v2.png"),
        ("sub\\a.png", "sub/a.png"),
        (unicodedata.normalize("NFC", "forêt noire.png"), unicodedata.normalize("NFD", "forêt noire.png")),
        (unicodedata.normalize("NFD", "forêt.png"), unicodedata.normalize("NFC", "forêt.png")),
    ],
)
def test_a_picture_is_found_as_another_system_names_it(name: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / file).write_bytes(b"")
    assert find_picture(name, [tmp_path]) == tmp_path / file


@pytest.mark.parametrize("name", ["a" * 5_000, "a\0b", "b.png"])
def test_a_name_that_no_file_has_is_not_found(name: str, tmp_path: Path) -> None:
    (tmp_path / "b.png").mkdir()
    assert find_picture(name, [tmp_path]) is None


def test_captions_with_a_byte_order_mark(tmp_path: Path) -> None:
    images = [{"id": i, "file_name": f"{i}.npy"} for i in range(12)]
    said = [{"image_id": i, "caption": f"number {i} of them"} for i in range(12)]
    (tmp_path / "captions.json").write_bytes(MARK + json.dumps({"images": images, "annotations": said}).encode())
    for i in range(12):
        np.save(tmp_path / f"{i}.npy", np.full((9, 9), 20 * i, np.uint8))
    assert len(read_views(str(tmp_path), How(side=8, width=16, seed=0)).parts["train"]) == 10


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path, other, empty = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "empty.txt"
    path.write_bytes(MARK + b"abc")
    other.write_bytes(b"def")
    empty.write_bytes(MARK)
    assert list(pieces_of([path, other], cut=False)) == ["abc", "def"]
    assert bytes(stream_of([path, other], Bytes()).read(0, 6).tolist()) == b"abcdef"
    assert ["is empty" in one for one in file_problems(empty)] == [True]


def test_a_picture_that_is_kept_is_not_changed_by_scaling(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full((8, 8), 100, np.uint8))
    files = PictureFiles([tmp_path / "a.npy"], ["a"], side=8)
    assert [float(files[0].mean()) for _ in range(2)] == pytest.approx([100 / 255] * 2)


def test_numbers_of_classes_that_are_large_stay_apart() -> None:
    goal = Goal(name="y")
    assert [goal.label(cell) for cell in ("10000001", 10000002, 1.0, "0.5")] == ["10000001", "10000002", "1", "0.5"]


def test_numbers_near_the_end_of_what_a_float_holds(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\n".join(["x,y", *(f"{10**300 * (i + 1)},{10**200 * i * i}" for i in range(40))]))
    inputs, targets = read_table(str(tmp_path / "a.csv"), "y", held_out=0.2, seed=0).parts["train"]
    assert bool(inputs.isfinite().all() and targets.isfinite().all())
    assert 0.5 < float(inputs.std()) < 2


def test_an_integer_that_no_float_holds_is_named_with_its_row(tmp_path: Path) -> None:
    rows = [{"x": 10 ** (400 if i == 3 else 3) + i, "y": "ab"[i % 2]} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=r"a\.jsonl, row 4 \(line 4\), column 'x': .*expected a number"):
        read_table(str(tmp_path / "a.jsonl"), "y", held_out=0.2, seed=0)


def test_hidden_files_and_a_readme_are_no_data(tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.random.default_rng(0).normal(size=(20, 4)))
    (tmp_path / "._a.npy").write_bytes(b"x")
    (tmp_path / "readme.txt").write_text("about\nthis")
    assert [one.name for one in read_views(str(tmp_path), How(side=8, width=16, seed=0)).modalities] == ["a", "b"]
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "._t.csv").write_bytes(b"x")
    (tmp_path / "table" / "t.csv").write_text("\n".join(["x,y", *(f"{i},{'ab'[i % 2]}" for i in range(40))]))
    assert len(read_table(str(tmp_path / "table"), "y", held_out=0.2, seed=0).parts["train"][0]) == 32


def test_lists_of_several_lengths_are_named_with_their_row(tmp_path: Path) -> None:
    rows = [{"text": f"number {i}", "emb": [[1, 2], [3]]} for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=r"a\.jsonl, row 1 \(line 1\), column 'emb': .*expected a list of numbers"):
        read_views(str(tmp_path / "a.jsonl"), How(side=8, width=16, seed=0))


def test_numbers_that_float32_cannot_hold_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.full((20, 4), 1e300), b=np.random.default_rng(0).normal(size=(20, 4)))
    with pytest.raises(DataError, match=r"a\.npz, row 1, 'a': 4 of 4 numbers are NaN or Inf in float32"):
        read_views(str(tmp_path / "a.npz"), How(side=8, width=16, seed=0))


def test_pictures_of_16_bits_are_scaled_as_such() -> None:
    column = ArrayColumn("image", np.full((2, 12, 12, 3), 65_535, np.uint16), None, Path("a.npz"))
    assert float(column[0].max()) == 1.0


def test_a_mask_is_found_though_macos_divides_its_accents(tmp_path: Path) -> None:
    for folder, form in (("images", "NFC"), ("masks", "NFD")):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / f"{unicodedata.normalize(form, 'forêt')}.npy", np.zeros((9, 9), np.uint8))
    assert len(find_pictures(tmp_path).train) == 1
