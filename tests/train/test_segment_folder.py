"""The user's own pictures and masks, and everything that may be wrong with them."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.core.errors import InputError
from trimtab.train.recipe import run_recipe
from trimtab.train.recipes import load_recipe
from trimtab.train.recipes.segment.data import compose, read_folder

NEEDED = "images" in os.environ.get("TRIMTAB_REQUIRE", "")


def own_data(root: Path, num: int = 6, side: int = 20, *, names: tuple[str, str] = ("images", "masks")) -> Path:
    scenes = compose(num, side, seed=3)
    for folder in names:
        (root / folder).mkdir(parents=True)
    for i in range(num):
        colours = np.clip(scenes.images[i] * 0.2 + 0.5, 0.0, 1.0)
        np.save(root / names[0] / f"{i}.npy", (colours * 255).round().astype(np.uint8).transpose(1, 2, 0))
        np.savez(root / names[1] / f"{i}.npz", (scenes.masks[i, 0] * 255).astype(np.uint8))
    return root


@pytest.mark.parametrize("names", [("images", "masks"), ("Imgs", "GT")])
def test_b22_dataset_path_takes_arrays_of_both_layouts(names: tuple[str, str], tmp_path: Path) -> None:
    scenes = read_folder(str(own_data(tmp_path, names=names)), 20)
    made = compose(6, 20, seed=3)
    np.testing.assert_array_equal(scenes.masks, made.masks)
    np.testing.assert_allclose(scenes.images, made.images, atol=0.011)  # half a shade of 256, over 0.2
    assert read_folder(str(tmp_path), 16).images.shape == (6, 3, 16, 16)


def test_b22_pictures_are_read_where_pillow_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not NEEDED:
        pytest.importorskip("PIL.Image")
    image = importlib.import_module("PIL.Image")
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    grey = np.zeros((10, 12), np.uint8)
    grey[2:6, 3:9] = 255
    image.fromarray(grey).save(tmp_path / "masks" / "a.png")
    image.fromarray(np.stack([grey, grey // 2, grey // 4], 2)).save(tmp_path / "images" / "a.png")
    scenes = read_folder(str(tmp_path), 12)
    assert 0 < scenes.masks.mean() < 0.5
    (tmp_path / "images" / "a.png").write_bytes(b"no picture at all")
    with pytest.raises(InputError, match=r"a\.png cannot be read as a picture: .*; write it again"):
        read_folder(str(tmp_path), 12)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"a\.png needs a decoder, .*pip install 'trimtab\[images\]'"):
        read_folder(str(tmp_path), 12)


def _remove(root: Path) -> None:
    (root / "masks" / "2.npz").unlink()


def _shrink(root: Path) -> None:
    np.save(root / "images" / "2.npy", np.zeros((7, 9, 3), np.uint8))


def _truncate(root: Path) -> None:
    path = root / "images" / "2.npy"
    path.write_bytes(path.read_bytes()[:40])


def _flat(root: Path) -> None:
    np.save(root / "images" / "2.npy", np.zeros(5, np.uint8))


def _nan(root: Path) -> None:
    np.save(root / "images" / "2.npy", np.full((20, 20), np.nan))


def _several(root: Path) -> None:
    np.savez(root / "masks" / "2.npz", a=np.zeros((20, 20)), b=np.zeros((20, 20)))


def _pickled(root: Path) -> None:
    np.save(root / "images" / "2.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_remove, r"1 of 6 pictures in .* have no mask of the same name in .*masks: 2\.npy; add the masks"),
        (_shrink, r"2\.npy is 9 x 7 pixels and its mask .*2\.npz 20 x 20; expected the same size"),
        (_truncate, r"2\.npy cannot be read as an array"),
        (_flat, r"2\.npy holds an array of shape \(5,\); expected \[h, w\]"),
        (_nan, r"2\.npy holds float64 values from nan to nan; expected bytes, or finite numbers from 0 to 1"),
        (_several, r"2\.npz holds 2 arrays; expected one"),
        (_pickled, r"2\.npy cannot be read as an array: Object arrays"),
    ],
)
def test_b22_what_is_wrong_with_own_data_is_told_with_its_file(spoil: Any, said: str, tmp_path: Path) -> None:
    spoil(own_data(tmp_path))
    with pytest.raises(InputError, match=said):
        read_folder(str(tmp_path), 16)


def test_b22_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"is not a data set: expected folders images/ and masks/ or Imgs/ and GT/, found"
    ):
        read_folder(str(tmp_path), 16)
    with pytest.raises(InputError, match="no such folder"):
        read_folder(str(tmp_path / "none"), 16)
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    with pytest.raises(InputError, match=r"images holds no pictures; expected files ending in \.npy"):
        read_folder(str(tmp_path), 16)


def test_b22_own_data_is_trained_on_with_a_share_held_out(tmp_path: Path) -> None:
    given = {"dataset_path": str(own_data(tmp_path, 10)), "img_size": 16, "batch_size": 2, "epochs": 2}
    given |= {"stage1_epochs": 1, "pretrain_epochs": 0, "num_experts": 2}
    result = run_recipe(load_recipe("segment"), given, run_dir=False)
    assert [row["num_steps"] for row in result.history] == [1, 1]
    assert result.weights_finite
    own_data(tmp_path / "few", 2)
    with pytest.raises(InputError, match="holds 2 pictures; expected at least 3"):
        run_recipe(load_recipe("segment"), given | {"dataset_path": str(tmp_path / "few")}, run_dir=False)
