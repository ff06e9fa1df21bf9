"""One checkpoint under a name of its own, replaced while the disk fails or was left in disorder."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.matrix import sampled
from trimtab import CheckpointError
from trimtab.checkpoint.directory import Disk
from trimtab.checkpoint.format import container
from trimtab.checkpoint.format.manifest import Damage
from trimtab.compat.checkpoint_pair import read_checkpoint


def weights(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((3,), value)}}


def value_at(path: Path) -> float:
    return float(read_checkpoint(path)["model_state_dict"]["w"][0])


def save(path: Path, value: float, disk: Disk | None = None) -> None:
    container.replace_with(path, weights(value), step=1, meta={}, **({} if disk is None else {"disk": disk}))


def failing(at: int, code: int) -> tuple[Disk, list[str]]:
    """A disk whose operation number `at` fails once."""
    told: list[str] = []

    def gate(operation: str, path: Path) -> None:
        told.append(operation)
        if len(told) == at + 1:
            raise OSError(code, os.strerror(code), str(path))

    return Disk(gate), told


@pytest.mark.parametrize("code", sampled({"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EACCES": errno.EACCES}, "ENOSPC"))
def test_d8_any_operation_may_fail_and_there_is_a_whole_one(tmp_path: Path, code: int) -> None:
    """After an error the earlier one is there under its name; where the new one had it already, the new one is."""
    raised = 0
    for number in range(200):
        place = tmp_path / str(number) / "best"
        save(place, 1.0)
        disk, told = failing(number, code)
        try:
            save(place, 2.0, disk)
            expected = 2.0
        except CheckpointError:
            expected, raised = 1.0, raised + 1
        if len(told) <= number:
            break
        found = value_at(place)
        assert found == expected or (expected == 1.0 and found == 2.0 and told[number] == "sync_dir"), told[number]
        save(place, 3.0)
        assert value_at(place) == 3.0
        assert [name for name in os.listdir(place.parent) if not name.startswith(".tmp")] == ["best"]
    else:
        pytest.fail("a save never ended")
    assert raised > 15


def damage(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")


@pytest.mark.parametrize("beside", ["best~new", "best~old"])
def test_a_damaged_one_gives_way_to_the_sound_one_beside_it(
    tmp_path: Path, beside: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "best"
    save(place, 1.0)
    save(tmp_path / beside, 2.0)
    damage(place)
    assert value_at(place) == 2.0
    assert "model.safetensors" in caplog.text
    container.settle(place)
    assert value_at(place) == 2.0
    assert sorted(os.listdir(tmp_path)) == ["best", "quarantine"]


def test_where_all_are_damaged_a_new_one_is_saved_all_the_same(tmp_path: Path) -> None:
    place = tmp_path / "best"
    for name, value in (("best", 1.0), ("best~new", 2.0), ("best~old", 3.0)):
        save(tmp_path / name, value)
        damage(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_checkpoint(place)
    save(place, 4.0)
    assert value_at(place) == 4.0
    assert sorted(os.listdir(tmp_path)) == ["best", "quarantine"]


def test_a_finished_save_whose_old_one_was_left_behind(tmp_path: Path) -> None:
    place = tmp_path / "best"
    save(place, 2.0)
    save(tmp_path / "best~old", 1.0)
    assert value_at(place) == 2.0
    save(place, 3.0)
    assert value_at(place) == 3.0
    assert os.listdir(tmp_path) == ["best"]


def test_what_cannot_be_read_again_does_not_take_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "best"
    save(place, 1.0)
    found = (Damage(file="model.safetensors", what="is not what was written"),)
    monkeypatch.setattr(container, "damage_of", lambda path, **options: found)
    with pytest.raises(CheckpointError, match=r"read again.*model\.safetensors"):
        save(place, 2.0)
    assert value_at(place) == 1.0
    assert os.listdir(tmp_path) == ["best"]


def test_an_old_one_that_cannot_be_deleted_does_not_make_the_save_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "best"
    save(place, 1.0)

    def refuse(path: Path, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(container, "remove", refuse)
        save(place, 2.0)
    assert "best~old could not be deleted" in caplog.text
    assert value_at(place) == 2.0
    save(place, 3.0)
    assert os.listdir(tmp_path) == ["best"]
