"""One writer per folder: a second one is refused and told who the first is, and a crash leaves the folder free."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint.lab import folder
from trimtab import Checkpointer, CheckpointError, Guard
from trimtab.checkpoint import lock
from trimtab.checkpoint.lock import LOCK, FolderLock, writer_of

__all__ = ["folder"]

MODEL = nn.Linear(2, 1)


@contextmanager
def child(body: Callable[[], None]) -> Iterator[int]:
    """A forked process that runs `body`, says so, and lives until it is ended here."""
    ready, told = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks; the child only writes files
        pid = os.fork()
    if pid == 0:
        try:
            body()
            os.write(told, b"+")
            time.sleep(600)
        except BaseException as error:
            os.write(told, b"-" + str(error).encode())
        finally:
            os._exit(0)
    os.close(told)
    try:
        answer = os.read(ready, 10_000).decode()
        assert answer == "+", answer
        yield pid
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def in_child(body: Callable[[], object]) -> str:
    """What `body` raises in a forked process; empty where it raises nothing."""
    ready, told = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException as error:
            os.write(told, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(told)
    with os.fdopen(ready, "rb") as answer:
        said = answer.read().decode()
    os.waitpid(pid, 0)
    return said


def save(folder: Path, step: int = 1) -> Checkpointer:
    ckpt = Checkpointer(folder)
    ckpt.save(step, model=MODEL)
    return ckpt


# -- across processes --------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_and_told_who_writes(folder: Path) -> None:
    kept: list[Checkpointer] = []
    with child(lambda: kept.append(save(folder))) as pid:
        before = sorted(p.name for p in folder.iterdir())
        with pytest.raises(CheckpointError) as told:
            save(folder, 2)
        (snapshot,) = Checkpointer(folder).list()
        text = str(told.value)
        assert f"pid {pid} on {re.sub('[^A-Za-z0-9_.]', '_', socket.gethostname())}, since " in text
        assert f"run {snapshot.run}" in text
        assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+00:00", text)
        assert "give this run another folder" in text
        assert sorted(p.name for p in folder.iterdir()) == before
    save(folder, 2)  # it was killed: nothing is left that somebody would have to clear
    assert [s.step for s in Checkpointer(folder).list()] == [1, 2]


def test_reading_needs_no_lock(folder: Path) -> None:
    kept: list[Checkpointer] = []
    with child(lambda: kept.append(save(folder))):
        reader = Checkpointer(folder)
        assert [s.step for s in reader.list()] == [1]
        assert reader.verify(1)
        assert reader.resume(model=nn.Linear(2, 1)) is not None
        with pytest.raises(CheckpointError, match="in use by another run"):
            reader.prune()


def test_only_the_process_that_took_it_has_it_after_a_fork(folder: Path) -> None:
    ckpt = save(folder)
    said = in_child(lambda: ckpt.save(2, model=MODEL))
    assert said.startswith(f"CheckpointError: checkpoints cannot be saved to {folder}: it is in use by another run")
    assert f"pid {os.getpid()} " in said
    ckpt.save(3, model=MODEL)
    assert [s.step for s in ckpt.list()] == [1, 3]
    assert "in use by" in in_child(lambda: save(folder, 4))  # the end of a child frees nothing
    ckpt.close()
    assert in_child(lambda: ckpt.save(5, model=MODEL)) == ""


def test_workers_that_outlive_a_killed_run_do_not_hold_its_folder(folder: Path) -> None:
    """Data loaders fork workers, which notice the death of their parent seconds later."""
    script = textwrap.dedent(
        """
        import os, signal, sys, time, warnings
        warnings.simplefilter("ignore")
        from torch import nn
        from trimtab import Checkpointer
        ckpt = Checkpointer(sys.argv[1])
        ckpt.save(1, model=nn.Linear(2, 1))
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    command = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        worker = int(run.stdout.readline())
        run.wait(60)
        try:
            assert run.returncode == -signal.SIGKILL
            save(folder, 2)
        finally:
            os.kill(worker, signal.SIGKILL)
    assert [s.step for s in Checkpointer(folder).list()] == [1, 2]


def test_a_guard_is_refused_when_it_is_built_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept: list[Checkpointer] = []
    with child(lambda: kept.append(save(folder))) as pid:
        with pytest.raises(CheckpointError, match=f"pid {pid} "):
            Guard(model, optimizer, checkpoint=folder, run_dir=tmp_path / "run")
        assert not (tmp_path / "run").exists()
    with Guard(model, optimizer, checkpoint=folder, run_dir=False):  # hooks of the first would be an error here
        assert in_child(lambda: save(folder, 2)).startswith("CheckpointError")
    save(folder, 2)


# -- within one process ----------------------------------------------------------------------------------------------


def test_of_two_objects_of_one_process_the_newer_takes_over(folder: Path) -> None:
    """As in a notebook whose earlier cell left one behind; what must never happen is that both save in turn."""
    first = save(folder)
    second = save(folder, 2)
    for step in (3, 4):
        with pytest.raises(CheckpointError, match=r"another Checkpointer or Guard of this process.*close\(\) it first"):
            first.save(step, model=MODEL)
    second.save(5, model=MODEL)
    second.close()
    first.save(6, model=MODEL)
    first.claim()
    with pytest.raises(CheckpointError, match="of this process"):
        second.save(7, model=MODEL)
    first.close()
    second.save(8, model=MODEL)
    del second
    gc.collect()
    first.save(9, model=MODEL)
    assert [s.step for s in first.list()][-3:] == [6, 8, 9]


def test_what_a_guard_has_nobody_takes_over(folder: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    idle = save(folder)
    with Guard(model, optimizer, checkpoint=folder, run_dir=False):
        for other in (idle, Checkpointer(folder)):
            with pytest.raises(CheckpointError, match="of this process"):
                other.save(2, model=MODEL)
        another = nn.Linear(2, 1)
        its = torch.optim.SGD(another.parameters(), lr=0.01)
        with pytest.raises(CheckpointError, match="of this process"):
            Guard(another, its, checkpoint=folder, run_dir=False)
        with pytest.raises(CheckpointError, match="of this process"):
            idle.prune()
    idle.save(3, model=MODEL)


def test_one_that_is_saving_is_not_taken_over_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = Checkpointer(folder, asynchronous=True)
    begun, go_on = threading.Event(), threading.Event()
    write = ckpt._write

    def slow(*args: object, **kwargs: object) -> object:
        begun.set()
        assert go_on.wait(60)
        return write(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(ckpt, "_write", slow)
    ckpt.save(1, model=MODEL)
    assert begun.wait(60)
    with pytest.raises(CheckpointError, match="of this process"):
        save(folder, 2)
    go_on.set()
    ckpt.wait()
    save(folder, 3)
    assert [s.step for s in ckpt.list()] == [1, 3]


def test_an_object_that_nobody_can_reach_holds_nothing(folder: Path) -> None:
    ckpt = save(folder)
    around = [ckpt]
    around.append(around)  # type: ignore[arg-type]
    gc.disable()
    try:
        del ckpt, around
        save(folder, 2)
    finally:
        gc.enable()


def test_threads_that_save_with_one_object_do_it_in_turn(folder: Path) -> None:
    ckpt = Checkpointer(folder, keep_last=100)
    failed: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for step in range(first, first + 5):
                ckpt.save(step, model=MODEL)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 100, 200, 300)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failed
    assert [s.sequence for s in ckpt.list()] == list(range(1, 21))
    assert all(ckpt.verify(s.step) for s in ckpt.list())


def test_of_threads_with_objects_of_their_own_one_saves(folder: Path) -> None:
    """Each begins once; whoever was taken over from never saves again."""
    failed: dict[int, str] = {}
    turn = threading.Barrier(3)

    def work(number: int) -> None:
        ckpt = Checkpointer(folder, keep_last=100)
        for step in range(10):
            turn.wait()
            try:
                ckpt.save(100 * number + step, model=MODEL)
            except CheckpointError as error:
                failed[number] = str(error)
        turn.wait()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(failed) >= 2
    assert all("of this process" in said for said in failed.values())
    assert all(Checkpointer(folder).verify(s.step) for s in Checkpointer(folder).list())


@pytest.mark.long
def test_many_at_once_and_one_wins(folder: Path) -> None:
    """Objects that all begin at the same moment: exactly one of them saves."""
    start, won, kept = threading.Barrier(8), list[int](), list[FolderLock]()
    folder.mkdir(exist_ok=True)

    def work(number: int) -> None:
        one = FolderLock(folder)
        kept.append(one)
        start.wait()
        try:
            one.take(f"run-{number}", claim=True)
            won.append(number)
        except CheckpointError:
            pass

    for _ in range(20):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert writer_of(folder).run == f"run-{won.pop()}"  # type: ignore[union-attr]
        for one in kept:
            one.release()
        kept.clear()


# -- what happens to the folder ----------------------------------------------------------------------------------------


def test_a_folder_that_is_deleted_meanwhile_is_taken_again(folder: Path) -> None:
    ckpt = save(folder / "x")
    shutil.rmtree(folder / "x")
    ckpt.save(2, model=MODEL)
    assert [s.step for s in ckpt.list()] == [2]
    assert in_child(lambda: save(folder / "x", 3)).startswith("CheckpointError")
    ckpt.claim()
    (folder / "x" / LOCK).unlink()
    other = save(folder / "x", 4)
    other.claim()
    with pytest.raises(CheckpointError, match="of this process"):
        ckpt.save(5, model=MODEL)
    assert [s.step for s in other.list()] == [2, 4]


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_a_lock_that_is_no_file(folder: Path, kind: str) -> None:
    path = folder / LOCK
    if kind == "link":
        path.symlink_to(folder / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(CheckpointError, match=r"\.writer|Is a directory"):
        save(folder)
    assert not (folder / "elsewhere").exists()
    assert Checkpointer(folder).list() == []


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"x" * 10_000,
        b"[" * 4000,
        b"[]",
        b'{"pid": 1}',
        json.dumps(
            {"pid": 10**30, "host": "a\x1b[31m\u202e", "since": 1e400, "run": "\x07", "boot": "", "started": 0}
        ).encode(),
        json.dumps({"pid": "x", "host": 1, "since": "y", "run": None, "boot": [], "started": {}}).encode(),
    ],
)
def test_a_record_that_makes_no_sense_changes_nothing(folder: Path, record: bytes) -> None:
    (folder / LOCK).write_bytes(record)
    save(folder).close()
    with (folder / LOCK).open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write(record)
        held.flush()
        with pytest.raises(CheckpointError, match="in use by another run") as told:
            save(folder, 2)
    assert str(told.value).isprintable()


# -- where locks do not work -------------------------------------------------------------------------------------------


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_it_is_told_and_the_record_counts(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = save(folder)
    assert caplog.text.count("has no locks: make sure that no other run writes there") == 1
    second = save(folder, 2)
    with pytest.raises(CheckpointError, match="of this process"):
        first.save(2, model=MODEL)
    second.close()
    kept: list[Checkpointer] = []
    with child(lambda: kept.append(save(folder, 3))) as pid, pytest.raises(CheckpointError, match=f"pid {pid} "):
        save(folder, 4)
    caplog.clear()
    save(folder, 5).close()  # it was killed
    record = json.loads(json.dumps({"pid": 1, "host": "elsewhere", "since": 0.0, "run": "r", "boot": "", "started": 0}))
    (folder / LOCK).write_text(json.dumps(record))
    save(folder, 6)  # nobody can know whether that one lives
    assert "the last one on record is pid 1 on elsewhere" in caplog.text


def test_a_process_of_the_same_number_is_not_the_same(folder: Path) -> None:
    save(folder)
    gc.collect()
    me = lock.Writer(pid=os.getpid(), host=lock.HOST, since=0.0, boot=lock._boot(), started=lock._started("self"))
    assert lock.is_alive(me) is True
    assert lock._started("self") > 0
    other = {"pid": os.getpid(), "host": lock.HOST, "since": 0.0}
    assert lock.is_alive(lock.Writer(**other, boot=lock._boot(), started=1)) is False  # type: ignore[arg-type]
    assert lock.is_alive(lock.Writer(**other, boot="another", started=me.started)) is False  # type: ignore[arg-type]
    assert lock.is_alive(lock.Writer(pid=1, host="elsewhere", since=0.0)) is None


@pytest.mark.parametrize("rank", ["1", None])
def test_several_processes_are_told_to_use_a_folder_each(
    folder: Path, rank: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
    first = save(folder)
    first.claim()
    with pytest.raises(CheckpointError) as told:
        save(folder, 2)
    assert (f"such as {folder / 'rank1'}" in str(told.value)) is (rank == "1")
    first.close()


def test_a_full_disk_does_not_keep_the_lock_from_being_taken(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = FolderLock(folder)
    held.take("a", claim=True)
    with caplog.at_level(logging.INFO, "trimtab"):
        os.truncate(folder / LOCK, 0)  # nothing could be written to it
        with pytest.raises(CheckpointError, match="another run, which does not say who it is"):
            FolderLock(folder).take("b")
    held.release()
