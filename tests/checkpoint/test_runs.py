"""Several runs in one folder: what was saved last is the newest, and no run deletes or certifies another's."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.checkpoint.lab import folder, reseal
from trimtab import Checkpointer, CheckpointError, Guard
from trimtab.checkpoint.format import container
from trimtab.checkpoint.retention import Retention, to_delete
from trimtab.core.types import Snapshot

__all__ = ["folder"]


def model_of(value: float) -> nn.Module:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, value)
    return model


def run(folder: Path, steps: list[int], *, resume: bool = False, **how: Any) -> list[Snapshot]:
    """One run, as a process of its own would do it: resume or not, save these steps, end."""
    with Checkpointer(folder, **how) as ckpt:
        if resume:
            assert ckpt.resume(model=model_of(0.0)) is not None
        ckpt.claim()  # as a guard does: nothing that this process saved before belongs to it
        return [ckpt.save(step, model=model_of(float(step))) for step in steps]


def steps(snapshots: list[Snapshot]) -> list[int]:
    return [s.step for s in snapshots]


def resumed(folder: Path, **how: Any) -> tuple[int, float]:
    model = model_of(-1.0)
    found = Checkpointer(folder).resume(model=model, **how)
    assert found is not None
    assert found.path.is_dir()
    return found.step, model.weight[0, 0].item()


# -- what was saved last is the newest ----------------------------------------------------------------------------


def test_a_new_run_in_a_folder_with_higher_numbers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = run(folder, [100, 200, 300], keep_last=2)
    how = {"keep_last": 2, "quiet_steps": 1000}
    with caplog.at_level(logging.WARNING, "trimtab"), Checkpointer(folder, **how) as ckpt:
        ckpt.claim()
        for step in (10, 20, 30, 40):
            saved = ckpt.save(step, model=model_of(float(step)))
            assert saved.path.is_dir()
            assert ckpt.verify(step)
            assert ckpt.list()[-1] == saved
            assert resumed(folder) == (step, float(step))
    assert steps(Checkpointer(folder).list()) == [200, 300, 30, 40]
    assert all(s.path.is_dir() for s in old[1:])
    assert caplog.text.count("holds 2 checkpoints of earlier runs, the newest of step 300") == 1


def test_a_run_that_is_resumed_goes_on_and_one_that_is_not_begins(folder: Path) -> None:
    first = run(folder, [10, 20])
    second = run(folder, [30, 40], resume=True, keep_last=3)
    assert {s.run for s in (*first, *second)} == {first[0].run}
    assert [s.sequence for s in (*first, *second)] == [1, 2, 3, 4]
    assert steps(Checkpointer(folder).list()) == [20, 30, 40]  # the limits count what came before it was resumed
    third = run(folder, [35], keep_last=1)
    assert third[0].run != first[0].run
    assert steps(Checkpointer(folder).list()) == [20, 30, 40, 35]
    assert resumed(folder) == (35, 35.0)


def test_another_run_is_chosen_by_its_name(folder: Path) -> None:
    first, second = run(folder, [10, 20])[0].run, run(folder, [5])[0].run
    assert resumed(folder) == (5, 5.0)
    assert resumed(folder, run=first) == (20, 20.0)
    assert resumed(folder, run=first, step=10) == (10, 10.0)
    assert resumed(folder, run=second[:-1]) == (5, 5.0)
    assert resumed(folder, step=20) == (20, 20.0)  # only the earlier run has it
    for name, told in (("nobody", "there is no run 'nobody'"), (first[:2], "several runs begin with '20'")):
        with pytest.raises(CheckpointError, match=told) as error:
            Checkpointer(folder).resume(run=name)
        assert first in str(error.value)
    with pytest.raises(CheckpointError, match="no sound checkpoint of step 20 of run"):
        Checkpointer(folder).resume(run=second, step=20)
    assert Checkpointer(folder).verify(20, run=first).snapshot.run == first
    with pytest.raises(CheckpointError, match="no checkpoint of step 20"):
        Checkpointer(folder).verify(20, run=second)


def test_an_earlier_run_that_is_gone_on_with_is_the_newest_again(folder: Path) -> None:
    first = run(folder, [10])[0].run
    run(folder, [5, 6])
    with Checkpointer(folder, keep_last=1) as ckpt:
        ckpt.resume(run=first, model=model_of(0.0))
        assert ckpt.save(11, model=model_of(11.0)).run == first
    assert steps(Checkpointer(folder).list()) == [5, 6, 11]
    assert resumed(folder) == (11, 11.0)


def test_steps_that_go_back_or_come_twice_in_one_run(folder: Path) -> None:
    with Checkpointer(folder, keep_last=3) as ckpt:
        for number, step in enumerate([10, 20, 20, 5, 20, 5]):
            saved = ckpt.save(step, model=model_of(float(number)))
            assert saved.path.is_dir()
            assert ckpt.list()[-1] == saved
            assert resumed(folder) == (step, float(number))
        assert len({s.run for s in ckpt.list()}) == 1
    assert steps(Checkpointer(folder).list()) == [5, 20, 5]


@pytest.mark.parametrize("close", [True, False])
def test_an_object_for_each_save_is_one_run(folder: Path, close: bool) -> None:
    for step in range(10, 60, 10):
        ckpt = Checkpointer(folder, keep_last=2, quiet_steps=1000)
        ckpt.save(step, model=model_of(float(step)))
        if close:
            ckpt.close()
        del ckpt
    assert steps(Checkpointer(folder).list()) == [40, 50]
    assert len({s.run for s in Checkpointer(folder).list()}) == 1
    Checkpointer(folder, keep_last=2).save(10, model=model_of(10.0))  # a step back: something else began
    assert steps(Checkpointer(folder).list()) == [40, 50, 10]
    assert resumed(folder) == (10, 10.0)


def test_one_object_resumes_and_another_saves(folder: Path) -> None:
    first = run(folder, [10])[0].run
    assert resumed(folder) == (10, 10.0)
    assert Checkpointer(folder).save(20, model=model_of(20.0)).run == first


def test_a_newest_run_without_anything_sound_is_not_replaced_by_another(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = run(folder, [100])[0].run
    with Checkpointer(folder) as ckpt:
        ckpt.claim()
        ckpt.save(10, model=model_of(10.0))
        ckpt.condemn(0, "LOSS002 loss-spike at step 11")
    with caplog.at_level(logging.WARNING, "trimtab"):
        assert Checkpointer(folder).resume(model=model_of(0.0)) is None
    assert "step-00000010 is not used: LOSS002 loss-spike at step 11; resume(step=10) takes it anyway" in caplog.text
    assert f"the newest of step 100: resume(run={first!r}) takes it" in caplog.text
    assert resumed(folder, run=first) == (100, 100.0)


# -- what belongs to others stays -----------------------------------------------------------------------------------


def test_a_run_certifies_and_condemns_its_own_only(folder: Path) -> None:
    run(folder, [5], quiet_steps=10)
    with Checkpointer(folder, quiet_steps=10) as ckpt:
        ckpt.claim()
        for step in (1, 100):
            ckpt.save(step, model=model_of(1.0))
        assert [s.state for s in ckpt.list()] == ["candidate", "good", "candidate"]
        ckpt.condemn(0, "trouble")
        assert [s.state for s in ckpt.list()] == ["candidate", "good", "bad"]
        ckpt.discard_bad()
        assert steps(ckpt.list()) == [5, 1]
    unsaved = Checkpointer(folder, quiet_steps=1)
    unsaved.quiet(1000)
    unsaved.condemn(0, "trouble")
    assert [s.state for s in unsaved.list()] == ["candidate", "good"]


def test_what_was_left_behind_by_going_back_is_never_certified(folder: Path) -> None:
    """Resumed from step 10, the run knows nothing of how step 20 would have gone on; nor do those that resume it."""
    run(folder, [10, 20], quiet_steps=50)
    with Checkpointer(folder, quiet_steps=50) as ckpt:
        ckpt.resume(step=10, model=model_of(0.0))
        assert steps(ckpt.history()) == [10]
        ckpt.save(15, model=model_of(15.0))
        assert steps(ckpt.history()) == [10, 15]
    with Checkpointer(folder, quiet_steps=50, keep_last=9) as ckpt:
        assert ckpt.resume(model=model_of(0.0)).step == 15  # type: ignore[union-attr]
        assert steps(ckpt.history()) == [10, 15]
        ckpt.save(100, model=model_of(100.0))
        assert [(s.step, s.state) for s in ckpt.list()] == [
            (10, "good"),
            (20, "candidate"),
            (15, "good"),
            (100, "candidate"),
        ]


def test_history_survives_the_deletion_of_what_lies_between(folder: Path) -> None:
    how: dict[str, Any] = {"keep_last": 1, "keep_every": 10, "quiet_steps": 10_000}
    run(folder, [10, 11, 12, 20, 21, 22], **how)
    with Checkpointer(folder, **how) as ckpt:
        ckpt.resume(model=model_of(0.0))
        assert steps(ckpt.history()) == [10, 20, 22]


def test_a_state_in_quarantine_is_not_deleted_by_another_run_nor_by_a_lower_number(folder: Path) -> None:
    def bad(ckpt: Checkpointer, step: int) -> Snapshot:
        saved = ckpt.save(step, model=model_of(math.nan))
        assert saved.state == "bad"
        assert saved.path.is_dir()
        return saved

    with Checkpointer(folder) as ckpt:
        first = bad(ckpt, 900)
    with Checkpointer(folder) as ckpt:
        ckpt.claim()
        second = bad(ckpt, 7)
        third = bad(ckpt, 3)
    assert first.path.is_dir()
    assert not second.path.exists()
    assert third.path.is_dir()


def test_pruning_by_hand_is_for_one_run(folder: Path) -> None:
    run(folder, [1, 2, 3])
    run(folder, [1, 2, 3])
    gone = Checkpointer(folder, keep_last=1).prune()
    assert steps(gone) == [1, 2]
    assert steps(Checkpointer(folder).list()) == [1, 2, 3, 3]


def test_the_only_one_to_resume_from_outlives_one_that_was_repaired(folder: Path) -> None:
    with Checkpointer(folder, keep_last=1) as ckpt:
        ckpt.save(1, model=model_of(1.0))
        assert ckpt.save(2, model=model_of(math.nan), clean=True).repaired
    assert resumed(folder) == (1, 1.0)


def test_a_guard_is_a_run_of_its_own(folder: Path) -> None:
    def train(resume: bool) -> list[str]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with Guard(model, optimizer, run_dir=False, checkpoint=folder, checkpoint_every=2) as guard:
            if resume:
                guard.resume()
            for _ in range(5):
                loss = model(torch.randn(4, 2)).square().mean()
                loss.backward()
                guard.step(loss)
                optimizer.zero_grad()
        return [s.run for s in Checkpointer(folder).list()]

    first = train(resume=False)
    second = train(resume=False)
    assert second[:2] == first
    assert len(set(second)) == 2
    assert set(train(resume=True)) == set(second)


# -- folders of earlier versions --------------------------------------------------------------------------------------


def as_saved_by_0_1_0(path: Path) -> None:
    def strip(manifest: dict[str, Any]) -> None:
        for name in ("run", "sequence", "history"):
            del manifest[name]

    reseal(path, strip)


def test_checkpoints_without_a_run_are_one_run_and_come_first(folder: Path) -> None:
    for saved in run(folder, [99, 100, 101], keep_last=9):
        as_saved_by_0_1_0(saved.path)
    assert steps(Checkpointer(folder).list()) == [99, 100, 101]
    assert resumed(folder) == (101, 101.0)
    with Checkpointer(folder, keep_last=3, quiet_steps=20) as ckpt:
        ckpt.resume(step=100, model=model_of(0.0))
        assert steps(ckpt.history()) == [99, 100]
        ckpt.save(100, model=model_of(7.0))  # once more, and newer
        assert steps(ckpt.list()) == [100, 101, 100]
        assert ckpt.save(120, model=model_of(8.0)).run == ""
        assert [(s.step, s.state) for s in ckpt.list()] == [(101, "candidate"), (100, "good"), (120, "candidate")]
    new = run(folder, [1], keep_last=1)
    assert steps(Checkpointer(folder).list()) == [101, 100, 120, 1]
    assert resumed(folder) == (1, 1.0)
    assert resumed(folder, run="") == (120, 8.0)
    assert new[0].run


# -- whatever happens -------------------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "save", "new run", "new process", "go back", "trouble", "damage", "lost"]),
        st.integers(0, 60),
    ),
    min_size=1,
    max_size=25,
)


@given(events=EVENTS, keep_last=st.integers(1, 3))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_of_events(events: list[tuple[str, int]], keep_last: int, tmp_path_factory: Any) -> None:
    """After each save: it is there, it is the newest, it is resumed from, and no other run has lost anything."""
    home = tmp_path_factory.mktemp("runs")
    how: dict[str, Any] = {"keep_last": keep_last, "quiet_steps": 10}
    ckpt = Checkpointer(home, **how)
    for event, number in events:
        there = ckpt.list()
        if event == "save":
            saved = ckpt.save(number, model=model_of(float(number)))
            now = ckpt.list()
            assert now[-1] == saved
            assert saved.path.is_dir()
            assert resumed(home) == (number, float(number))
            lost = [s for s in there if s.path not in {one.path for one in now}]
            assert all(s.run == saved.run and s.state != "bad" for s in lost)
            mine = [s for s in now if s.run == saved.run and s.state != "bad"]
            assert len(mine) <= keep_last + 1  # and the newest good one
        elif event in ("new run", "new process"):
            ckpt.close()
            ckpt = Checkpointer(home, **how)
            if event == "new run":
                ckpt.claim()
            else:
                ckpt.resume(model=model_of(0.0))
        elif event == "go back" and there:
            one = there[number % len(there)]
            if one.digest and ckpt.verify(one.step, run=one.run):
                ckpt.resume(step=one.step, run=one.run, model=model_of(0.0))
        elif event == "trouble":
            ckpt.condemn(number, "trouble", number)
        elif there:
            name = "model.safetensors" if event == "damage" else "manifest.json"
            file = there[number % len(there)].path / name
            file.write_bytes(file.read_bytes()[:-1])
    ckpt.close()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["candidate", "good", "bad"]), st.booleans()), max_size=12),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(0, 9)),
)
def test_limits_go_by_the_order_of_saving(kinds: list[tuple[int, str, bool]], last: int, budget: int | None) -> None:
    snapshots = [
        Snapshot(step=step, path=Path(str(place)), state=state, digest="x", sequence=place + 1, repaired=repaired)
        for place, (step, state, repaired) in enumerate(kinds)
    ]
    gone = to_delete(snapshots, {s.path: 1 for s in snapshots}, Retention(keep_last=last, max_bytes=budget))
    left = [s for s in snapshots if s not in gone and s.state != "bad"]
    for chosen in (
        [s for s in snapshots if s.state != "bad"],
        [s for s in snapshots if s.state != "bad" and not s.repaired],
        [s for s in snapshots if s.state == "good" and not s.repaired],
    ):
        assert not chosen or chosen[-1] in left
    assert all(s.state != "bad" for s in gone)
    if budget is None:
        assert [s for s in snapshots if s.state != "bad"][-last:] == left[-last:]


# -- the object itself ------------------------------------------------------------------------------------------------


def test_a_copy_holds_nothing_and_works(folder: Path) -> None:
    ckpt = Checkpointer(folder)
    ckpt.claim()
    ckpt.save(1, model=model_of(1.0))
    for other in (copy.deepcopy(ckpt), pickle.loads(pickle.dumps(ckpt))):
        with pytest.raises(CheckpointError, match="of this process"):
            other.save(2, model=model_of(2.0))
        assert steps(other.list()) == [1]
    ckpt.close()
    assert other.save(2, model=model_of(2.0)).run == ckpt.list()[0].run


@pytest.mark.parametrize("step", [-1, 1.5, None, True, "7", 10**15, math.nan])
def test_a_step_that_is_none(folder: Path, step: Any) -> None:
    with pytest.raises(CheckpointError, match="expected a whole number from 0"):
        Checkpointer(folder).save(step, model=model_of(1.0))
    assert Checkpointer(folder).save(torch.tensor(3), model=model_of(1.0)).step == 3  # type: ignore[arg-type]


def test_a_part_that_does_not_exist(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"save was given 'modle'.*did you mean 'model'"):
        Checkpointer(folder).save(1, modle=model_of(1.0))
    with pytest.raises(CheckpointError, match=r"resume was given 'epoch'.*your own goes into extra"):
        Checkpointer(folder).resume(epoch=1)


def test_a_name_of_a_run_is_checked(folder: Path) -> None:
    saved = run(folder, [1])[0]
    for name in ("../x", "a\x1b[31m", "x" * 200, 3, None):
        reseal(saved.path, lambda manifest, name=name: manifest.update(run=name))
        assert container.damage_of(saved.path)[0].file == "manifest.json"
