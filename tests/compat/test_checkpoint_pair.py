"""`save_checkpoint` and `load_checkpoint` (D8): what they promise, and what the originals got wrong."""

from __future__ import annotations

import argparse
import enum
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trimtab import CheckpointError
from trimtab.checkpoint.directory import Disk
from trimtab.checkpoint.format import container
from trimtab.compat.checkpoint_pair import load_checkpoint, read_checkpoint, save_checkpoint
from trimtab.core.errors import InputError


def trained(seed: int = 0, steps: int = 3) -> tuple[Any, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    train(model, optimizer, scheduler, steps)
    return model, optimizer, scheduler


def train(model: Any, optimizer: Any, scheduler: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        scheduler.step()


def bits(*objects: Any) -> list[Any]:
    found: list[Any] = []

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value.detach().clone().numpy().tobytes())
        elif isinstance(value, dict):
            for key, one in value.items():
                found.append(key)
                walk(one)
        elif isinstance(value, list | tuple):
            for one in value:
                walk(one)
        else:
            found.append(value)

    for one in objects:
        walk(one.state_dict())
    return found


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 0x10
    file.write_bytes(data)


# -- the promise of the documents -----------------------------------------------------------------------------------


def test_checkpoint_safety(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """D13's test of this name: a poisoned state is refused, the last good one stays, and a load is all or nothing."""
    model, optimizer, scheduler = trained()
    good = save_checkpoint("best", model, optimizer, scheduler)
    before = bits(model, optimizer, scheduler)
    train(model, optimizer, scheduler, 1)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    poisoned = bits(model)
    bad = save_checkpoint("best", model, optimizer, scheduler)
    assert (good.state, bad.state) == ("candidate", "bad")
    assert bad.path == Path("quarantine/best")
    assert "model.0.weight" in bad.reason
    assert "model.0.weight" in caplog.text
    assert bits(model) == poisoned  # nothing was "cleaned" in the live model
    assert container.inspect(Path("best")).digest == good.digest
    assert load_checkpoint("best", model, optimizer, scheduler) is True
    assert bits(model, optimizer, scheduler) == before


@pytest.mark.parametrize("where", ["weight", "buffer", "moment", "ema"])
def test_d8_every_kind_of_nonfinite_state_is_refused(where: str) -> None:
    model, optimizer, scheduler = trained()
    ema = torch.optim.swa_utils.AveragedModel(model)
    with torch.no_grad():
        target = {
            "weight": model[3].weight,
            "buffer": model[1].running_var,
            "moment": optimizer.state[model[0].weight]["exp_avg_sq"],
            "ema": ema.module[0].bias,
        }[where]
        target.view(-1)[0] = math.inf
    snap = save_checkpoint("best", model, optimizer, scheduler, ema=ema)
    assert snap.state == "bad"
    assert not Path("best").exists()
    names = {"weight": "3.weight", "buffer": "running_var", "moment": "exp_avg_sq.0.weight", "ema": "ema.module.0.bias"}
    assert names[where] in snap.reason


def test_d8_without_the_optimizer_its_moments_do_not_matter() -> None:
    model, optimizer, scheduler = trained()
    optimizer.state[model[0].weight]["exp_avg"].fill_(math.nan)
    assert save_checkpoint("best", model, optimizer, scheduler, include_optimizer=False).state == "candidate"
    assert "optimizer_state_dict" not in read_checkpoint("best")
    assert "scheduler_state_dict" not in read_checkpoint("best")


def test_d4_clean_is_only_on_request_marked_and_loud(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = trained()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    snap = save_checkpoint("best", model, optimizer, clean=True)
    assert snap.repaired
    assert "repaired" in caplog.text
    assert model[0].weight[0, 0].isnan()
    assert read_checkpoint("best")["repaired"] is True
    other, its, _ = trained(seed=1)
    caplog.clear()
    assert load_checkpoint("best", other, its) is True
    assert other[0].weight[0, 0] == 0.0
    assert "repaired" in caplog.text


def test_d8_clean_leaves_a_finite_state_unmarked() -> None:
    model, _, _ = trained()
    assert save_checkpoint("best", model, clean=True).repaired is False


def test_d8_a_mask_of_infinities_is_no_trouble() -> None:
    model, _, _ = trained()
    model.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
    assert save_checkpoint("best", model).state == "candidate"
    assert load_checkpoint("best", model) is True
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    assert save_checkpoint("best", model, clean=True).repaired
    assert read_checkpoint("best")["model_state_dict"]["mask"].isneginf().sum() == 3


# -- what is in it --------------------------------------------------------------------------------------------------


class Kind(enum.Enum):
    COSINE = "cosine"


@dataclass
class Inner:
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass
class UltraConfig:
    learning_rate: float = 1e-3
    kind: Kind = Kind.COSINE
    out: Path = Path("runs/a")
    inner: Inner = field(default_factory=Inner)


def test_d8_the_documented_names_are_read_back() -> None:
    model, optimizer, scheduler = trained()
    history = {"train_history": [{"loss": 0.5}, {"loss": math.nan}], "val_history": [0.7, 0.6]}
    saved = {"step": 7, "metrics": {"loss": 0.25}, "extra": {"epoch": 3}}
    save_checkpoint("best", model, optimizer, scheduler, config=UltraConfig(), **history, **saved)
    content = read_checkpoint("best")
    assert {"model_state_dict", "config", "train_history", "val_history"} <= set(content)
    expected = {"learning_rate": 1e-3, "kind": "cosine", "out": "runs/a", "inner": {"betas": (0.9, 0.999)}}
    assert content["config"] == expected
    assert content["val_history"] == [0.7, 0.6]
    assert math.isnan(content["train_history"][1]["loss"])
    assert (content["step"], content["epoch"], content["metrics"]) == (7, 3, {"loss": 0.25})
    other, its, sched = trained(seed=1)
    other.load_state_dict(content["model_state_dict"])  # plain torch can use all three
    its.load_state_dict(content["optimizer_state_dict"])
    sched.load_state_dict(content["scheduler_state_dict"])
    assert bits(other, its, sched) == bits(model, optimizer, scheduler)


def test_d8_buffers_beside_the_state_dict_come_back_but_are_not_in_model_state_dict() -> None:
    model, _, _ = trained()
    model.register_buffer("count", torch.ones(2), persistent=False)
    save_checkpoint("best", model)
    model.count.zero_()
    model.load_state_dict(read_checkpoint("best")["model_state_dict"])
    assert load_checkpoint("best", model)
    assert model.count.tolist() == [1, 1]


def test_d8_a_namespace_is_a_config_too_and_an_object_is_refused_by_name() -> None:
    model, _, _ = trained()
    save_checkpoint("best", model, config=argparse.Namespace(lr=0.1))
    assert read_checkpoint("best")["config"] == {"lr": 0.1}
    with pytest.raises(CheckpointError, match=r"config\.thing"):
        save_checkpoint("best", model, config={"thing": object()})
    assert read_checkpoint("best")["config"] == {"lr": 0.1}
    with pytest.raises(InputError, match="config"):
        save_checkpoint("best", model, extra={"config": 1})


def test_d8_training_goes_on_exactly_as_if_it_had_not_stopped() -> None:
    model, optimizer, scheduler = trained()
    save_checkpoint("best", model, optimizer, scheduler)
    train(model, optimizer, scheduler, 4)
    other, its, sched = trained(seed=9)
    assert load_checkpoint("best", other, its, sched)
    train(other, its, sched, 4)  # dropout and batches draw the same numbers
    assert bits(other, its, sched) == bits(model, optimizer, scheduler)


def test_d8_load_optimizer_false_touches_only_the_weights(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, scheduler = trained()
    save_checkpoint("best", model, optimizer, scheduler)
    other, its, sched = trained(seed=9)
    untouched, random = bits(its, sched), torch.get_rng_state()
    assert load_checkpoint("best", other, its, sched, load_optimizer=False)
    assert bits(other) == bits(model)
    assert bits(its, sched) == untouched
    assert bool((torch.get_rng_state() == random).all())
    assert caplog.text == ""


def test_d8_what_was_not_saved_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, scheduler = trained()
    save_checkpoint("best", model, optimizer, scheduler, include_optimizer=False)
    assert load_checkpoint("best", model, optimizer, scheduler)
    assert "optimizer" in caplog.text
    assert "moments" in caplog.text


# -- where it goes --------------------------------------------------------------------------------------------------


def test_d8_a_bare_name_and_folders_that_do_not_exist_yet(tmp_path: Path) -> None:
    model, _, _ = trained()
    assert save_checkpoint("best", model).path == Path("best")
    assert save_checkpoint(tmp_path / "a" / "b" / "best.pt", model).state == "candidate"
    assert load_checkpoint(str(tmp_path / "a" / "b" / "best.pt"), model)


@pytest.mark.parametrize("path", ["", ".", "..", ".hidden"])
def test_d8_no_name_is_refused(path: str) -> None:
    with pytest.raises(CheckpointError, match="is no name for a checkpoint"):
        save_checkpoint(path, nn.Linear(1, 1))


def test_d8_somebody_elses_folder_or_file_is_never_replaced() -> None:
    Path("src").mkdir()
    Path("src/main.py").write_text("x")
    Path("old.pt").write_text("x")
    for path, told in (("src", "main.py"), ("old.pt", "is a file")):
        with pytest.raises(CheckpointError, match=told):
            save_checkpoint(path, nn.Linear(1, 1))
    assert Path("src/main.py").read_text() == "x"
    Path("empty").mkdir()
    assert save_checkpoint("empty", nn.Linear(1, 1)).state == "candidate"


def test_d8_a_link_stays_and_what_it_names_is_replaced() -> None:
    model, _, _ = trained()
    save_checkpoint("real", model, config=1)
    os.symlink("real", "latest")
    save_checkpoint("latest", model, config=2)
    assert Path("latest").is_symlink()
    assert read_checkpoint("real")["config"] == 2


def test_d8_saving_again_replaces_and_leaves_nothing_behind() -> None:
    model, optimizer, _ = trained()
    for number in range(3):
        save_checkpoint("best", model, optimizer, config=number)
    assert read_checkpoint("best")["config"] == 2
    assert os.listdir() == ["best"]


# -- crashes and damage ---------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What happens to a process that is killed: nothing more."""


def dying(after: int) -> Disk:
    """A disk on which nothing happens any more after so many operations, as for a killed process."""
    done = 0

    def gate(operation: str, path: Path) -> None:
        nonlocal done
        done += 1
        if done > after:
            raise Killed

    return Disk(gate)


def test_d8_killed_at_any_operation_there_is_a_whole_one_to_load(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)

    def weights(value: float) -> dict[str, Any]:
        return {"model": {"weight": torch.full((1, 2), value), "bias": torch.full((1,), value)}}

    outcomes = set()
    for number in range(200):
        place = tmp_path / str(number) / "best"
        container.replace_with(place, weights(1.0), step=1, meta={})
        try:
            container.replace_with(place, weights(2.0), step=2, meta={}, disk=dying(number))
        except Killed:
            pass
        else:
            assert os.listdir(place.parent) == ["best"]
            break
        assert load_checkpoint(place, model) is True, number
        value = model.weight[0, 0].item()
        assert value in (1.0, 2.0)
        assert bool((model.weight == value).all())
        assert model.bias.item() == value
        outcomes.add(value)
        save_checkpoint(place, model)  # the next save puts things right
        assert [name for name in os.listdir(place.parent) if not name.startswith(".tmp")] == ["best"]
    else:
        pytest.fail("a save never ended")
    assert number > 20
    assert outcomes == {1.0, 2.0}


def test_d8_a_full_disk_leaves_the_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = trained()
    save_checkpoint("best", model, config=1)

    def full(self: Disk, fd: int, data: Any, path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "write", full)
        with pytest.raises(CheckpointError, match="No space left"):
            save_checkpoint("best", model, config=2)
    assert read_checkpoint("best")["config"] == 1
    assert os.listdir() == ["best"]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "manifest.json", "COMMIT"])
def test_d8_a_damaged_file_is_named_and_nothing_is_touched(file: str, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, scheduler = trained()
    save_checkpoint("best", model, optimizer, scheduler)
    flip(Path("best") / file)
    other, its, sched = trained(seed=1)
    before, random = bits(other, its, sched), torch.get_rng_state()
    assert load_checkpoint("best", other, its, sched) is False
    assert bits(other, its, sched) == before
    assert bool((torch.get_rng_state() == random).all())
    assert file in caplog.text
    with pytest.raises(CheckpointError, match=file):
        read_checkpoint("best")


def test_d8_nothing_to_load_is_false_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert load_checkpoint("nowhere", nn.Linear(1, 1)) is False
    assert "nowhere does not exist" in caplog.text


def test_d8_what_is_in_quarantine_is_not_loaded(caplog: pytest.LogCaptureFixture) -> None:
    model, _, _ = trained()
    with torch.no_grad():
        model[0].bias[0] = math.nan
    bad = save_checkpoint("best", model)
    assert load_checkpoint(bad.path, model) is False
    assert "0.bias" in caplog.text
    save_checkpoint("best", model)
    assert os.listdir("quarantine") == ["best"]


def test_d8_another_model_is_refused_with_every_difference_and_nothing_changed() -> None:
    model, optimizer, _ = trained()
    save_checkpoint("best", model, optimizer)
    other = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    before = bits(other)
    with pytest.raises(CheckpointError, match=r"3\.weight"):
        load_checkpoint("best", other, torch.optim.AdamW(other.parameters()))
    assert bits(other) == before


def test_d8_a_checkpoint_of_a_checkpointer_loads_too(tmp_path: Path) -> None:
    from trimtab import Checkpointer

    model, optimizer, scheduler = trained()
    snap = Checkpointer(tmp_path / "all").save(5, model=model, optimizer=optimizer, scheduler=scheduler)
    other, its, sched = trained(seed=1)
    assert load_checkpoint(snap.path, other, its, sched)
    assert bits(other, its, sched) == bits(model, optimizer, scheduler)
    assert read_checkpoint(snap.path)["step"] == 5


# -- files of others ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "model_state_dict", "state_dict", "model"])
def test_d8_a_foreign_file_with_a_state_dict_loads(key: str | None) -> None:
    model, _, _ = trained()
    state = {f"module.{name}": one for name, one in model.state_dict().items()}  # as data-parallel models save it
    torch.save(state if key is None else {key: state, "epoch": 3}, "old.pth")
    other, _, _ = trained(seed=1)
    assert load_checkpoint("old.pth", other, load_optimizer=False) is True
    assert bits(other) == bits(model)
    assert set(read_checkpoint("old.pth")["model_state_dict"]) == set(model.state_dict())


def test_d8_a_foreign_file_with_optimizer_and_scheduler_loads_whole() -> None:
    model, optimizer, scheduler = trained()
    content = {
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler_state_dict": scheduler.state_dict(),
        "train_history": [1.0],
    }
    torch.save(content, "old.pt")
    other, its, sched = trained(seed=1)
    assert load_checkpoint("old.pt", other, its, sched) is True
    assert bits(other, its, sched) == bits(model, optimizer, scheduler)
    assert read_checkpoint("old.pt")["train_history"] == [1.0]


class Payload:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("owned",)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"model": Payload()}, "would run"),
        ({"epoch": 3}, "no state dict"),
        ([1, 2], "holds a list"),
        ({"weight": torch.full((1, 1), math.nan), "bias": torch.zeros(1)}, "NaN or Inf"),
    ],
)
def test_d8_a_foreign_file_that_cannot_be_used_is_false(
    content: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(content, "old.pt")
    model = nn.Linear(1, 1)
    before = bits(model)
    assert load_checkpoint("old.pt", model) is False
    assert told in caplog.text
    assert bits(model) == before
    assert not Path("owned").exists()


def test_d8_a_foreign_file_of_another_model_is_refused() -> None:
    torch.save(nn.Linear(2, 1).state_dict(), "old.pt")
    with pytest.raises(CheckpointError, match="weight"):
        load_checkpoint("old.pt", nn.Linear(3, 1), load_optimizer=False)
