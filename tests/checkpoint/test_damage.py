"""Damage is named by file and tensor, whatever byte of a checkpoint it hits; the older checkpoint is still there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.lab import FILES, Gate, folder, healthy_steps, pair, refused
from tests.matrix import sampled
from trimtab.checkpoint.directory import Disk
from trimtab.checkpoint.format import container
from trimtab.core.errors import CheckpointError

__all__ = ["folder", "pair"]


@pytest.mark.parametrize("stride", sampled({"all": 1, "every 17th": 17}, ["every 17th"]))
@pytest.mark.parametrize("file", FILES)
def test_every_flipped_bit_is_found_and_named(file: str, stride: int, pair: Path) -> None:
    good = (pair / file).read_bytes()
    for number in range(0, len(good), stride):
        broken = bytearray(good)
        broken[number] ^= 1 << number % 8
        (pair / file).write_bytes(broken)
        assert [damage.file for damage in container.damage_of(pair)] == [file], number
        with pytest.raises(CheckpointError, match=rf"cannot be used: {file}: "):
            container.read(pair)
    (pair / file).write_bytes(good)
    assert healthy_steps(pair.parent) == {1: "good", 2: "good"}


def test_the_damaged_tensor_is_named(pair: Path) -> None:
    path = pair / "model.safetensors"
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    for number, name in [(3, "the header"), (header, "tensor 'layer.weight'"), (len(good) - 1, "tensor 'layer.bias'")]:
        path.write_bytes(good[:number] + bytes([good[number] ^ 1]) + good[number + 1 :])
        assert container.damage_of(pair)[0].what.startswith(f"{name} is not what was written")


@pytest.mark.parametrize("file", FILES)
def test_truncated_lengthened_and_missing_files_are_named(file: str, pair: Path) -> None:
    good = (pair / file).read_bytes()
    for length in {0, 1, 7, 8, 9, 64, len(good) // 2, len(good) - 1} - {len(good)}:
        (pair / file).write_bytes(good[:length])
        refused(pair, file)
    (pair / file).write_bytes(good + b"\0")
    refused(pair, file)
    (pair / file).unlink()
    refused(pair, file, "is missing")


def test_the_tensor_that_is_cut_off_is_named(pair: Path) -> None:
    path = pair / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(pair, "model.safetensors", r"bytes instead of \d+: tensor 'layer\.bias' is cut off")


def test_all_damage_is_told_at_once(pair: Path) -> None:
    for name in ("model.safetensors", "optimizer.safetensors"):
        (pair / name).write_bytes(b"")
    (pair / "status.json").unlink()
    assert [damage.file for damage in container.damage_of(pair)] == [
        "model.safetensors",
        "optimizer.safetensors",
        "status.json",
    ]


def test_a_file_that_must_not_be_read_is_named(pair: Path) -> None:
    """Root may read everything, so the gate refuses."""

    def closed(operation: str, path: Path, number: int) -> None:
        if operation == "open" and path.name == "model.safetensors":
            raise PermissionError(13, "Permission denied", str(path))

    disk = Disk(Gate(closed))
    assert [str(damage) for damage in container.damage_of(pair, disk=disk)] == [
        "model.safetensors: cannot be read: Permission denied"
    ]
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read: Permission denied"):
        container.read(pair, disk=disk)


def test_what_is_no_checkpoint(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        container.read(folder / "absent")
    (folder / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is no directory"):
        container.inspect(folder / "file")
    (folder / "empty").mkdir()
    assert [damage.file for damage in container.damage_of(folder / "empty")] == [
        "COMMIT",
        "manifest.json",
        "status.json",
    ]
