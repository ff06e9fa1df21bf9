"""Going back to a checkpoint where memory holds no state from before the trouble."""

from __future__ import annotations

import copy
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.guard.test_rewind import OPTIMIZERS, data, make, rewind, same, state_of
from trimtab import Checkpointer, Guard, InputError
from trimtab.guard.rollback import RecentStates

NO_RING = {"ring_bytes": 1}


def train(guard: Guard, model: nn.Module, optimizer: Any, steps: range, states: dict[int, Any] | None = None) -> None:
    for step in steps:
        if states is not None:
            states[step] = state_of(model, optimizer)  # after `step` steps
        x, y = data(step)

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        guard.step(closure)


def on_disk(folder: Path, kind: str = "adam", *, steps: int = 60, **kwargs: Any) -> tuple[Any, Any, Guard, Any]:
    model, optimizer = make(kind)
    settings = {
        "checkpoint_every": 10,
        "checkpoint_on_signal": False,
        "policy": NO_RING,
        "ignore": ["ALL"],
    } | kwargs.pop("settings", {})
    guard = Guard(model, optimizer, settings, mode="act", run_dir=False, checkpoint=folder, **kwargs)
    states: dict[int, Any] = {}
    train(guard, model, optimizer, range(steps), states)
    return model, optimizer, guard, states


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_newest_checkpoint_before_the_onset_is_put_in_place(tmp_path: Path, kind: str) -> None:
    model, optimizer, guard, states = on_disk(tmp_path, kind)
    where = [p.data_ptr() for p in model.parameters()]
    noise = torch.get_rng_state()
    outcome = rewind(guard, before=45)
    assert outcome.applied, outcome.detail
    assert "those after step 39 again, from the checkpoint step-00000040, verified" in outcome.detail
    assert same(state_of(model, optimizer), states[40])
    assert [p.data_ptr() for p in model.parameters()] == where
    assert torch.equal(torch.get_rng_state(), noise)  # random numbers go on
    train(guard, model, optimizer, range(40, 60))
    assert guard.health()["steps"] == {"": 80}
    guard.close()


def test_rates_and_what_memory_would_not_put_back_stay(tmp_path: Path) -> None:
    _, optimizer, guard, _ = on_disk(tmp_path)
    optimizer.param_groups[0].update(lr=3.0, weight_decay=0.5)
    outcome = rewind(guard, before=45, limit=1.0)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (3.0, 0.5)
    assert "the rate (3) is held at 0.01" in outcome.detail
    guard.close()


def test_further_back_on_demand_and_never_what_was_begun_when_trouble_was(tmp_path: Path) -> None:
    for before, back, want in ((41, 0, 40), (40, 0, 30), (45, 1, 30), (45, 9, 10)):
        shutil.rmtree(tmp_path)
        kept = Checkpointer(tmp_path, keep_last=9)
        model, optimizer, guard, states = on_disk(kept)  # type: ignore[arg-type]
        assert rewind(guard, before=before, back=back).applied
        assert same(state_of(model, optimizer), states[want])
        guard.close()


def test_memory_is_asked_first_and_disk_where_it_is_too_young(tmp_path: Path) -> None:
    settings = {"policy": {"ring_every": 5}}
    ckpt = Checkpointer(tmp_path, keep_last=9)
    model, optimizer, guard, states = on_disk(ckpt, settings=settings)  # type: ignore[arg-type]
    assert "from memory" in rewind(guard, before=45).detail
    ring = guard.lanes[""].rollback.memory
    assert isinstance(ring, RecentStates)
    ring._kept = [s for s in ring._kept if s.steps[""] >= 30]
    outcome = rewind(guard, before=25)
    assert "the checkpoint step-00000020" in outcome.detail
    assert same(state_of(model, optimizer), states[20])
    assert len(ring) == 0  # its copies were of a run that is no longer this one
    guard.close()


def test_what_was_written_since_the_trouble_began_is_bad_even_if_certified(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, keep_last=9, quiet_steps=5)
    model, optimizer, guard, _ = on_disk(ckpt)  # type: ignore[arg-type]
    assert {s.step: s.state for s in ckpt.list()}[40] == "good"
    rewind(guard, before=35)
    found = {s.step: s for s in ckpt.list()}
    assert [found[n].state for n in (10, 20, 30, 40, 50)] == ["good", "good", "good", "bad", "bad"]
    assert found[40].reason == "trouble began about step 35 and was found at step 59"
    snapshot = ckpt.resume(model=model, optimizer={"": optimizer})
    assert snapshot is not None
    assert snapshot.step == 30
    guard.close()


def test_buffers_alone_come_from_disk_too(tmp_path: Path) -> None:
    model, optimizer, guard, states = on_disk(tmp_path)
    before = state_of(model, optimizer)
    outcome = rewind(guard, before=45, buffers=1.0)
    assert (outcome.applied, outcome.detail) == (True, "the weights took no harm; buffers are those of before it")
    now, buffers = state_of(model, optimizer), {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(same(now[0][name], (states[40] if name in buffers else before)[0][name]) for name in now[0])
    assert same(now[1], before[1])
    assert not rewind(guard, before=5, buffers=1.0).applied
    guard.close()


def test_a_damaged_one_is_told_and_the_one_before_it_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, guard, states = on_disk(tmp_path)
    file = tmp_path / "step-00000040" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with caplog.at_level(logging.WARNING, "trimtab"):
        outcome = rewind(guard, before=45)
    assert "step-00000040 is not gone back to" in caplog.text
    assert "step-00000030" in outcome.detail
    assert same(state_of(model, optimizer), states[30])
    guard.close()


def test_checkpoints_of_another_run_are_not_gone_back_to(tmp_path: Path) -> None:
    on_disk(tmp_path)[2].close()
    _, _, guard, _ = on_disk(tmp_path, steps=25)
    outcome = rewind(guard, before=8)
    assert not outcome.applied
    assert outcome.detail.endswith(", and no sound checkpoint of this run is older")
    guard.close()


def test_a_resumed_run_can_go_back_to_before_it_was_stopped(tmp_path: Path) -> None:
    *_, guard, states = on_disk(tmp_path)
    guard.close()
    model, optimizer = make()
    settings = {"checkpoint_every": 100, "policy": NO_RING}
    with Guard(model, optimizer, settings, mode="act", run_dir=False, checkpoint=tmp_path) as guard:
        assert guard.resume() is not None
        train(guard, model, optimizer, range(50, 60))
        outcome = rewind(guard, before=45)
        assert "the checkpoint step-00000040" in outcome.detail
        assert same(state_of(model, optimizer), states[40])


@pytest.mark.parametrize("average", ["module", "object"])
def test_averages_and_two_optimizers_go_back_to_disk_as_well(tmp_path: Path, average: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
    pair = {"a": torch.optim.Adam(model[0].parameters(), 1e-2), "b": torch.optim.SGD(model[2].parameters(), 1e-2, 0.9)}
    averaged = torch.optim.swa_utils.AveragedModel(model)
    ema: Any = averaged if average == "module" else SimpleNamespace(ema_model=averaged.module, state_dict=None)
    if average == "object":
        ema.state_dict = averaged.module.state_dict
        ema.load_state_dict = averaged.module.load_state_dict
    settings = {"checkpoint_every": 10, "policy": NO_RING}
    states = {}

    def now() -> Any:
        parts = [model.state_dict(), averaged.state_dict(), *(o.state_dict() for o in pair.values())]
        return copy.deepcopy([parts[0], {k: v for k, v in parts[1].items() if k != "n_averaged"}, *parts[2:]])

    with Guard(model, pair, settings, mode="act", run_dir=False, checkpoint=tmp_path, ema=ema) as guard:
        for step in range(45):
            states[step] = now()
            x, y = data(step)
            loss = (model(x) - y).square().mean()
            loss.backward()
            guard.step(loss, optimizer="all")
            averaged.update_parameters(model)
            for one in pair.values():
                one.zero_grad()
        lane = guard._lanes["b"]
        from trimtab.core.types import Action
        from trimtab.remedies import BUILTIN

        outcome = BUILTIN["rewind"].apply(Action(kind="rewind", args={"before": 38.0}), lane, 45)
        assert outcome.applied, outcome.detail
        assert same(now(), states[30])


def test_a_checkpoint_still_under_way_is_waited_for(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, asynchronous=True, keep_last=9)
    model, optimizer, guard, states = on_disk(ckpt)  # type: ignore[arg-type]
    assert rewind(guard, before=55).applied
    assert same(state_of(model, optimizer), states[50])
    guard.close()


# -- states of the guard's own ---------------------------------------------------------------------------------------


def own(folder: Path, steps: int, caplog: pytest.LogCaptureFixture) -> tuple[Any, Any, Guard, dict[int, Any]]:
    model, optimizer = make()
    states: dict[int, Any] = {}
    with caplog.at_level(logging.WARNING, "trimtab"):
        guard = Guard(model, optimizer, {"policy": NO_RING, "checkpoint_every": 60}, mode="act", run_dir=folder)
        train(guard, model, optimizer, range(1), states)
        assert len([r for r in caplog.records if "no states are kept in memory" in r.message]) == 1  # at the start
        train(guard, model, optimizer, range(1, steps), states)
    assert len([r for r in caplog.records if "no states are kept in memory" in r.message]) == 1
    return model, optimizer, guard, states


def test_without_room_in_memory_and_without_checkpoints_a_few_states_are_kept_in_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, guard, states = own(tmp_path / "run", 240, caplog)
    folder = tmp_path / "run" / "states"
    assert str(folder) in caplog.text
    assert [s.step for s in Checkpointer(folder).list()] == [162, 222]  # 51, 102 (doubled), then every 60
    with pytest.raises(InputError, match="checkpoint=PATH"):
        guard.resume()  # these are none of the user's
    outcome = rewind(guard, before=200)
    assert "the checkpoint step-00000162" in outcome.detail
    assert same(state_of(model, optimizer), states[162])
    train(guard, model, optimizer, range(240, 300))
    assert [s.step for s in Checkpointer(folder).list()] == [162, 282]  # what was bad is gone
    guard.close()
    assert not folder.exists()


def test_without_room_on_disk_it_says_that_there_is_no_going_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
    *_, guard, _ = own(tmp_path / "run", 120, caplog)
    assert "rewinding is not possible; give the guard checkpoint=PATH" in caplog.text
    assert not (tmp_path / "run" / "states").exists()
    assert not rewind(guard, before=100).applied
    guard.close()


def test_with_checkpoints_a_model_too_large_for_memory_is_no_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trimtab"):
        on_disk(tmp_path, steps=20)[2].close()
    assert f"the checkpoints in {tmp_path} are what it goes back to" in caplog.text


def test_an_average_that_cannot_be_saved_costs_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = make()
    shadow = SimpleNamespace(shadow={n: p.detach().clone() for n, p in model.named_parameters()})
    with caplog.at_level(logging.WARNING, "trimtab"):
        guard = Guard(model, optimizer, {"checkpoint_every": 5}, run_dir=False, checkpoint=tmp_path, ema=shadow)
        train(guard, model, optimizer, range(12))
        guard.close()
    assert [s.step for s in Checkpointer(tmp_path).list()] == [5, 10]
    assert "has no state_dict" in caplog.text
