"""A checkpoint as files: readable by others, damage named by file and tensor, hostile ones refused unexecuted."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.checkpoint.lab import FILES, Gate, fail_at, folder, healthy_steps, leftovers, pair, save, sections_of
from tests.matrix import FULL, sampled
from trimtab.checkpoint import directory
from trimtab.checkpoint.directory import HOST, Disk
from trimtab.checkpoint.format import container
from trimtab.checkpoint.format.manifest import Status
from trimtab.core.errors import CheckpointError, InputError

__all__ = ["folder", "pair"]


def test_d8_everything_comes_back(folder: Path) -> None:
    meta = {"metrics": {"loss": float("inf")}, "versions": ("2.13", 3), 5: None}
    sections = sections_of(7) | {"empty": {}, "scalar": 3, "none": None}
    written = container.write(
        folder / "a" / "b", "step-00000007", sections, step=7, branch=2, meta=meta, status="bad", reason="é"
    )
    for verify in (True, False):
        contents = container.read(written.path, verify=verify)
        assert list(contents.sections) == list(sections)
        assert contents.sections["scalar"] == 3
        assert contents.sections["optimizer"]["state"][0]["step"] == torch.tensor(7.0)
        assert contents.manifest.meta == meta
        assert (contents.manifest.step, contents.manifest.branch, contents.manifest.digest) == (7, 2, written.digest)
        assert (contents.status.state, contents.status.reason) == ("bad", "é")
    assert written.num_bytes == directory.size_of(written.path) - sum(
        (written.path / name).stat().st_size for name in ("COMMIT", "status.json")
    )
    assert container.damage_of(written.path) == ()
    assert container.inspect(written.path).num_bytes == contents.manifest.num_bytes > 0
    assert hashlib.sha256((written.path / "manifest.json").read_bytes()).hexdigest() == written.digest


def test_only_the_wanted_sections_are_read(pair: Path) -> None:
    (pair / "optimizer.safetensors").write_bytes(bytes((pair / "optimizer.safetensors").stat().st_size))
    assert list(container.read(pair, sections=["model", "loader"]).sections) == ["model", "loader"]
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        container.read(pair, sections=["optimizer"])
    with pytest.raises(CheckpointError, match="no section 'ema'; it has model, optimizer, loader"):
        container.read(pair, sections=["ema"])


def test_any_reader_of_safetensors_opens_the_files(folder: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    extra = {"double": torch.ones(3, dtype=torch.float64), "flag": torch.tensor(True), "none": torch.zeros(0, 2)}
    path = container.write(folder, "step-00000001", {"model": model.state_dict() | extra}, step=1).path
    theirs = load_file(path / "model.safetensors")
    assert theirs.keys() == {*model.state_dict(), *extra}
    for key, value in {**model.state_dict(), **extra}.items():
        assert torch.equal(theirs[key], value)
    with safe_open(path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    fresh = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    fresh.load_state_dict({key: theirs[key] for key in model.state_dict()})


def test_what_is_read_may_be_changed_and_the_file_is_not(pair: Path) -> None:
    for verify in (True, False):
        contents = container.read(pair, verify=verify)
        contents.sections["model"]["layer.weight"].fill_(3.0)
    assert healthy_steps(pair.parent) == {1: "good", 2: "good"}


def test_what_was_read_outlives_the_files(pair: Path) -> None:
    weight = container.read(pair, verify=False).sections["model"]["layer.weight"]
    directory.remove(pair)
    assert torch.equal(weight, sections_of(2)["model"]["layer.weight"])  # type: ignore[index]


def test_many_small_and_large_tensors_in_one_file(folder: Path) -> None:
    state = {f"t{i}": torch.full((1 + i * 37,), float(i)) for i in range(300)} | {"large": torch.arange(700_000)}
    path = container.write(folder, "step-00000001", {"model": state}, step=1).path
    assert container.damage_of(path) == ()
    back = container.read(path).sections["model"]
    assert all(torch.equal(back[key], value) for key, value in state.items())
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-5] ^= 4
    (path / "model.safetensors").write_bytes(data)
    assert "tensor 't299'" in container.damage_of(path)[0].what


def test_numeric_order_and_names(folder: Path) -> None:
    for name in ("step-00000999", "step-100000000", "step-00001000", "step-00000010-b2", ".tmp-x", "step-x", "other"):
        (folder / name).mkdir()
    (folder / "step-00000005").write_text("a file")
    assert [entry[:2] for entry in directory.entries(folder)] == [(999, 0), (1000, 0), (100_000_000, 0), (10, 2)]
    assert directory.entries(folder / "absent") == []
    assert directory.step_of(directory.name_of(12, 3)) == (12, 3)
    with pytest.raises(CheckpointError, match="no name of a checkpoint"):
        directory.step_of("epoch-3")


def test_a_name_is_used_once(pair: Path) -> None:
    before = container.inspect(pair).digest
    with pytest.raises(CheckpointError, match=rf"written by pid {os.getpid()} on .*nothing was changed"):
        save(pair.parent, 2)
    assert container.inspect(pair).digest == before


def test_a_damaged_one_makes_way(pair: Path, caplog: pytest.LogCaptureFixture) -> None:
    (pair / "COMMIT").unlink()
    with caplog.at_level(logging.WARNING):
        save(pair.parent, 2)
        (pair / "COMMIT").unlink()
        save(pair.parent, 2)
    assert "COMMIT: is missing" in caplog.text
    assert set(healthy_steps(pair.parent)) == {1, 2}
    assert sorted(os.listdir(pair.parent / "quarantine")) == ["step-00000002", "step-00000002~2"]
    assert [entry.step for entry in directory.entries(pair.parent / "quarantine")] == [2, 2]


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "/tmp/x"])
def test_names_stay_inside(name: str, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="no name for a checkpoint"):
        container.write(folder / "run", name, {}, step=1)
    assert os.listdir(folder) == []


def test_wrong_arguments_change_nothing(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"section '\.\./x'"):
        container.write(folder / "run", "step-00000001", {"../x": 1}, step=1)
    with pytest.raises(CheckpointError, match=r"model\.a is a object"):
        container.write(folder / "run", "step-00000001", {"model": {"a": object()}}, step=1)
    with pytest.raises(CheckpointError, match=r"meta.*belong into a section"):
        container.write(folder / "run", "step-00000001", {}, step=1, meta={"x": torch.ones(1)})
    with pytest.raises(InputError, match="one of candidate, good, bad; 'fine' was given"):
        container.write(folder / "run", "step-00000001", {}, step=1, status="fine")
    assert os.listdir(folder) == []


def test_a_list_that_belongs_into_a_tensor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.checkpoint.format.manifest.MAX_JSON", 10_000)
    with pytest.raises(CheckpointError, match="belong into tensors"):
        container.write(folder, "step-00000001", {"a": list(range(10_000))}, step=1)
    assert os.listdir(folder) == []


# --- status


@pytest.mark.parametrize("stride", sampled({"all": 1, "every 17th": 17}, ["every 17th"], others=FULL))
@pytest.mark.parametrize("state", ["candidate", "good", "bad"])
def test_no_flipped_bit_changes_what_is_thought_of_a_checkpoint(state: str, stride: int, pair: Path) -> None:
    """Each bit of the file, one at a time: either copy proves what was written, and the damage is told."""
    container.set_status(pair, state, "loss is NaN")
    file = pair / "status.json"
    assert sorted(os.listdir(pair)) == sorted([*FILES, "status.json"])
    good = file.read_bytes()
    for bit in range(0, len(good) * 8, stride):
        broken = bytearray(good)
        broken[bit // 8] ^= 1 << bit % 8
        file.write_bytes(broken)
        assert container.get_status(pair) == Status(state=state, reason="loss is NaN"), broken
        assert [damage.file for damage in container.damage_of(pair)] == ["status.json"]
    file.write_bytes(good)
    assert container.damage_of(pair) == ()


@pytest.mark.parametrize("left", [b"", b"{}", b"\0" * 400, b"[" * 1000, b'{"state": "good", "reason": ""}\n' * 2, None])
def test_a_status_that_is_lost_makes_a_checkpoint_one_that_is_not_trusted(left: bytes | None, pair: Path) -> None:
    container.set_status(pair, "bad", "loss is NaN")
    file = pair / "status.json"
    if left is None:
        file.unlink()
    else:
        file.write_bytes(left)
    status = container.read(pair).status
    assert (status.state, status.known) == ("bad", False)
    assert "whether it was condemned is not known" in status.reason
    container.set_status(pair, "good")
    assert container.damage_of(pair) == ()
    with pytest.raises(InputError, match="'great' was given"):
        container.set_status(pair, "great")


def test_copies_of_a_status_that_contradict_each_other(pair: Path) -> None:
    """Nothing of ours writes such a file: the copy that trusts the checkpoint least counts."""
    lines = {}
    for state in ("good", "candidate", "bad"):
        container.set_status(pair, state, state)
        lines[state] = (pair / "status.json").read_bytes().splitlines(keepends=True)[0]
    for first, second, counts in (("good", "bad", "bad"), ("bad", "good", "bad"), ("good", "candidate", "candidate")):
        (pair / "status.json").write_bytes(lines[first] + lines[second])
        assert container.get_status(pair).state == counts
        assert "one of its two copies" in container.damage_of(pair)[0].what


def test_the_status_of_earlier_versions_is_read(pair: Path) -> None:
    """trimtab 0.1.0 wrote one line."""
    container.set_status(pair, "good", "20 quiet steps")
    file = pair / "status.json"
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
    assert container.get_status(pair) == Status(state="good", reason="20 quiet steps")
    assert container.damage_of(pair) == ()


def test_a_status_that_cannot_be_written_stays(pair: Path) -> None:
    gate = Gate()
    container.set_status(pair, "good", disk=Disk(gate))
    for number in range(len(gate.log) - 1):
        with pytest.raises(CheckpointError, match="could not be marked bad: Input/output error"):
            container.set_status(pair, "bad", disk=Disk(fail_at(number, 5)))
        assert container.get_status(pair).state == "good"
        assert sorted(os.listdir(pair)) == sorted([*FILES, "status.json"])


# --- leftovers


def broken(path: Path, *operations: str) -> Disk:
    """A disk on which these operations fail, but for `path` itself."""

    def act(operation: str, at: Path, number: int) -> None:
        if operation in operations and at != path:
            raise OSError(5, "Input/output error", str(at))

    return Disk(Gate(act))


def test_a_failed_save_whose_files_cannot_be_deleted_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CheckpointError, match="could not be saved: Input/output error"):
        save(folder, 1, disk=broken(folder, "fsync", "unlink"))
    (left,) = leftovers(folder)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "is left behind by a write that failed" in line
    assert left in line


def test_a_save_that_may_be_lost_but_keeps_its_name_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def act(operation: str, path: Path, number: int) -> None:
        if (operation, path) == ("sync_dir", folder) or (operation == "rename" and path.name.startswith(".tmp")):
            raise OSError(5, "Input/output error", str(path))

    with pytest.raises(CheckpointError, match="could not be saved: Input/output error"):
        save(folder, 1, disk=Disk(Gate(act)))
    assert any("step-00000001 is left behind" in record.getMessage() for record in caplog.records)


def test_a_status_file_that_is_left_behind_is_warned_about(pair: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CheckpointError, match="could not be marked good"):
        container.set_status(pair, "good", disk=broken(pair, "replace", "unlink"))
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert ".status.json-" in line
    assert "is left behind" in line


def temporary(folder: Path, host: str, pid: int) -> Path:
    path = folder / f".tmp-{host}-{pid}-0123abcd-step-00000009"
    path.mkdir()
    (path / "x").write_text("x")
    return path


def test_leftovers_of_the_dead_are_removed_and_of_others_kept(folder: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale = [temporary(folder, HOST, dead.pid), temporary(folder, HOST, os.getpid())]
    (folder / "quarantine").mkdir()
    stale.append(temporary(folder / "quarantine", HOST, dead.pid))
    kept = [temporary(folder, "elsewhere", dead.pid), temporary(folder, HOST, 1), folder / ".tmp-mine"]
    kept[2].mkdir()
    assert sorted(directory.clean(folder)) == sorted(stale)
    assert not any(path.exists() for path in stale)
    assert all(path.exists() for path in kept)
    assert directory.entries(folder) == []
    assert directory.clean(folder / "absent") == []


def test_a_save_in_progress_is_not_cleaned_away(folder: Path) -> None:
    tried = []

    def clean(operation: str, path: Path, number: int) -> None:
        if operation == "fsync":
            tried.append(directory.clean(folder))

    save(folder, 3, Disk(Gate(clean)))
    assert tried == [[]] * len(tried) != []
    assert healthy_steps(folder) == {3: "candidate"}


def test_every_file_and_name_of_a_save_is_synced_by_the_system(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.fstat(fd).st_ino))
    path = save(folder, 3)
    assert {one.stat().st_ino for one in (folder, path, *path.iterdir())} <= synced


def test_a_lock_protects_what_seems_to_be_of_the_dead(folder: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    path = temporary(folder, HOST, dead.pid)
    held = Disk().lock(path)
    assert held is not None
    assert directory.clean(folder) == []
    os.close(held)
    assert directory.clean(folder) == [path]


def test_prepare_makes_tries_and_cleans(folder: Path) -> None:
    directory.prepare(folder / "a" / "b")
    assert os.listdir(folder / "a" / "b") == []
    temporary(folder / "a" / "b", HOST, os.getpid())
    directory.prepare(folder / "a" / "b")
    assert leftovers(folder / "a" / "b") == []
    (folder / "file").write_text("x")
    with pytest.raises(CheckpointError, match="could not be saved"):
        directory.prepare(folder / "file" / "c")


def test_remove_and_quarantine(pair: Path) -> None:
    moved = directory.quarantine(pair)
    assert moved == pair.parent / "quarantine" / pair.name
    assert container.read(moved).manifest.step == 2
    directory.remove(moved)
    assert os.listdir(moved.parent) == []
    assert directory.size_of(moved) == 0
