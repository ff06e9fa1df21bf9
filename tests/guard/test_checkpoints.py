"""A guard with checkpoints: when it saves, what it certifies, where it goes on, and what a signal does."""

from __future__ import annotations

import logging
import math
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.matrix import sampled
from trimtab import Checkpointer, CheckpointError, ConfigError, Guard, InputError
from trimtab.checkpoint import state
from trimtab.checkpoint.loader import ResumableLoader
from trimtab.checkpoint.signals import SignalWatch
from trimtab.core.types import Verdict
from trimtab.record.reader import read_run


def parts(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(guard: Guard, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, nan_at: int = -1) -> None:
    for i in range(steps):
        x = torch.randn(16, 4)
        y = x.sum(1, keepdim=True)
        if i == nan_at:
            x[0, 0] = math.nan
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        guard.step(loss)


def test_it_saves_as_often_as_asked_and_goes_on_from_there(tmp_path: Path) -> None:
    model, optimizer = parts()
    settings = {"checkpoint_every": 10}
    with Guard(model, optimizer, settings, run_dir=False, checkpoint=tmp_path) as guard:
        assert guard.resume() is None
        train(guard, model, optimizer, 35)
    assert [s.step for s in Checkpointer(tmp_path).list()] == [10, 20, 30]
    other, its = parts(seed=1)
    with Guard(other, its, settings, run_dir=False, checkpoint=tmp_path) as guard:
        snapshot = guard.resume()
        assert snapshot is not None
        assert snapshot.step == 30
        assert guard.health()["steps"] == {"": 30}
        train(guard, other, its, 1)
        assert guard.health()["steps"] == {"": 31}


def test_quiet_certifies_and_trouble_condemns(tmp_path: Path) -> None:
    model, optimizer = parts()
    ckpt = Checkpointer(tmp_path, quiet_steps=8, keep_last=20)
    with Guard(model, optimizer, {"checkpoint_every": 5}, run_dir=False, checkpoint=ckpt) as guard:
        train(guard, model, optimizer, 30, nan_at=22)
    states = {s.step: s.state for s in ckpt.list()}
    assert states[5] == states[10] == "good"
    assert states[20] == "candidate" or states[20] == "good"
    assert all(s.state != "bad" for s in ckpt.list() if s.step < 22)


def test_a_state_that_went_bad_is_never_the_one_to_come_back_to(tmp_path: Path) -> None:
    model, optimizer = parts()
    ckpt = Checkpointer(tmp_path)
    with Guard(model, optimizer, {"checkpoint_every": 4, "mode": "observe"}, run_dir=False, checkpoint=ckpt) as guard:
        train(guard, model, optimizer, 20, nan_at=10)
    assert max(s.step for s in ckpt.list()) <= 10
    other, its = parts(seed=1)
    with Guard(other, its, run_dir=False, checkpoint=ckpt) as guard:
        assert guard.resume() is not None
    assert all(torch.isfinite(v).all() for v in other.state_dict().values())


def test_an_exception_leaves_a_checkpoint_behind(tmp_path: Path) -> None:
    model, optimizer = parts()

    def lucky() -> None:
        with Guard(model, optimizer, run_dir=False, checkpoint=tmp_path) as guard:
            train(guard, model, optimizer, 7)
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        lucky()
    assert [s.step for s in Checkpointer(tmp_path).list()] == [7]


def test_a_disk_that_fails_costs_the_checkpoint_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = parts()
    ckpt = Checkpointer(tmp_path)

    def full(*args: object, **kwargs: object) -> None:
        raise CheckpointError("No space left on device")

    monkeypatch.setattr(ckpt, "_write", full)
    with (
        caplog.at_level(logging.WARNING, "trimtab"),
        Guard(model, optimizer, {"checkpoint_every": 5}, run_dir=False, checkpoint=ckpt) as guard,
    ):
        train(guard, model, optimizer, 20)
    told = [r.message for r in caplog.records if "could not be saved" in r.message]
    assert len(told) == 1
    assert "No space left" in told[0]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    model, optimizer = parts()
    with pytest.raises(InputError, match="checkpoint is a int"):
        Guard(model, optimizer, run_dir=False, checkpoint=3)


PROGRAM = """
    import sys, time, torch
    from torch import nn
    from trimtab import Guard
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, {"checkpoint_every": 0}, run_dir=False, checkpoint=sys.argv[1]) as guard:
        for i in range(2000):
            x = torch.randn(8, 4)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            guard.step(loss)
            time.sleep(0.01)
            if i == 5:
                print("going", flush=True)
"""


@pytest.mark.parametrize(
    ("number", "code"), sampled({"TERM": (signal.SIGTERM, 143), "INT": (signal.SIGINT, -signal.SIGINT)}, "TERM")
)
def test_a_signal_saves_before_it_ends_the_process(tmp_path: Path, number: int, code: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, str(script), str(tmp_path / "ckpt")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "going\n"
        child.send_signal(number)
        _, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    (snapshot,) = Checkpointer(tmp_path / "ckpt").list()
    assert snapshot.step >= 6
    assert bool(Checkpointer(tmp_path / "ckpt").verify(snapshot.step))


def test_the_second_signal_acts_at_once() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        watch = SignalWatch()
        signal.raise_signal(signal.SIGTERM)
        assert (watch.pending, seen) == (signal.SIGTERM, [])
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        watch.remove()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_ignored_signal_stays_ignored() -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        watch = SignalWatch()
        for number in before:
            assert signal.getsignal(number) is signal.SIG_IGN
            signal.raise_signal(number)
        assert watch.pending is None
        watch.remove()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_after_the_last_step_is_not_lost(tmp_path: Path) -> None:
    """It is noted, and no forward pass comes any more that would answer it."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = Guard(model, optimizer, checkpoint=tmp_path / "ckpt", run_dir=tmp_path / "run")
        for x in torch.randn(3, 8, 4):
            loss = model(x).square().mean()
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
        signal.raise_signal(signal.SIGTERM)
        assert seen == []
        guard.close()
        assert seen == [signal.SIGTERM]
        (snapshot,) = Checkpointer(tmp_path / "ckpt").list()
        assert snapshot.step == 3
        closing = read_run(tmp_path / "run").closing
        assert closing is not None
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_is_answered_once_the_state_is_saved() -> None:
    watch = SignalWatch()
    try:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0)
        with pytest.raises(KeyboardInterrupt):
            watch.answer()
        assert watch.pending is None
    finally:
        watch.remove()


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that are told by their first value, with noise drawn when they are fetched."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(i)]), torch.randn(3)])


class Killed(BaseException):
    """Stands for the end of a process: nothing of the loop runs any more."""


def epochs(folder: Path, seed: int, stop_at: int | None, log: list[float]) -> list[bytes]:
    """Train two epochs with everything that has a state, resuming if there is something to resume from."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=64)
    loader = ResumableLoader(torch.utils.data.DataLoader(Numbers(), batch_size=4, shuffle=True))
    settings = {"checkpoint_every": 3}
    guard = Guard(model, optimizer, settings, scheduler=scheduler, loader=loader, run_dir=False, checkpoint=folder)
    try:
        guard.resume()
        while loader.epoch < 2:
            for x in loader:
                log += x[:, 0].tolist()
                loss = model(x).square().mean() / 4
                loss.backward()
                if len(log) // 4 % 2 == 0:  # accumulates over two batches
                    guard.step(loss)
                    scheduler.step()
                    optimizer.zero_grad()
                if stop_at is not None and len(log) // 4 == stop_at:
                    raise Killed
    except Killed:
        guard._keepers._all.clear()  # a killed process closes nothing
    guard.close()
    states = [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]
    return [v.detach().numpy().tobytes() for v in states]


@pytest.mark.parametrize("stop_at", [9, 16, 17, 27])
def test_a_run_that_was_cut_short_goes_on_bit_for_bit(tmp_path: Path, stop_at: int) -> None:
    whole: list[float] = []
    wanted = epochs(tmp_path / "whole", 0, None, whole)
    first: list[float] = []
    epochs(tmp_path / "cut", 0, stop_at, first)
    assert Checkpointer(tmp_path / "cut").list()
    rest: list[float] = []
    found = epochs(tmp_path / "cut", 1, None, rest)
    assert whole[-len(rest) :] == rest  # the same samples in the same order
    assert found == wanted


def test_a_checkpoint_that_is_still_being_written_is_condemned_as_well(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, asynchronous=True, keep_last=20)
    model, optimizer = parts()
    started, write = threading.Event(), ckpt._write

    def slow(*args: Any, **kwargs: Any) -> Any:
        started.wait(10)
        return write(*args, **kwargs)

    ckpt._write = slow  # type: ignore[method-assign]
    settings = {"checkpoint_every": 25, "checkpoint_on_signal": False}
    with Guard(model, optimizer, settings, run_dir=False, checkpoint=ckpt) as guard:
        train(guard, model, optimizer, 26)  # saved after 25 steps, and not written yet
        threading.Timer(0.2, started.set).start()
        train(guard, model, optimizer, 1, nan_at=0)
        finding = guard.findings[0]
        next(iter(guard._keepers)).heard(
            Verdict(step=26, seen_at=26, findings=(replace(finding, evidence={"onset": 24.0}),))
        )
    assert [(s.step, s.state) for s in ckpt.list()] == [(25, "bad")]


def test_saving_again_soon_after_trouble_certifies_nothing(tmp_path: Path) -> None:
    model, _ = parts()
    ckpt = Checkpointer(tmp_path, quiet_steps=20, keep_last=20)
    ckpt.save(10, model=model)
    ckpt.condemn(25, "a loss of NaN", 28)
    ckpt.save(32, model=model)  # 22 steps after the first, 4 after the trouble
    assert [s.state for s in ckpt.list()] == ["candidate", "candidate"]
    ckpt.save(48, model=model)
    assert [s.state for s in ckpt.list()] == ["good", "candidate", "candidate"]


# -- the keyword, the loader, the epoch -------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [Guard, Guard.attach])
def test_how_often_is_a_keyword(tmp_path: Path, build: Any) -> None:
    model, optimizer = parts()
    with build(model, optimizer, {"checkpoint_every": 50}, run_dir=False, checkpoint=tmp_path, checkpoint_every=4) as g:
        assert g.config.checkpoint_every == 4
        train(g, model, optimizer, 9)
    assert [s.step for s in Checkpointer(tmp_path).list()] == [4, 8]
    with pytest.raises(ConfigError, match="checkpoint_every = -1; expected a whole number of at least 0"):
        build(model, optimizer, run_dir=False, checkpoint_every=-1)


@pytest.mark.parametrize("given", ["nothing", "plain", "resumable"])
def test_a_guard_says_once_that_the_data_will_not_be_resumed(
    tmp_path: Path, given: str, caplog: pytest.LogCaptureFixture
) -> None:
    state._warn_no_position.cache_clear()
    model, optimizer = parts()
    plain = torch.utils.data.DataLoader(Numbers(), batch_size=4)
    loader = {"nothing": None, "plain": plain, "resumable": ResumableLoader(plain)}[given]
    with (
        caplog.at_level(logging.WARNING, "trimtab"),
        Guard(model, optimizer, run_dir=False, loader=loader, checkpoint=tmp_path, checkpoint_every=2) as guard,
    ):
        train(guard, model, optimizer, 7)
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == (given != "resumable"), told
    assert all("ResumableLoader" in line for line in told)
    caplog.clear()
    with Guard(model, optimizer, run_dir=False):  # without checkpoints there is nothing to resume
        pass
    assert caplog.text == ""


def counted(folder: Path, stop_at: int | None, *, resumable: bool) -> tuple[list[int], int]:
    """Train three epochs of four batches as the how-to says; returns the epoch of each batch, and the last count."""
    model, optimizer = parts()
    loader: Any = torch.utils.data.DataLoader(Numbers(), batch_size=16)
    loader = ResumableLoader(loader) if resumable else loader
    guard = Guard(model, optimizer, run_dir=False, loader=loader, checkpoint=folder, checkpoint_every=1)
    seen: list[int] = []
    try:
        guard.resume()
        for epoch in range(guard.epoch, 3):
            for x in loader:
                loss = model(x).square().mean()
                loss.backward()
                guard.step(loss)
                optimizer.zero_grad()
                seen.append(epoch)
                if len(seen) == stop_at:
                    raise Killed
            if not resumable:
                guard.epoch = epoch + 1
    except Killed:
        next(iter(guard._keepers)).checkpointer.close()
        guard._keepers._all.clear()  # a killed process closes nothing
    guard.close()
    return seen, guard.epoch


@pytest.mark.parametrize("stop_at", sampled({str(i): i for i in (1, 3, 4, 5, 8, 9, 11, 12)}, "1 4 9 12"))
def test_a_resumed_loop_over_epochs_trains_as_long_as_it_would_have(tmp_path: Path, stop_at: int) -> None:
    whole, epoch = counted(tmp_path / "whole", None, resumable=True)
    assert (whole, epoch) == ([0] * 4 + [1] * 4 + [2] * 4, 3)
    first, _ = counted(tmp_path / "cut", stop_at, resumable=True)
    rest, epoch = counted(tmp_path / "cut", None, resumable=True)
    lost = 1  # the last step is saved before the next batch is fetched, which never was
    assert first[: stop_at - lost] + rest == whole
    assert epoch == 3


@pytest.mark.parametrize("stop_at", [3, 6, 9])
def test_without_a_resumable_loader_the_epoch_is_what_was_set(tmp_path: Path, stop_at: int) -> None:
    counted(tmp_path, stop_at, resumable=False)
    rest, epoch = counted(tmp_path, None, resumable=False)
    begun = (stop_at - 1) // 4
    assert rest == [e for e in range(begun, 3) for _ in range(4)]  # the epoch that was cut short is begun again
    assert epoch == 3


def test_the_epoch_is_part_of_the_state() -> None:
    model, optimizer = parts()
    with Guard(model, optimizer, run_dir=False) as guard:
        assert guard.epoch == 0
        guard.epoch = 7
        kept = guard.state_dict()
        guard.epoch = 0
        guard.load_state_dict(kept)
        assert guard.epoch == 7
        del kept["epoch"]  # saved by trimtab 0.1.0
        guard.load_state_dict(kept)
        assert guard.epoch == 0


# -- with and without a guard -----------------------------------------------------------------------------------------


def several(seed: int, kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    one, two = torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[2].parameters(), lr=0.01, momentum=0.9)
    whole = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, {"one": whole, "list of one": [whole], "dict of one": {"main": whole}}.get(
        kind, {"list": [one, two], "dict": {"body": one, "head": two}}.get(kind)
    )


def of(optimizer: Any) -> list[Any]:
    return (
        list(optimizer.values())
        if isinstance(optimizer, dict)
        else list(optimizer)
        if isinstance(optimizer, list)
        else [optimizer]
    )


def trained(model: nn.Module, optimizer: Any, guard: Guard | None, steps: int = 5) -> None:
    for _ in range(steps):
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if guard is not None:
            guard.observe(loss=loss)
        for one in of(optimizer):
            one.step()
            one.zero_grad()


def held(model: nn.Module, optimizer: Any) -> list[bytes]:
    moments = [
        v for one in of(optimizer) for s in one.state.values() for v in s.values() if isinstance(v, torch.Tensor)
    ]
    return [v.detach().numpy().tobytes() for v in (*model.state_dict().values(), *moments)]


KINDS = [
    ("one", "one"),
    ("one", "list of one"),
    ("dict of one", "one"),
    ("list", "dict"),
    ("dict", "list"),
    ("dict", "dict"),
]


@pytest.mark.parametrize(("first", "second"), KINDS)
@pytest.mark.parametrize("guarded", ["saved", "resumed", "both"])
def test_checkpoints_with_and_without_a_guard_are_the_same(
    tmp_path: Path, first: str, second: str, guarded: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = several(0, first)
    if guarded == "resumed":
        trained(model, optimizer, None)
        with Checkpointer(tmp_path) as ckpt:
            ckpt.save(5, model=model, optimizer=optimizer, gradients=False)
    else:
        with Guard.attach(model, optimizer, run_dir=False, checkpoint=tmp_path) as guard:
            trained(model, optimizer, guard)
            next(iter(guard._keepers)).save(5)
    wanted = held(model, optimizer)
    other, its = several(1, second)
    if guarded == "saved":
        caplog.clear()
        with caplog.at_level(logging.INFO, "trimtab"):
            snapshot = Checkpointer(tmp_path).resume(model=other, optimizer=its)
        assert "guard: in the checkpoint, and not asked for: its baselines stay as they are here" in caplog.text
        assert not [r for r in caplog.records if r.levelno > logging.INFO and "guard" in r.getMessage()]
        assert snapshot is not None
    elif guarded == "both" and first != second and "of one" not in first + second:
        return  # a guard knows its lanes by their labels, and says so
    else:
        with Guard.attach(other, its, run_dir=False, checkpoint=tmp_path, checkpoint_every=10) as guard:
            snapshot = guard.resume()
            assert snapshot is not None
            assert set(guard.health()["steps"].values()) == {5}
            trained(other, its, guard, 0)
            assert held(other, its) == wanted
            trained(other, its, guard, 12)
            trained(other, its, guard, 1)
        assert [s.step for s in Checkpointer(tmp_path).list()] == [5, 15]  # ten steps after the last one
        return
    assert snapshot.step == 5
    assert held(other, its) == wanted


def test_a_part_that_was_not_saved_is_an_error_that_says_what_was(tmp_path: Path) -> None:
    model, optimizer = parts()
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(3, model=model, optimizer=optimizer)
    other, its = parts(seed=1)
    before = held(other, its)
    scheduler = torch.optim.lr_scheduler.StepLR(its, 10)
    with Guard(other, its, run_dir=False, scheduler=scheduler, checkpoint=tmp_path) as guard:
        with pytest.raises(CheckpointError, match="no scheduler; it holds model, optimizer, gradients, rng"):
            guard.resume()
        assert held(other, its) == before
        assert guard.resume(strict=False) is not None
    assert held(other, its) != before


def test_a_guard_goes_on_with_the_run_it_is_told_to(tmp_path: Path) -> None:
    model, optimizer = parts()
    runs = []
    for steps in (6, 3):
        with Guard(model, optimizer, run_dir=False, checkpoint=tmp_path, checkpoint_every=2) as guard:
            train(guard, model, optimizer, steps)
        runs.append(Checkpointer(tmp_path).list()[-1].run)
    with Guard(model, optimizer, run_dir=False, checkpoint=tmp_path, checkpoint_every=2) as guard:
        assert guard.resume().step == 2  # type: ignore[union-attr]
    with Guard(model, optimizer, run_dir=False, checkpoint=tmp_path, checkpoint_every=2) as guard:
        found = guard.resume(run=runs[0])
        assert found is not None
        assert (found.step, found.run) == (4, runs[0])
        assert guard.resume(step=2, run=runs[0]).run == runs[0]  # type: ignore[union-attr]


@pytest.mark.parametrize("resumable", [True, False])
def test_several_models_in_a_dict_are_saved_and_resumed(tmp_path: Path, resumable: bool) -> None:
    """Nobody calls the dict itself: it is saved when one of its models is called, or when the loader says so."""

    def build(seed: int) -> tuple[dict[str, nn.Module], dict[str, Any], Any]:
        torch.manual_seed(seed)
        models: dict[str, nn.Module] = {"maker": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}
        optimizers: dict[str, Any] = {k: torch.optim.Adam(m.parameters(), lr=0.01) for k, m in models.items()}
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 2)), batch_size=8)
        return models, optimizers, ResumableLoader(loader) if resumable else loader

    def bits(models: dict[str, nn.Module]) -> list[bytes]:
        return [v.numpy().tobytes() for m in models.values() for v in m.state_dict().values()]

    models, optimizers, loader = build(0)
    given = {"loader": loader} if resumable else {}
    with Guard(models, optimizers, run_dir=False, checkpoint=tmp_path, checkpoint_every=3, **given) as guard:
        for (x,) in loader:
            for name in optimizers:
                loss = models["critic"](models["maker"](x)).square().mean()
                loss.backward()
                guard.step(loss, optimizer=name)
                for one in optimizers.values():
                    one.zero_grad()
        next(iter(guard._keepers)).save(8)
    saved = Checkpointer(tmp_path).list()
    assert len(saved) >= 3
    assert saved[-1].step == 8
    others, its, there = build(1)
    assert Checkpointer(tmp_path).resume(model=others, optimizer=its) is not None
    assert bits(others) == bits(models)
    others, its, there = build(2)
    given = {"loader": there} if resumable else {}
    with Guard(others, its, run_dir=False, checkpoint=tmp_path, **given) as guard:
        assert guard.resume() is not None
    assert bits(others) == bits(models)
    with pytest.raises(CheckpointError, match="'x' is a int"):
        Checkpointer(tmp_path).save(9, model={"x": 3})
