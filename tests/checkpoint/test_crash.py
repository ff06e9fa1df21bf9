"""Whatever happens while a checkpoint is saved, marked or deleted: no unreadable one is listed, no good one is lost."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.lab import (
    GROWS,
    Gate,
    Scenario,
    count_operations,
    fail_at,
    folder,
    healthy_steps,
    killed_at,
    leftovers,
    save,
)
from tests.checkpoint.power import MODELS, Journal, replay
from tests.matrix import sampled
from trimtab.checkpoint import directory
from trimtab.checkpoint.directory import HOST, Disk
from trimtab.checkpoint.format import container
from trimtab.core.errors import CheckpointError

__all__ = ["folder"]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

Again = Callable[[Callable[[Path], None]], Path]
LARGE = 12_000  # 1.15 MB a tensor: written by itself, and hashed by the other thread


def nothing(folder: Path) -> None:
    assert not folder.exists()


def three_good(folder: Path) -> None:
    for step in (1, 2, 10):
        save(folder, step, status="good")


def two_large(folder: Path) -> None:
    for step in (1, 2):
        save(folder, step, scale=LARGE, status="good")


def with_damage(folder: Path) -> None:
    three_good(folder)
    victim = save(folder, 11) / "model.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1])


def with_leftovers(folder: Path) -> None:
    three_good(folder)
    half = folder / f".tmp-{HOST}-999999999-0123abcd-step-00000011"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")


def first(folder: Path, disk: Disk) -> None:
    directory.prepare(folder, disk=disk)
    save(folder, 5, disk)


def another(folder: Path, disk: Disk) -> None:
    save(folder, 11, disk)


def large(folder: Path, disk: Disk) -> None:
    save(folder, 11, disk, scale=LARGE)


def retention(folder: Path, disk: Disk) -> None:
    path = save(folder, 11, disk)
    container.set_status(path, "good", "20 quiet steps", disk=disk)
    directory.remove(folder / directory.name_of(1), disk=disk)
    directory.remove(folder / directory.name_of(2), disk=disk)


def thorough(folder: Path, disk: Disk) -> None:
    """As a run does it at its start: look at the directory, clean up after the last one, save, certify, prune."""
    directory.prepare(folder, disk=disk)
    for step in (11, 12):
        path = save(folder, step, disk)
        container.read(path, disk=disk)
        container.set_status(path, "good", disk=disk)
    for _, _, path in directory.entries(folder, disk=disk)[:-3]:
        directory.remove(path, disk=disk)


def verdicts(folder: Path, disk: Disk) -> None:
    container.set_status(folder / directory.name_of(2), "bad", "loss is NaN", disk=disk)
    directory.quarantine(folder / directory.name_of(2), disk=disk)
    container.set_status(folder / directory.name_of(10), "good", "again", disk=disk)


# before, what is done, sizes, and which steps are good whatever happens
SCENARIOS: dict[str, tuple[Scenario, Callable[[Path], None], int, set[int]]] = {
    "the first save": (first, nothing, 1, set()),
    "another save": (another, three_good, 1, {1, 2, 10}),
    "a large save": (large, two_large, LARGE, {1, 2}),
    "save, mark good, delete the oldest": (retention, three_good, 1, {10}),
    "start, clean up, save twice, prune": (thorough, with_leftovers, 1, {10}),
    "mark bad, put into quarantine": (verdicts, three_good, 1, {1, 10}),
    "save over a damaged one": (another, with_damage, 1, {1, 2, 10}),
}


def check_after(folder: Path, scale: int, kept: set[int]) -> None:
    """Nothing to repair by hand: everything listed is whole, the good ones are there, the rest can be cleaned up."""
    damaged = folder / directory.name_of(11)
    if any(damage.file == "model.safetensors" for damage in container.damage_of(damaged)):
        directory.quarantine(damaged)  # the one that was damaged before
    found = healthy_steps(folder, scale)
    assert kept <= {step for step, state in found.items() if state == "good"}
    directory.clean(folder)
    assert leftovers(folder) == []
    save(folder, 999, scale=scale)
    assert 999 in healthy_steps(folder, scale)


@pytest.fixture
def again(folder: Path) -> Again:
    """The directory as `before` makes it, anew at each call."""

    def make(before: Callable[[Path], None]) -> Path:
        first, home = folder / before.__name__, folder / "run"
        if not first.exists():
            before(first)
        shutil.rmtree(home, ignore_errors=True)
        if first.exists():
            shutil.copytree(first, home)
        return home

    return make


def test_d8_the_lab_has_at_least_200_kill_points(again: Again) -> None:
    numbers = {name: count_operations(case[0], again(case[1])) for name, case in SCENARIOS.items()}
    assert sum(numbers.values()) >= 200, numbers


@pytest.mark.parametrize("name", sampled(list(SCENARIOS), ["another save", "mark bad, put into quarantine"]))
def test_d8_killed_before_every_operation(name: str, again: Again) -> None:
    scenario, before, scale, kept = SCENARIOS[name]
    number = 0
    while killed_at(number, scenario, home := again(before)):
        check_after(home, scale, kept)
        number += 1
    assert number >= 10
    healthy_steps(home, scale)


def test_d8_killed_in_the_middle_of_a_write(again: Again) -> None:
    number = 1
    while killed_at(number, retention, home := again(three_good), torn=True):
        check_after(home, 1, {10})
        number += 1
    assert number >= 30


def run_failing(scenario: Scenario, home: Path, gate: Gate) -> CheckpointError | None:
    try:
        scenario(home, Disk(gate))
    except CheckpointError as error:
        return error
    except OSError as error:  # deleting and moving say what the system says
        return CheckpointError(str(error))
    return None


def test_disk_full_from_every_operation_on(again: Again) -> None:
    last = count_operations(another, again(three_good)) - 1
    for number in range(last + 1):
        home = again(three_good)
        error = run_failing(another, home, fail_at(number, errno.ENOSPC, onwards=True, only=GROWS))
        if error is None:
            continue  # only what needs no space was left to do
        assert error.errno == errno.ENOSPC
        assert "ENOSPC" in str(error)
        assert "bytes" in str(error)
        assert "free some space" in str(error)
        assert str(home / directory.name_of(11)) in str(error)
        assert leftovers(home) == [], "what was half written takes space"
        found = healthy_steps(home)
        if number == last:  # it is whole and has its name; only whether the name is on the disk is not known
            found.pop(11, None)
        assert found == {1: "good", 2: "good", 10: "good"}


@pytest.mark.parametrize("code", sampled({"EIO": errno.EIO, "EACCES": errno.EACCES, "EROFS": errno.EROFS}, "EIO"))
def test_one_operation_fails(code: int, again: Again) -> None:
    told = 0
    for number in range(count_operations(another, again(three_good))):
        home = again(three_good)
        gate = fail_at(number, code)
        error = run_failing(another, home, gate)
        assert error is not None, gate.log[number]
        told += 1
        assert error.errno == code
        assert errno.errorcode[code] in str(error)
        assert leftovers(home) == []
        assert healthy_steps(home) == {1: "good", 2: "good", 10: "good"}
        syncs = [path for operation, path in gate.log if operation == "fsync"]
        assert len(syncs) == len(set(syncs)), "a sync that failed must not be tried again and believed"
        save(home, 11)  # and it goes on when the disk does
        assert set(healthy_steps(home)) == {1, 2, 10, 11}
    assert told >= 15


def test_the_disk_dies_at_every_operation(again: Again) -> None:
    for number in range(count_operations(retention, again(three_good))):
        home = again(three_good)
        assert run_failing(retention, home, fail_at(number, errno.EIO, onwards=True)) is not None
        check_after(home, 1, {10})


def test_a_directory_that_cannot_be_made_is_told_before_training(folder: Path) -> None:
    gate = fail_at(0, errno.EACCES, onwards=True, only=("mkdir",))
    with pytest.raises(CheckpointError, match=r"EACCES.*check who may write"):
        directory.prepare(folder / "run", disk=Disk(gate))


def test_short_writes_are_completed(folder: Path) -> None:
    save(folder, 3, Disk(Gate(lambda operation, path, number: 5)))
    assert healthy_steps(folder) == {3: "candidate"}


def test_a_slow_disk_only_takes_longer(folder: Path) -> None:
    save(folder, 3, Disk(Gate(lambda operation, path, number: time.sleep(0.002))))
    assert healthy_steps(folder) == {3: "candidate"}


def test_two_writers_of_one_step(folder: Path) -> None:
    """The second one arrives when the first has all but the last step behind it."""

    def overtake(operation: str, path: Path, number: int) -> None:
        if operation == "rename" and path == folder / directory.name_of(3):
            save(folder, 3)

    with pytest.raises(CheckpointError, match=rf"exists already, written by pid {os.getpid()} on .*two runs"):
        save(folder, 3, Disk(Gate(overtake)))
    assert healthy_steps(folder) == {3: "candidate"}
    assert leftovers(folder) == []


@pytest.mark.parametrize("model", sampled(list(MODELS), list(MODELS)[:1]))
def test_power_failure_after_every_operation(model: str, folder: Path) -> None:
    home, before, journal = folder / "run", folder / "before", Journal()
    three_good(home)
    shutil.copytree(home, before)
    path = save(home, 11, journal)
    saved = len(journal.notes)
    container.set_status(path, "good", disk=journal)
    certified = len(journal.notes)
    directory.remove(home / directory.name_of(1), disk=journal)
    directory.quarantine(home / directory.name_of(2), disk=journal)
    assert len(journal.notes) > 30
    for number in range(len(journal.notes) + 1):
        replay(before, journal.notes[:number], home, model)
        found = healthy_steps(home)
        assert found[10] == "good"
        if number >= saved:
            assert 11 in found, "a save that returned survives"
        if number >= certified:
            assert found[11] == "good", "and so does a verdict"
        directory.clean(home)
        assert leftovers(home) == []


@pytest.mark.parametrize("forgotten", ["fsync", "sync_dir"])
def test_the_models_of_power_failure_notice_a_forgotten_sync(forgotten: str, folder: Path) -> None:
    home, before, journal = folder / "run", folder / "before", Journal()
    home.mkdir()
    before.mkdir()
    save(home, 11, journal)
    notes = [note for note in journal.notes if note[0] != forgotten]
    noticed = []
    for model in MODELS:
        replay(before, notes, home, model)
        try:
            noticed.append(healthy_steps(home) != {11: "candidate"})
        except CheckpointError:
            noticed.append(True)
    assert noticed.count(True) >= 2
