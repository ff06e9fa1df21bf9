"""A `Checkpointer` on a disk that fails, in a folder that cannot be written to, on files that changed: one error."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.lab import GROWS, Gate, fail_at, folder
from tests.checkpoint.test_lock import in_child
from tests.matrix import FULL, sampled
from trimtab import Checkpointer, CheckpointError, Guard
from trimtab.checkpoint import directory
from trimtab.checkpoint.directory import DISK
from trimtab.checkpoint.format import container
from trimtab.checkpoint.inspect import difference, find, sheet_of, survey
from trimtab.checkpoint.lock import LOCK
from trimtab.checkpoint.retention import Retention, carry_out, plan
from trimtab.compat import checkpoint_pair as documented

__all__ = ["folder"]


def model_of(value: float) -> nn.Module:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, value)
    return model


def value_of(model: nn.Module) -> float:
    return next(model.parameters())[0, 0].item()


@pytest.fixture
def three(folder: Path) -> Path:
    with Checkpointer(folder, keep_last=3, quiet_steps=1000) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, model=model_of(float(step)))
    return folder


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Callable[[Gate | None], None]:
    return lambda gate: monkeypatch.setattr(DISK, "_gate", gate)


# -- a disk that fails ------------------------------------------------------------------------------------------------


def a_life(folder: Path) -> None:
    """Everything that a run does with its checkpoints."""
    with Checkpointer(folder, keep_last=2, quiet_steps=10) as ckpt:
        ckpt.resume(model=model_of(0.0))
        for step in (11, 30):
            ckpt.save(step, model=model_of(float(step)))
        ckpt.condemn(30, "trouble")
        ckpt.save(31, model=model_of(float("nan")))
        ckpt.verify(11)
        ckpt.prune()
        ckpt.discard_bad()
        ckpt.list()


FAILURES = {
    f"{errno.errorcode[code]} {'from then on' if onwards else 'once'}, {often}": (code, onwards, stride)
    for code in (errno.EIO, errno.EACCES, errno.ENOSPC)
    for onwards in (True, False)
    for often, stride in (("all", 3 if onwards else 1), ("every 13th", 13))
}


@pytest.mark.parametrize(
    ("code", "onwards", "stride"),
    sampled(FAILURES, ["EIO once, every 13th", "ENOSPC from then on, every 13th"], others=FULL),
)
def test_whatever_operation_fails_the_error_is_ours(
    three: Path, code: int, onwards: bool, stride: int, gate: Callable[[Gate | None], None]
) -> None:
    seen, copies = Gate(), three / "copies"
    original = [path for path in three.iterdir() if path.is_dir()]
    for path in original:
        shutil.copytree(path, copies / "count" / path.name)
    gate(seen)
    a_life(copies / "count")
    raw: list[object] = []
    failed = 0
    for number in range(0, len(seen.log), stride):
        gate(None)
        here = copies / str(number)
        for path in original:
            shutil.copytree(path, here / path.name)
        gate(fail_at(number, code, onwards=onwards))
        try:
            a_life(here)
        except CheckpointError:
            failed += 1
        except Exception as error:
            raw.append((number, seen.log[number], error))
        gate(None)
        model = model_of(-1.0)
        found = Checkpointer(here).resume(model=model)
        assert found is not None  # whatever happened, there is one to go on from
        assert value_of(model) == float(found.step)
        shutil.rmtree(here)
    assert raw == []
    assert failed


def test_what_cannot_be_deleted_costs_a_warning_and_not_the_save(
    three: Path, gate: Callable[[Gate | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    def stuck(operation: str, path: Path, number: int) -> None:
        if operation in ("unlink", "rmdir") or (operation == "rename" and path.name.startswith(".tmp-")):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    with Checkpointer(three, keep_last=1, quiet_steps=1000) as ckpt:
        ckpt.resume(model=model_of(0.0))
        gate(Gate(stuck))
        for step in (4, 5):
            with caplog.at_level(logging.WARNING, "trimtab"):
                saved = ckpt.save(step, model=model_of(float(step)))
            assert saved.state == "candidate"
            assert ckpt.verify(step)
        assert [s.step for s in ckpt.list()] == [1, 2, 3, 4, 5]
        told = [r.getMessage() for r in caplog.records]
        assert len(told) == 4  # each of the four that should be gone is told once
        assert all("could not be deleted, and stays" in line and "not permitted" in line for line in told)
        gate(None)
        ckpt.save(6, model=model_of(6.0))
        assert [s.step for s in ckpt.list()] == [6]


@pytest.mark.parametrize("operation", ["names", "open", "read", "create", "replace"])
def test_looking_after_older_ones_never_fails_a_save(
    three: Path, gate: Callable[[Gate | None], None], operation: str
) -> None:
    """From the moment that it is durable."""
    with Checkpointer(three, keep_last=1, quiet_steps=1) as ckpt:
        ckpt.resume(model=model_of(0.0))
        ckpt.save(4, model=model_of(4.0))
        durable = [False]

        def act(what: str, path: Path, number: int) -> None:
            durable[0] = durable[0] or (what == "rename" and path.name == "step-00000050")
            synced = durable[0] and not (what == "sync_dir" and path == three)
            if synced and what == operation:
                raise OSError(errno.EIO, "Input/output error", str(path))

        gate(Gate(act))
        saved = ckpt.save(50, model=model_of(50.0))
        gate(None)
        assert saved.step == 50
        assert ckpt.verify(50)


def test_a_metric_and_a_part_that_make_no_sense(folder: Path) -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("lost")

    ckpt = Checkpointer(folder)
    for given, told in (
        ({"metrics": {"loss": "high"}}, "ValueError: could not convert"),
        ({"metrics": {"loss": object()}}, "TypeError"),
        ({"scheduler": Broken()}, "KeyError: 'lost'"),
        ({"extra": {"x": object()}}, "extra.x is a object: it cannot be stored"),
        ({"extra": {"x": 2 * 10**6 * [[]]}}, "belong into tensors"),
    ):
        with pytest.raises(CheckpointError, match=told):
            ckpt.save(1, model=model_of(1.0), **given)  # type: ignore[arg-type]
    assert ckpt.list() == []
    for bad in (3, None, "a\0b", b"x"):
        with pytest.raises(CheckpointError, match="the folder for checkpoints is"):
            Checkpointer(bad)  # type: ignore[arg-type]
    for how in ({"keep_last": 1.5}, {"keep_every": 0}, {"max_bytes": -1}, {"keep_last": None}, {"keep_last": True}):
        with pytest.raises(CheckpointError, match=r"keep_last|keep_every|max_bytes"):
            Checkpointer(folder, **how)  # type: ignore[arg-type]


# -- a folder that can only be read -----------------------------------------------------------------------------------


def read_everything(folder: Path) -> None:
    ckpt = Checkpointer(folder)
    assert [s.step for s in ckpt.list()] == [1, 2, 3]
    assert ckpt.verify(2)
    model = model_of(0.0)
    found = ckpt.resume(model=model)
    assert found is not None
    assert (found.step, value_of(model)) == (3, 3.0)
    assert len(survey(folder)) == 3
    assert sheet_of(find(folder, 2)).sections
    a, b = (container.read(find(folder, step)).sections for step in (1, 2))
    assert difference(a, b).tensors
    assert documented.read_checkpoint(folder / "step-00000002")["step"] == 2
    assert documented.load_checkpoint(folder / "step-00000002", model)


@pytest.fixture
def read_only(three: Path, gate: Callable[[Gate | None], None]) -> Path:
    """As on a file system that is mounted read-only."""

    def refuse(operation: str, path: Path, number: int) -> None:
        if operation in (*GROWS, "unlink", "rmdir"):
            raise OSError(errno.EROFS, "Read-only file system", str(path))

    gate(Gate(refuse))
    return three


def test_a_folder_that_can_only_be_read_is_read(read_only: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = sorted((p, p.stat().st_mtime_ns) for p in read_only.rglob("*"))
    read_everything(read_only)
    assert caplog.text.count("can be read, but none can be saved there: ") == 1
    assert "Read-only file system" in caplog.text
    assert sorted((p, p.stat().st_mtime_ns) for p in read_only.rglob("*")) == before


def test_saving_there_is_an_error_at_once(read_only: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Read-only file system.*choose another directory"):
        Checkpointer(read_only).save(4, model=model_of(4.0))
    with pytest.raises(CheckpointError, match="Read-only file system"):
        Checkpointer(read_only).prune()
    with pytest.raises(CheckpointError, match="Read-only file system"):
        Checkpointer(read_only / "new")
    model = model_of(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # nothing is left attached by the first
        with pytest.raises(CheckpointError, match="Read-only file system"):
            Guard(model, optimizer, run_dir=False, checkpoint=read_only)


def test_one_that_is_writable_again_is_written_to(
    three: Path, gate: Callable[[Gate | None], None], read_only: Path
) -> None:
    ckpt = Checkpointer(three)
    gate(None)
    ckpt.save(4, model=model_of(4.0))
    assert [s.step for s in ckpt.list()][-1] == 4


@pytest.mark.skipif(os.name == "nt", reason="there are no such permissions")
def test_a_folder_of_somebody_else(three: Path) -> None:
    """For real, as a user who may only read it."""
    for path in (three, *three.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)

    def other_user(body: Callable[[], object]) -> Callable[[], object]:
        def act() -> None:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            body()

        return act

    try:
        assert in_child(other_user(lambda: read_everything(three))) == ""
        said = in_child(other_user(lambda: Checkpointer(three).save(4, model=model_of(4.0))))
        assert said.startswith("CheckpointError: ")
        assert "Permission denied" in said
        three.chmod(0)
        for body in (
            lambda: Checkpointer(three).list(),
            lambda: directory.entries(three),
            lambda: survey(three),
            lambda: find(three / "1"),
        ):
            assert in_child(other_user(body)).startswith("CheckpointError: ")
    finally:
        three.chmod(stat.S_IRWXU)
        for path in three.rglob("*"):
            path.chmod(stat.S_IRWXU)


# -- files that changed -----------------------------------------------------------------------------------------------


def bytes_of(folder: Path, per_file: int) -> Iterator[tuple[Path, int]]:
    """Bytes all over every file; 60 of them hit each of its parts."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        size = path.stat().st_size
        yield from ((path, at) for at in range(0, size, max(size // per_file, 1)))


@pytest.mark.parametrize("per_file", sampled({"60": 60, "7": 7}, "7", others=FULL))
def test_no_changed_byte_makes_a_condemned_checkpoint_eligible(folder: Path, per_file: int) -> None:
    """In any file of the folder, quarantine and lock included."""
    with Checkpointer(folder, quiet_steps=1) as ckpt:
        ckpt.save(1, model=model_of(1.0))
        ckpt.quiet(5)
        ckpt.save(6, model=model_of(6.0))
        ckpt.condemn(6, "trouble")
        ckpt.save(7, model=model_of(float("nan")))
    assert (folder / LOCK).exists()
    for path, at in bytes_of(folder, per_file):
        good = path.read_bytes()
        for bit in (1, 0xFF):
            path.write_bytes(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
            model = model_of(-1.0)
            found = Checkpointer(folder).resume(model=model)
            if found is None:
                assert path.parent.name == "step-00000001", path
                assert value_of(model) == -1.0
            else:
                assert (found.step, value_of(model)) == (1, 1.0), (path, at)
        path.write_bytes(good)


@pytest.mark.parametrize("left", [None, b"", b"garbage"])
def test_a_checkpoint_whose_status_is_lost_is_kept_told_and_taken_only_if_asked_for(
    three: Path, left: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    def lose(step: int) -> None:
        file = three / directory.name_of(step) / "status.json"
        file.unlink() if left is None else file.write_bytes(left)

    lose(3)
    model = model_of(0.0)
    with caplog.at_level(logging.WARNING, "trimtab"):
        assert Checkpointer(three).resume(model=model).step == 2  # type: ignore[union-attr]
    assert "step-00000003 is not used: status.json" in caplog.text
    lose(1)
    lose(2)
    caplog.clear()
    assert Checkpointer(three).resume(model=model) is None
    for step in (1, 2, 3):
        assert f"resume(step={step}) takes it anyway" in caplog.text
        assert Checkpointer(three).resume(step=step, model=model).step == step  # type: ignore[union-attr]
        assert value_of(model) == float(step)
    with Checkpointer(three, keep_last=1) as ckpt:
        ckpt.resume(step=3, model=model)
        ckpt.save(4, model=model_of(4.0))
        assert [s.step for s in ckpt.list()] == [1, 2, 3, 4]  # what nobody can judge is not deleted by the way
    done = plan(survey(three), Retention(keep_last=1), bad=True)
    assert carry_out(done) == []
    assert done.delete == ()


def test_one_that_vanishes_while_it_is_read_is_replaced_by_a_newer_one(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process saves and deletes: what was listed is gone, and there is something newer."""
    read, done = container.read, []

    def racing(path: Path, **how: Any) -> Any:
        if not done:
            done.append(True)
            with Checkpointer(three, keep_last=1) as ckpt:
                ckpt.resume(step=1, model=model_of(0.0))
                for step in (8, 9):
                    ckpt.save(step, model=model_of(float(step)))
        return read(path, **how)

    monkeypatch.setattr(container, "read", racing)
    reader, model = Checkpointer(three), model_of(0.0)
    found = reader.resume(model=model)
    assert found is not None
    assert (found.step, value_of(model)) == (9, 9.0)


def test_links_are_deleted_and_not_followed(three: Path, tmp_path: Path) -> None:
    """What a link in the folder leads to belongs to somebody else."""
    shutil.copytree(three / "step-00000001", tmp_path / "elsewhere")
    shutil.rmtree(three / "step-00000001")
    (three / "step-00000001").symlink_to(tmp_path / "elsewhere")
    with Checkpointer(three, keep_last=1, quiet_steps=1000) as ckpt:
        assert ckpt.resume(step=1, model=model_of(0.0)) is not None
        ckpt.save(4, model=model_of(4.0))
        assert [s.step for s in ckpt.list()] == [4]
    assert not (three / "step-00000001").is_symlink()
    assert container.damage_of(tmp_path / "elsewhere") == ()
