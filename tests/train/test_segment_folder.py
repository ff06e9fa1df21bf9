"""The user's own pictures and masks in every layout, and everything that may be wrong with them."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from trimtab.core.errors import InputError
from trimtab.train.data_problems import DataError
from trimtab.train.recipe import run_recipe
from trimtab.train.recipes import load_recipe
from trimtab.train.recipes.segment.data import compose
from trimtab.train.recipes.segment.masks import read_mask
from trimtab.train.recipes.segment.pictures import Pictures, find_pictures

NEEDED = "images" in os.environ.get("TRIMTAB_REQUIRE", "")
PLAIN = (("images", "masks"),)
LAYOUTS = {
    "images and masks": PLAIN,
    "Imgs and GT": (("Imgs", "GT"),),
    "COD10K": (("Train/Image", "Train/GT_Object"), ("Test/Image", "Test/GT_Object")),
    "COD10K, older": (("Train/Images/Image", "Train/GT_Objects/GT_Object"),),
    "TrainDataset": (
        ("TrainDataset/Imgs", "TrainDataset/GT"),
        ("TestDataset/CAMO/Imgs", "TestDataset/CAMO/GT"),
        ("TestDataset/COD10K/Imgs", "TestDataset/COD10K/GT"),
    ),
    "TrainDataset, one test set": (("TrainDataset/Imgs", "TrainDataset/GT"), ("TestDataset/Imgs", "TestDataset/GT")),
    "train and val": (("train/images", "train/masks"), ("val/images", "val/masks")),
    "train, val and test": tuple((f"{one}/images", f"{one}/masks") for one in ("train", "val", "test")),
    "images/train": (("images/train", "masks/train"), ("images/val", "masks/val")),
    "an archive's own folder": (("COD10K-v3/Train/Image", "COD10K-v3/Train/GT_Object"),),
    "images and labels": (("images", "labels"),),
    "folders of classes": (("images/cats", "masks/cats"),),
}
GIVEN = {"img_size": 16, "batch_size": 2, "epochs": 2, "stage1_epochs": 1, "pretrain_epochs": 0, "num_experts": 2}
GIVEN |= {"num_workers": 0}


def own_data(root: Path, num: int = 6, side: int = 20, *, names: Any = PLAIN) -> Path:
    scenes = compose(num, side, seed=3)
    for images, masks in names:
        for folder in (images, masks):
            (root / folder).mkdir(parents=True)
        for i in range(num):
            colours = np.clip(scenes.images[i] * 0.2 + 0.5, 0.0, 1.0)
            np.save(root / images / f"{i}.npy", (colours * 255).round().astype(np.uint8).transpose(1, 2, 0))
            np.savez(root / masks / f"{i}.npz", (scenes.masks[i, 0] * 255).astype(np.uint8))
    return root


def read(root: Path, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = Pictures(find_pictures(root).train, side)
    images, masks = zip(*(rows[i] for i in range(len(rows))), strict=True)
    return torch.stack(images), torch.stack(masks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b22_every_layout_is_found_with_its_splits(layout: str, tmp_path: Path) -> None:
    folders = LAYOUTS[layout]
    found = find_pictures(own_data(tmp_path, 3, names=folders))
    num = {split: sum(split in images.lower() for images, _ in folders) for split in ("val", "test")}
    assert (len(found.train), len(found.val), len(found.test)) == (3, 3 * num["val"], 3 * num["test"])
    assert all(pair.image.stem == pair.mask.stem for pair in (*found.train, *found.val, *found.test))


def test_b22_the_name_of_a_mask_may_say_that_it_is_one(tmp_path: Path) -> None:
    own_data(tmp_path, 3, names=(("images/a", "masks/a"), ("images/b", "masks/b")))
    for one in [*(tmp_path / "masks").rglob("*.npz")]:
        one.rename(one.with_name(f"{one.stem}_mask.npz"))
    found = find_pictures(tmp_path).train
    assert len(found) == 6
    assert all(pair.image.parent.name == pair.mask.parent.name for pair in found)
    assert all(pair.mask.stem == f"{pair.image.stem}_mask" for pair in found)


def test_b22_arrays_are_read_as_they_are(tmp_path: Path) -> None:
    images, masks = read(own_data(tmp_path), 20)
    made = compose(6, 20, seed=3)
    np.testing.assert_array_equal(masks, made.masks)
    np.testing.assert_allclose(images, made.images, atol=0.011)  # half a shade of 256, over 0.2
    assert read(tmp_path, 16)[0].shape == (6, 3, 16, 16)


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
    assert 0 < read(tmp_path, 16)[1].mean() < 0.5
    (tmp_path / "images" / "a.png").write_bytes(b"no picture at all")
    with pytest.raises(DataError, match=r"a\.png cannot be read as a picture: .*; write it again"):
        read(tmp_path, 16)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"a\.png needs a decoder, .*pip install 'trimtab\[images\]'"):
        read(tmp_path, 16)


OBJECT = np.zeros((10, 12), bool)
OBJECT[2:6, 3:9] = True
RED, BLACK, WHITE = (128, 0, 0), (0, 0, 0), (255, 255, 255)


def _painted(mode: str, below: Any, above: Any, *, palette: Any = None, second: Any = None) -> Any:
    """A mask of two values, and of a third one where `second` is given."""
    image = importlib.import_module("PIL.Image")
    kind = np.uint16 if mode == "I;16" else np.uint8
    planes = np.where(OBJECT[..., None], np.asarray(above, kind), np.asarray(below, kind)).astype(kind)
    if second is not None:
        planes[2:4, 3:9] = second
    made = image.fromarray(planes.squeeze(-1) if planes.shape[-1] == 1 else planes)
    if palette is not None:
        made = made.convert("L")
        made.putpalette([part for colour in palette for part in colour])
    return made


MASKS_OF_EVERY_KIND: dict[str, tuple[str, dict[str, Any]]] = {
    "grey": ("a.png", {"mode": "L", "below": [0], "above": [255]}),
    "dark grey on black": ("a.png", {"mode": "L", "below": [0], "above": [90]}),
    "grey, noise of JPEG": ("a.jpg", {"mode": "L", "below": [0], "above": [255], "second": 200}),
    "0 and 1": ("a.png", {"mode": "L", "below": [0], "above": [1]}),
    "class numbers": ("a.png", {"mode": "L", "below": [0], "above": [7], "second": 3}),
    "class numbers and 255": ("a.png", {"mode": "L", "below": [0], "above": [1], "second": 255}),
    "class numbers of 16 bits": ("a.png", {"mode": "I;16", "below": [0], "above": [26_001]}),
    "16 bits": ("a.png", {"mode": "I;16", "below": [0], "above": [65_535]}),
    "a dark colour of a palette": ("a.png", {"mode": "P", "below": [0], "above": [1], "palette": [BLACK, RED]}),
    "classes of a palette": (
        "a.png",
        {"mode": "P", "below": [0], "above": [1], "second": 2, "palette": [BLACK, RED, (0, 0, 64)]},
    ),
    "a palette that begins with white": ("a.png", {"mode": "P", "below": [1], "above": [0], "palette": [WHITE, BLACK]}),
    "a palette that begins with red": ("a.gif", {"mode": "P", "below": [1], "above": [0], "palette": [RED, BLACK]}),
    "colours": ("a.png", {"mode": "RGB", "below": [0, 0, 0], "above": [255, 0, 0]}),
    "the colours of JPEG": ("a.jpg", {"mode": "RGB", "below": [0, 0, 0], "above": [0, 255, 0]}),
    "white with an alpha": ("a.png", {"mode": "RGBA", "below": [0, 0, 0, 255], "above": [255, 255, 255, 255]}),
    "alpha alone": ("a.png", {"mode": "RGBA", "below": [0, 0, 0, 0], "above": [0, 0, 0, 255]}),
}


@pytest.mark.parametrize("kind", MASKS_OF_EVERY_KIND)
def test_b22_a_mask_of_every_kind_shows_the_same_object(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    name, given = MASKS_OF_EVERY_KIND[kind]
    _painted(**given).save(tmp_path / name, **({"quality": 95, "subsampling": 0} if name == "a.jpg" else {}))
    found = read_mask(tmp_path / name, 10)
    assert found.shape == (1, 10, 10)
    assert found.dtype == np.uint8
    columns = (np.arange(10) * 12 + 6) // 10
    np.testing.assert_array_equal(found[0], OBJECT[:, columns])


@pytest.mark.parametrize("values", [(0, 1), (0, 255), (0, 3), (False, True), (0.0, 1.0), (0, 1000)])
def test_b22_an_array_of_a_mask_may_hold_numbers_of_classes(values: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.where(OBJECT, values[1], values[0]))
    np.testing.assert_array_equal(read_mask(tmp_path / "a.npy", 10)[0], OBJECT[:, (np.arange(10) * 12 + 6) // 10])


def test_b22_an_empty_mask_is_empty_whatever_noise_a_lossy_file_adds(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    noise = np.random.default_rng(0).integers(0, 12, (32, 32)).astype(np.uint8)
    image.fromarray(noise).save(tmp_path / "a.jpg")
    assert not read_mask(tmp_path / "a.jpg", 16).any()


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("a.png", {"mode": "L", "below": [2], "above": [1], "second": 3}, r"a\.png holds the values 1, 2, 3 and no 0;"),
        ("a.png", {"mode": "RGB", "below": WHITE, "above": [255, 0, 0]}, r"a\.png holds colours and no black;"),
    ],
)
def test_b22_a_mask_whose_ground_cannot_be_known_is_refused(
    name: str, given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    pytest.importorskip("PIL.Image")
    _painted(**given).save(tmp_path / name)
    with pytest.raises(DataError, match=said + " expected .*ground"):
        read_mask(tmp_path / name, 10)


@pytest.mark.parametrize("value", [-1, np.nan])
def test_b22_numbers_that_no_mask_has(value: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.where(OBJECT, value, 0))
    with pytest.raises(DataError, match=r"a\.npy holds (int|float)64 values from (-1 to 0|nan to nan); expected"):
        read_mask(tmp_path / "a.npy", 10)


def test_b22_files_of_the_system_are_no_pictures(tmp_path: Path) -> None:
    own_data(tmp_path)
    for name in ("._1.npy", ".hidden.jpg"):
        (tmp_path / "images" / name).write_bytes(b"\0\5\x16\7")
    (tmp_path / "images" / "folder.png").mkdir()
    assert len(find_pictures(tmp_path).train) == 6


def test_a_picture_cut_off_in_its_middle_is_found_when_everything_is_read(tmp_path: Path) -> None:
    if not NEEDED:
        pytest.importorskip("PIL.Image")
    image = importlib.import_module("PIL.Image")
    own_data(tmp_path)
    noise = np.random.default_rng(0).integers(0, 255, (20, 20, 3)).astype(np.uint8)
    (tmp_path / "images" / "2.npy").unlink()
    path = tmp_path / "images" / "2.jpg"
    image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:-200])
    rows = Pictures(find_pictures(tmp_path).train, 16)
    (told,) = rows.problems()
    assert "2.jpg cannot be read as a picture" in told
    with pytest.raises(DataError, match=r"^\S*2\.jpg cannot be read"):
        list(DataLoader(rows, num_workers=1))


def test_what_is_kept_is_bounded_and_the_same(tmp_path: Path) -> None:
    pairs = find_pictures(own_data(tmp_path)).train
    size = 4 * 20 * 20
    some, none = Pictures(pairs, 20, cache_bytes=2 * size), Pictures(pairs, 20)
    first = [some[i] for i in range(6)]
    for path in tmp_path.glob("images/*.npy"):
        path.unlink()
    again = [some[i] for i in range(2)]
    assert all(
        torch.equal(a, b) for one, other in zip(first, again, strict=False) for a, b in zip(one, other, strict=True)
    )
    with pytest.raises(DataError, match=r"2\.npy"):
        some[2]
    with pytest.raises(DataError, match=r"0\.npy"):
        none[0]


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
        (_remove, r"2\.npy has no mask of the same name in .*masks; add the mask or remove"),
        (_shrink, r"2\.npy is 9 x 7 pixels and its mask .*2\.npz 20 x 20; expected the same size"),
        (_truncate, r"2\.npy cannot be read as an array"),
        (_flat, r"2\.npy holds an array of shape \(5,\); expected \[h, w\]"),
        (_nan, r"2\.npy holds float64 values from nan to nan; expected bytes, or finite numbers from 0 to 1"),
        (_several, r"2\.npz holds 2 arrays; expected one"),
        (_pickled, r"2\.npy cannot be read as an array: .*bjects"),
    ],
)
def test_b22_what_is_wrong_with_own_data_is_told_with_its_file(spoil: Any, said: str, tmp_path: Path) -> None:
    spoil(own_data(tmp_path))
    with pytest.raises(DataError, match=said):
        read(tmp_path, 16)


def test_b22_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a data set: expected images/ and masks/, Imgs/ and GT/, .*found"):
        find_pictures(tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        find_pictures(tmp_path / "none")
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    with pytest.raises(DataError, match=r"images holds no pictures; expected files ending in \.npy"):
        find_pictures(tmp_path)


def test_b22_own_data_is_trained_on_with_a_share_held_out(tmp_path: Path) -> None:
    given = GIVEN | {"dataset_path": str(own_data(tmp_path / "ten", 10))}
    said: list[str] = []
    result = run_recipe(load_recipe("segment"), given, run_dir=False, say=said.append)
    assert [row["num_steps"] for row in result.history] == [1, 1]
    assert result.weights_finite
    assert f"{tmp_path / 'ten'}: 8 pictures to train, 2 to validate (held out)" in said
    own_data(tmp_path / "few", 2)
    with pytest.raises(InputError, match="holds 2 pictures; expected at least 3"):
        run_recipe(load_recipe("segment"), given | {"dataset_path": str(tmp_path / "few")}, run_dir=False)


def test_b22_given_splits_are_used_and_b23_stage_2_has_batches_of_its_own(tmp_path: Path) -> None:
    given = GIVEN | {"data": str(own_data(tmp_path, 8, names=LAYOUTS["train, val and test"]))}
    given |= {"accumulation_steps": 1, "stage2_batch_size": 4}
    result = run_recipe(load_recipe("segment"), given, run_dir=False)
    assert [row["num_steps"] for row in result.history] == [4, 2]
    assert result.facts["measured on"] == "the given test split, 8 pictures"
