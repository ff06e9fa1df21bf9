"""Saving, certifying, resuming and pruning, as a user of `trimtab.Checkpointer` meets it."""

from __future__ import annotations

import logging
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trimtab import Checkpointer, CheckpointError
from trimtab.checkpoint.retention import Retention, to_delete
from trimtab.core.types import Snapshot


def trained(seed: int = 0, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def bits(model: nn.Module) -> list[bytes]:
    return [v.detach().numpy().tobytes() for v in model.state_dict().values()]


def damage(path: Path, name: str = "model.safetensors") -> None:
    data = bytearray((path / name).read_bytes())
    data[-5] ^= 1
    (path / name).write_bytes(data)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path / "ckpt")
    model, optimizer = trained()
    saved = ckpt.save(7, model=model, optimizer=optimizer, metrics={"loss": 0.5}, extra={"epoch": 2})
    assert (saved.step, saved.state, saved.branch, saved.metrics) == (7, "candidate", 0, {"loss": 0.5})
    assert len(saved.digest) == 64
    other, its = trained(seed=1, steps=1)
    back = ckpt.resume(model=other, optimizer=its)
    assert back is not None
    assert (back.step, back.extra["epoch"]) == (7, 2)
    assert bits(other) == bits(model)
    assert bool(ckpt.verify(7))
    assert ckpt.verify(7).damage == ()


def test_nothing_to_resume_from_is_none(tmp_path: Path) -> None:
    model, optimizer = trained()
    assert Checkpointer(tmp_path).resume(model=model, optimizer=optimizer) is None


def test_a_damaged_one_is_named_and_the_one_before_it_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ckpt = Checkpointer(tmp_path)
    model, optimizer = trained()
    ckpt.save(1, model=model, optimizer=optimizer)
    first = bits(model)
    model2, optimizer2 = trained(seed=2)
    damage(ckpt.save(2, model=model2, optimizer=optimizer2).path)
    assert not ckpt.verify(2)
    assert ckpt.verify(2).damage[0].file == "model.safetensors"
    other, its = trained(seed=3)
    with caplog.at_level(logging.WARNING, "trimtab"):
        back = ckpt.resume(model=other, optimizer=its)
    assert back is not None
    assert back.step == 1
    assert bits(other) == first
    assert "step-00000002" in caplog.text
    assert "model.safetensors" in caplog.text


@pytest.mark.parametrize("where", ["weight", "buffer", "moment", "ema"])
def test_a_non_finite_state_is_quarantined_and_never_resumed_from(tmp_path: Path, where: str) -> None:
    ckpt = Checkpointer(tmp_path)
    model, optimizer = trained()
    ema = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    good = bits(model)
    ckpt.save(1, model=model, optimizer=optimizer, ema=ema)
    with torch.no_grad():
        if where == "weight":
            model[0].weight[0, 0] = math.nan  # type: ignore[index]
        elif where == "buffer":
            model[1].running_var[0] = math.inf  # type: ignore[index, union-attr]
        elif where == "moment":
            next(iter(optimizer.state.values()))["exp_avg_sq"][0] = math.nan
        else:
            next(ema.parameters())[0] = math.nan
    snap = ckpt.save(2, model=model, optimizer=optimizer, ema=ema)
    assert snap.state == "bad"
    assert snap.path.parent.name == "quarantine"
    assert "NaN or Inf" in snap.reason
    assert [s.step for s in ckpt.list()] == [1]
    other, its = trained(seed=4)
    back = ckpt.resume(model=other, optimizer=its, ema=torch.optim.swa_utils.AveragedModel(other, use_buffers=True))
    assert back is not None
    assert back.step == 1
    assert bits(other) == good


def test_cleaning_is_asked_for_marked_and_never_chosen(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path)
    model, optimizer = trained()
    ckpt.save(1, model=model, optimizer=optimizer)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan  # type: ignore[index]
    snap = ckpt.save(2, model=model, optimizer=optimizer, clean=True)
    assert snap.repaired
    assert model[0].weight[0, 0].isnan()  # type: ignore[index]  # the live model is left alone
    other, its = trained(seed=4)
    back = ckpt.resume(model=other, optimizer=its)
    assert back is not None
    assert back.step == 1
    asked = ckpt.resume(model=other, optimizer=its, step=2)
    assert asked is not None
    assert asked.repaired
    assert other[0].weight[0, 0] == 0.0  # type: ignore[index]


def test_candidates_become_good_and_trouble_condemns_the_rest(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, quiet_steps=10, keep_last=9)
    model, optimizer = trained()
    for step in (10, 15, 25):
        ckpt.save(step, model=model, optimizer=optimizer)
    assert [(s.step, s.state) for s in ckpt.list()] == [(10, "good"), (15, "good"), (25, "candidate")]
    ckpt.save(28, model=model, optimizer=optimizer)
    ckpt.condemn(26, "the loss climbed from step 26 on")
    ckpt.quiet(35)
    assert [(s.step, s.state) for s in ckpt.list()] == [(10, "good"), (15, "good"), (25, "good"), (28, "bad")]
    assert ckpt.list()[-1].reason == "the loss climbed from step 26 on"
    again = Checkpointer(tmp_path)  # what was certified stays so for the next process
    assert [s.state for s in again.list()] == ["good", "good", "good", "bad"]
    back = again.resume(model=model, optimizer=optimizer)
    assert back is not None
    assert back.step == 25


def test_good_is_preferred_when_asked(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, quiet_steps=10, keep_last=9)
    model, optimizer = trained()
    for step in (0, 10, 12):
        ckpt.save(step, model=model, optimizer=optimizer)
    objects = {"model": model, "optimizer": optimizer}
    assert [ckpt.resume(prefer=p, **objects).step for p in ("newest", "good")] == [12, 0]  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="prefer is 'best'"):
        ckpt.resume(prefer="best", **objects)


def test_order_is_numeric_and_the_newest_three_are_kept(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, keep_last=3)
    model, optimizer = trained(steps=1)
    for step in range(96, 103):
        ckpt.save(step, model=model, optimizer=optimizer)
    assert [s.step for s in ckpt.list()] == [100, 101, 102]


def test_the_last_good_one_outlives_many_candidates(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, keep_last=2, quiet_steps=1000)
    model, optimizer = trained(steps=1)
    ckpt.save(1, model=model, optimizer=optimizer)
    ckpt.quiet(1001)
    for step in range(1002, 1008):
        ckpt.save(step, model=model, optimizer=optimizer)
    assert [(s.step, s.state) for s in ckpt.list()] == [(1, "good"), (1006, "candidate"), (1007, "candidate")]


def test_best_every_and_budget(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, keep_last=1, keep_best="-loss", keep_every=10)
    model, optimizer = trained(steps=1)
    for step, loss in ((9, 0.5), (10, 0.9), (11, 0.2), (12, math.nan), (13, 0.4)):
        ckpt.save(step, model=model, optimizer=optimizer, metrics={"loss": loss})
    assert [s.step for s in ckpt.list()] == [10, 11, 13]
    tight = Checkpointer(tmp_path / "tight", keep_last=5, max_bytes=1)
    for step in (1, 2, 3):
        tight.save(step, model=model, optimizer=optimizer)
    assert [s.step for s in tight.list()] == [3]


def test_a_step_that_was_saved_before_is_not_overwritten(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path)
    one, its = trained(seed=1)
    two, its2 = trained(seed=2)
    ckpt.save(5, model=one, optimizer=its)
    ckpt.save(5, model=two, optimizer=its2)
    assert [(s.step, s.branch) for s in ckpt.list()] == [(5, 0), (5, 1)]
    other, its3 = trained(seed=3)
    ckpt.resume(model=other, optimizer=its3)
    assert bits(other) == bits(two)


def test_an_asynchronous_save_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, asynchronous=True)
    model, optimizer = trained()
    then = bits(model)
    snap = ckpt.save(1, model=model, optimizer=optimizer)
    with torch.no_grad():
        model[0].weight.zero_()  # type: ignore[union-attr]
    ckpt.wait()
    assert not [t for t in threading.enumerate() if t.name == "trimtab-checkpoint"]
    assert snap.step == 1
    other, its = trained(seed=5)
    ckpt.resume(model=other, optimizer=its)
    assert bits(other) == then


def test_what_fails_in_the_background_is_raised_at_the_next_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = Checkpointer(tmp_path, asynchronous=True)
    model, optimizer = trained()
    monkeypatch.setattr(ckpt, "_write", lambda *args, **kw: (_ for _ in ()).throw(CheckpointError("the disk is full")))
    ckpt.save(1, model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="disk is full"):
        ckpt.wait()
    ckpt.wait()  # told once


def test_the_wrong_model_is_refused_and_left_alone(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path)
    model, optimizer = trained()
    ckpt.save(1, model=model, optimizer=optimizer)
    other = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    before = bits(other)
    with pytest.raises(CheckpointError, match=r"2\.weight"):
        ckpt.resume(model=other, optimizer=torch.optim.AdamW(other.parameters()))
    assert bits(other) == before


def test_a_folder_that_cannot_be_used_is_found_out_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        Checkpointer(tmp_path / "file")
    with pytest.raises(CheckpointError, match="keep_last is 0"):
        Checkpointer(tmp_path / "x", keep_last=0)


@st.composite
def many(draw: Any) -> list[Snapshot]:
    steps = draw(st.lists(st.integers(0, 1000), unique=True, min_size=1, max_size=12))
    states = st.sampled_from(["candidate", "good", "bad"])
    return [
        Snapshot(step=s, path=Path(f"step-{s}"), state=draw(states), digest="", repaired=draw(st.booleans()))
        for s in steps
    ]


@given(many(), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 50)), st.one_of(st.none(), st.integers(0, 9)))
@settings(max_examples=300, deadline=None)
def test_retention_never_deletes_the_last_good_nor_the_newest(
    snapshots: list[Snapshot], last: int, every: int | None, budget: int | None
) -> None:
    sizes = {s.path: 1 for s in snapshots}
    gone = to_delete(snapshots, sizes, Retention(keep_last=last, keep_every=every, max_bytes=budget))
    left = [s for s in snapshots if s not in gone]
    good = [s for s in snapshots if s.state == "good" and not s.repaired]
    usable = [s for s in snapshots if s.state != "bad"]
    assert not good or max(good, key=lambda s: s.step) in left
    assert not usable or max(usable, key=lambda s: s.step) in left
    assert all(s.state != "bad" for s in gone)  # evidence is not deleted by the way
    if budget is None:
        assert len([s for s in left if s.state != "bad"]) >= min(last, len(usable))


def test_a_mask_of_infinities_is_no_trouble(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path)
    model, optimizer = trained()
    model.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    assert ckpt.save(1, model=model, optimizer=optimizer).state == "candidate"
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan  # type: ignore[index]
    assert ckpt.save(2, model=model, optimizer=optimizer, clean=True).repaired
    other, its = trained(seed=1)
    other.register_buffer("mask", torch.zeros(4, 4))
    ckpt.resume(model=other, optimizer=its, step=2)
    assert torch.equal(other.mask, model.mask)  # type: ignore[arg-type]


def test_a_non_finite_state_is_quarantined_in_the_background_too(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, asynchronous=True)
    model, optimizer = trained()
    ckpt.save(1, model=model, optimizer=optimizer)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan  # type: ignore[index]
    ckpt.save(2, model=model, optimizer=optimizer)
    ckpt.wait()
    assert [s.step for s in ckpt.list()] == [1]
    assert [p.name for p in (tmp_path / "quarantine").iterdir() if p.is_dir()] == ["step-00000002"]
