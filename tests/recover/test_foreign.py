"""Checkpoints of others are read without executing anything, or refused with the reason."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trimtab.core.errors import CheckpointError
from trimtab.recover.foreign import load_foreign

STATE = {"model": OrderedDict(w=torch.arange(6.0).reshape(2, 3)), "epoch": 3, "best": 0.5, "args": {"lr": 1e-3}}


class Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "pytorch_model.bin", "a.ckpt", "A.PT"])
def test_b18_torch_files_are_read(name: str, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / name)
    loaded = load_foreign(tmp_path / name)
    assert torch.equal(loaded["model"]["w"], STATE["model"]["w"])  # type: ignore[index]
    assert {key: loaded[key] for key in ("epoch", "best", "args")} == {"epoch": 3, "best": 0.5, "args": {"lr": 1e-3}}


def test_old_torch_files_are_read(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    assert load_foreign(str(tmp_path / "a.pth"))["epoch"] == 3


def test_safetensors_are_read(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    assert torch.equal(load_foreign(tmp_path / "a.safetensors")["w"], torch.ones(2))


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_is_not_run(zipped: bool, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    torch.save({"w": torch.ones(2), "evil": Payload(marker)}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    (tmp_path / "b.bin").write_bytes(pickle.dumps(Payload(marker)))
    for name in ("a.pt", "b.bin"):
        with pytest.raises(CheckpointError, match=rf"{name} .*(it is not read|cannot be read)"):
            load_foreign(tmp_path / name)
    assert not marker.exists()


def test_a_whole_module_is_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"more than tensors and plain data.*save the state_dict\(\)"):
        load_foreign(tmp_path / "a.pt")


def test_torn_files_are_refused(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    for name in ("a.pt", "a.safetensors"):
        data = (tmp_path / name).read_bytes()
        for length in (0, 1, 5, 9, len(data) // 2, len(data) - 1):
            (tmp_path / name).write_bytes(data[:length])
            with pytest.raises(CheckpointError, match=rf"{name} .*use another copy|more than tensors"):
                load_foreign(tmp_path / name)


def test_absurd_headers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for length in (2**63, 2**40, 200 << 20):
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(CheckpointError, match="not a sound safetensors file"):
            load_foreign(path)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(3))
    with pytest.raises(CheckpointError, match=r"no checkpoint by its name.*\.safetensors"):
        load_foreign(tmp_path / "a.pkl")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_foreign(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="is a directory"):
        load_foreign(tmp_path)
