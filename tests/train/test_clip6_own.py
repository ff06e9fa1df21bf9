"""Samples of the user's own: every layout, missing modalities, towers of one's own, and every fault with its row."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trimtab.core.errors import InputError
from trimtab.train.data_problems import DataError
from trimtab.train.recipe import build_parts, run_recipe, settings_of
from trimtab.train.recipes import load_recipe
from trimtab.train.recipes.clip6 import own_towers
from trimtab.train.recipes.clip6.metrics import retrieval
from trimtab.train.recipes.clip6.model import SixTowers

RECIPE = load_recipe("clip6")
SMALL = {"steps": 6, "width": 16, "channels": 4, "image_size": 12, "text_features": 64, "batch_size": 8}
SMALL |= {"warmup_steps": 1}
COLOURS = ("red", "green", "blue", "black")


def colour(i: int) -> tuple[str, np.ndarray[Any, Any]]:
    name = COLOURS[i % 4]
    pixels = np.zeros((10, 12, 3), np.uint8)
    if name != "black":
        pixels[..., COLOURS.index(name)] = 255 - 2 * i
    return name, pixels


def draw(path: Path, i: int) -> None:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(colour(i)[1]).save(path)


def sound(path: Path, i: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tone = (8000 * np.sin(np.arange(400 + 10 * i) * (0.05 + 0.1 * (i % 4)))).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(tone.tobytes())


def coco(folder: Path, num: int = 24) -> Path:
    for part, rows in (("train", range(num - 6)), ("val", range(num - 6, num))):
        images = [{"id": 100 + i, "file_name": f"{i:012d}.png"} for i in rows]
        said = [
            {"id": 2 * i + k, "image_id": 100 + i, "caption": f"a {colour(i)[0]} thing, number {i}, view {k}"}
            for i in rows
            for k in range(1 + i % 2)
        ]
        for i in rows:
            draw(folder / f"{part}2017" / f"{i:012d}.png", i)
        path = folder / "annotations" / f"captions_{part}2017.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"images": images, "annotations": said}))
    return folder


def table(folder: Path, num: int = 24) -> Path:
    lines = ["id,photo,title,sound,split"]
    for i in range(num):
        draw(folder / "images" / f"{i}.png", i)
        sound(folder / "sounds" / f"{i}.wav", i)
        part = "test" if i % 6 == 5 else "val" if i % 4 == 0 else "train"
        lines.append(f"{i},{i}.png,{'' if i % 5 == 2 else colour(i)[0] + ' thing'},sounds/{i}.wav,{part}")
    (folder / "data.csv").write_text("\n".join(lines) + "\n")
    return folder / "data.csv"


def json_lines(folder: Path, num: int = 24) -> Path:
    draw_ = np.random.default_rng(0)
    rows = [
        {"text": f"{colour(i)[0]} {i}", "vector": None if i == 3 else draw_.normal(size=5).tolist(), "n": i}
        | {"audio": draw_.normal(size=60).tolist()}
        for i in range(num)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "rows.jsonl"


def arrays(num: int = 24) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    vector = rng.normal(size=(num, 6)).astype(np.float32)
    vector[4] = np.nan
    return {
        "image": rng.integers(0, 256, (num, 12, 12, 3), dtype=np.uint8),
        "depth": rng.random((num, 12, 12)).astype(np.float32),
        "vector": vector,
        "audio": rng.normal(size=(num, 200)).astype(np.float32),
        "motion": rng.normal(size=(num, 100, 3)).astype(np.float32),
        "text": np.array([f"{colour(i)[0]} {i}" for i in range(num)]),
    }


def npz(folder: Path) -> Path:
    np.savez(folder / "six.npz", **arrays(), held_out=np.arange(24) >= 18)
    return folder / "six.npz"


def npy(folder: Path) -> Path:
    for name, values in arrays().items():
        np.save(folder / f"{name}.npy", values)
    return folder


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "coco": coco,
    "csv": table,
    "jsonl": json_lines,
    "npz": npz,
    "npy": npy,
}
KINDS = {
    "coco": ["image", "text", "text"],
    "csv": ["image", "text", "series"],
    "jsonl": ["text", "vector", "series"],
    "npz": ["image", "depth", "vector", "series", "series", "text"],
    "npy": ["series", "depth", "image", "series", "text", "vector"],
}


def parts_of(path: Path, **given_: Any) -> Any:
    return build_parts(RECIPE, settings_of(RECIPE, {"data": str(path), **SMALL, **given_}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_trained_on(tmp_path: Path, layout: str) -> None:
    said: list[str] = []
    path = LAYOUTS[layout](tmp_path)
    result = run_recipe(RECIPE, {"dataset_path": str(path), **SMALL}, run_dir=False, say=said.append)
    assert result.num_steps == 6
    assert result.weights_finite
    kinds = [one.modality.kind for one in parts_of(path).train_loader.dataset.columns]
    assert kinds == KINDS[layout]
    assert "objective pairwise" in said[3], said  # some samples lack a modality
    assert ("test_retrieval" in result.facts) == (layout == "csv")


def test_without_a_missing_one_the_loss_is_that_of_whole_tuples(tmp_path: Path) -> None:
    values = {name: one for name, one in arrays().items() if name != "vector"}
    np.savez(tmp_path / "five.npz", **values)
    parts = parts_of(tmp_path / "five.npz", modalities="text,image,audio=vector")
    assert "present" not in next(iter(parts.train_loader))
    assert parts.model.criterion.objective == "axis"
    assert [one.modality.kind for one in parts.train_loader.dataset.columns] == ["text", "image", "vector"]


def test_samples_that_belong_together_find_each_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    z = rng.normal(size=(400, 8))
    np.savez(tmp_path / "two.npz", a=np.tanh(z @ rng.normal(size=(8, 20))), b=np.tanh(z @ rng.normal(size=(8, 30))))
    result = run_recipe(
        RECIPE,
        {"data": str(tmp_path / "two.npz"), "steps": 120, "width": 32, "batch_size": 32, "warmup_steps": 5},
        run_dir=False,
    )
    assert result.score > 0.5


@given(st.integers(0, 10**6))
def test_what_is_missing_changes_nothing(seed: int) -> None:
    """Whatever stands in the place of a missing view, the encodings of the others are the same."""
    draw_ = torch.Generator().manual_seed(seed)
    towers = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(3)]
    model = SixTowers(towers, nn.Identity())
    model.eval()
    views = [torch.randn(6, 3, generator=draw_) for _ in range(3)]
    present = torch.rand(6, 3, generator=draw_) < 0.7
    present[:, 0] = True
    other = [torch.where(present[:, [i]], view, torch.tensor(7.0)) for i, view in enumerate(views)]
    for a, b, i in zip(model(views, present), model(other, present), range(3), strict=True):
        assert torch.equal(a, b)
        assert float(a[~present[:, i]].detach().abs().sum()) == 0.0


def test_retrieval_asks_only_for_what_is_there() -> None:
    same = torch.eye(6)
    present = torch.tensor([[True, True, i % 2 == 0] for i in range(6)])
    gone = torch.where(present[:, [2]], same, torch.zeros(()))
    found = retrieval([same, same, gone], ("a", "b", "c"), present=present)
    assert found.metrics()["r1"] == 1.0
    assert found.metrics()["pairs_r1"] == 1.0


def test_towers_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = npz(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def towers(modalities, width):\n"
        "    shape = {m.name: m.shape for m in modalities}\n"
        "    return {'vector': nn.Linear(shape['vector'][0], width)}\n"
        "def wrong(modalities, width):\n"
        "    return {'vector': nn.Linear(6, width + 1)}\n"
        "def strange(modalities, width):\n"
        "    return {'vectr': nn.Linear(6, width)}\n"
    )
    spec = f"{tmp_path / 'mine.py'}:"
    made = parts_of(path, towers=f"{spec}towers").model.towers
    assert isinstance(made[2], nn.Linear)
    with pytest.raises(InputError, match=r"makes \[2, 17\] of two samples; expected \[2, 16\]"):
        parts_of(path, towers=f"{spec}wrong")
    with pytest.raises(InputError, match="did you mean 'vector'"):
        parts_of(path, towers=f"{spec}strange")
    with pytest.raises(InputError, match="names no function"):
        own_towers.make_towers((), {"towers": "mine", "width": 4})


def spoil_csv(folder: Path, row: int, old: str, new: str) -> Path:
    path = table(folder)
    lines = path.read_text().splitlines()
    assert old in lines[row]
    lines[row] = lines[row].replace(old, new)
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("6.png", "none.png", "column 'photo': there is no file 'none.png'"),
        ("sounds/6.wav", "sounds/none.wav", "column 'sound': there is no file"),
        (
            "6.png,blue thing,sounds/6.wav",
            "6.png,,",
            "title, sound missing; expected at least 2 of photo, title, sound",
        ),
        (",val", ",vol", "column 'split': 'vol'; expected train, val or test"),
        (",train", "", "4 cells; expected 5"),
    ],
)
def test_a_fault_of_a_row_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    row = 9 if old == ",val" else 7
    with pytest.raises(DataError) as error:
        parts_of(spoil_csv(tmp_path, row, old, new))
    assert f"data.csv, row {row} (line {row + 1})" in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize(("name", "said"), [("images/6.png", "as a picture"), ("sounds/6.wav", "as a series")])
def test_a_file_that_cannot_be_read_is_named_with_its_row(tmp_path: Path, name: str, said: str) -> None:
    path = table(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:30])
    with pytest.raises(DataError) as error:
        parts_of(path)
    assert "data.csv, row 7 (line 8)" in str(error.value)
    assert f"{name} cannot be read {said}" in str(error.value)


def test_faults_of_captions_are_named(tmp_path: Path) -> None:
    folder = coco(tmp_path)
    path = folder / "annotations" / "captions_train2017.json"
    given_ = json.loads(path.read_text())
    given_["annotations"] = [one for one in given_["annotations"] if one["image_id"] != 103]
    given_["annotations"].append({"id": 1, "image_id": 999, "caption": "nobody"})
    given_["images"].append({"id": 50, "file_name": "gone.png"})
    path.write_text(json.dumps(given_))
    with pytest.raises(DataError) as error:
        parts_of(folder)
    text = str(error.value)
    assert f"{path}, image 4 (id 103): '000000000003.png' has no caption" in text
    assert f"{path}, annotation {len(given_['annotations'])}: no image has the id 999" in text
    assert f"{path}, image 19 (id 50): there is no picture 'gone.png'" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"depth": np.zeros((23, 12, 12))}, "24 (image), 23 (depth)"),
        ({"present": np.ones((24, 2), bool)}, "present is [24, 2]; expected [24, 6]"),
        ({"present": np.eye(24, 6, -2, dtype=bool)}, "row 1: image, depth, vector, audio, motion, text missing"),
        ({"held_out": np.ones(3, bool)}, "held_out is [3]; expected [24]"),
        ({"vector": np.where(np.arange(144).reshape(24, 6) == 50, np.inf, 0.5)}, "row 9, 'vector': 1 of 6 numbers"),
    ],
)
def test_a_fault_of_an_array_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    np.savez(tmp_path / "six.npz", **{**arrays(), **change})
    with pytest.raises(DataError) as error:
        parts_of(tmp_path / "six.npz")
    assert said in str(error.value)


def test_what_is_no_data_set_says_what_one_is(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no 'emojis'; expected a folder with pictures"):
        build_parts(RECIPE, settings_of(RECIPE, {"data": "emojis"}))
    with pytest.raises(InputError, match="is not a data set: it holds nothing"):
        parts_of(tmp_path)
    np.savez(tmp_path / "seven.npz", more=np.zeros((24, 3)), **arrays())
    with pytest.raises(InputError, match="7 modalities"):
        parts_of(tmp_path / "seven.npz")
    with pytest.raises(InputError, match="the original loss cannot leave out"):
        parts_of(npz(tmp_path), loss="original")
    with pytest.raises(InputError, match="leave --data out, or try lr-x1000"):
        build_parts(RECIPE, settings_of(RECIPE, {"data": str(npz(tmp_path)), **SMALL}), "nan-image")
