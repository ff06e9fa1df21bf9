"""The public face of Guard, line by line as design.md promises it."""

from __future__ import annotations

import copy
import io
import json
import logging
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trimtab
from tests.guard.conftest import batches, mse, same, small_model, snapshot
from trimtab import AttachError, ConfigError, Guard, InputError, TrainingStopped, TrimtabError
from trimtab.record.reader import read_run

Train = Callable[..., None]


def adam(model: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, **kwargs)


def test_quickstart_records_and_returns_verdicts(model: nn.Module, tmp_path: Path) -> None:
    optimizer = adam(model)
    seen: list[trimtab.Finding] = []
    with Guard(model, optimizer, clip=1.0, on_finding=seen.append) as guard:
        verdicts = []
        for batch in batches(20, bad=(7,)):
            loss = mse(model, batch)
            loss.backward()
            verdicts.append(guard.step(loss, batch))
            optimizer.zero_grad()
    assert [v.step for v in verdicts if v is not None] == list(range(20))
    assert [f.name for f in guard.findings] == ["nonfinite-input", "nonfinite-loss", "nonfinite-gradient"]
    assert seen == guard.findings
    assert guard.rejected == 1
    assert guard.verdict is verdicts[-1]
    assert guard.run_dir is not None
    assert guard.run_dir.parent == Path("trimtab_runs")
    run = read_run(guard.run_dir)
    assert len(list(run.samples())) == 20
    assert run.closing is not None
    assert run.closing.reason == "closed"
    assert next(iter(run.samples())).scalars["batch_size"] == 16


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_lag_counts_steps(model: nn.Module, lag: int) -> None:
    optimizer = adam(model)
    guard = Guard(model, optimizer, lag=lag, run_dir=False)
    known = []
    for batch in batches(10):
        loss = mse(model, batch)
        loss.backward()
        verdict = guard.step(loss)
        known.append(None if verdict is None else verdict.step)
        assert verdict is None or verdict.seen_at - verdict.step == lag
    assert known == [None] * lag + list(range(10 - lag))
    guard.close()
    assert guard.verdict is not None
    assert guard.verdict.step == 9


def test_observe_mode_touches_nothing(model: nn.Module, train: Train) -> None:
    optimizer = adam(model)
    guard = Guard(model, optimizer, mode="observe", clip=1e-3, run_dir=False)
    data = batches(12, bad=(10,))
    train(guard, model, optimizer, data[:10])
    plain = small_model()
    plain_optimizer = adam(plain)
    for batch in data[:10]:
        mse(plain, batch).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert same(snapshot(model, optimizer), snapshot(plain, plain_optimizer))
    train(guard, model, optimizer, data[10:])
    assert guard.rejected == 0
    assert not all(torch.isfinite(t).all() for t in model.state_dict().values())
    assert "nonfinite-loss" in [f.name for f in guard.findings]


def test_raise_mode_stops_with_the_documented_sentence_and_clean_weights(model: nn.Module, train: Train) -> None:
    optimizer = adam(model)
    guard = Guard(model, optimizer, mode="raise")
    with pytest.raises(ValueError, match="Training stopped due to NaN/Inf loss") as caught:
        train(guard, model, optimizer, batches(10, bad=(5,)))
    assert isinstance(caught.value, TrainingStopped)
    assert caught.value.verdict is not None
    assert caught.value.verdict.step == 5
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())
    assert guard.run_dir is not None
    closing = read_run(guard.run_dir).closing
    assert closing is not None
    assert closing.reason == "stopped"
    optimizer.step()  # no hook is left


def test_raise_mode_through_attach_says_gradients_where_no_loss_was_told(model: nn.Module) -> None:
    optimizer = adam(model)
    Guard.attach(model, optimizer, mode="raise", run_dir=False)
    (bad,) = batches(1, bad=(0,))
    mse(model, bad).backward()
    with pytest.raises(TrainingStopped, match="NaN/Inf gradients"):
        optimizer.step()


def test_act_mode_cuts_the_rate_for_steps_only_and_recovers(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    guard = Guard(model, optimizer, mode="act", config={"policy": {"cooldown": 5, "recover": 10}})
    used = []
    optimizer.register_step_pre_hook(lambda o, a, k: used.append(o.param_groups[0]["lr"]))
    for batch in batches(60, bad=(10,)):
        loss = mse(model, batch)
        loss.backward()
        guard.step(loss)
        optimizer.zero_grad()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert used[10] == pytest.approx(0.1)  # the rejected step itself
    assert used[11] == pytest.approx(0.05)
    assert used[15] == pytest.approx(0.05)
    assert 0.05 < used[18] < 0.1
    assert used[-1] == pytest.approx(0.1)
    guard.close()
    assert guard.run_dir is not None
    outcomes = read_run(guard.run_dir).outcomes
    assert [(o.action.kind, o.applied) for o in outcomes] == [("skip", True), ("cut_lr", True), ("cut_lr", True)]
    assert "20 steps later" in outcomes[-1].detail  # what came of it


def test_a_cut_rate_is_restored_even_when_the_step_raises(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard.attach(model, optimizer, mode="act", run_dir=False)
    for batch in batches(12, bad=(10,)):
        loss = mse(model, batch)
        loss.backward()
        guard.observe(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
    assert "step" not in vars(optimizer)  # it would be pickled
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    p = next(model.parameters())
    p.grad = torch.ones_like(p)
    original = torch._foreach_add_

    def boom(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    torch._foreach_add_ = boom  # type: ignore[assignment]
    try:
        for group in optimizer.param_groups:
            group["foreach"] = True
        with pytest.raises(MemoryError):
            optimizer.step()
    finally:
        torch._foreach_add_ = original
    assert optimizer.param_groups[0]["lr"] == 0.1
    guard.close()
    assert "step" not in vars(optimizer)


def test_close_removes_every_hook(model: nn.Module) -> None:
    optimizer = adam(model)
    scaler, before = torch.amp.GradScaler("cpu"), torch.amp.GradScaler.step
    guard = Guard(model, optimizer, scaler=scaler, run_dir=False)
    assert model._forward_pre_hooks
    assert optimizer._optimizer_step_pre_hooks
    assert torch.amp.GradScaler.step is not before
    guard.close()
    guard.close()
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert torch.amp.GradScaler.step is before
    assert "step" not in vars(scaler)
    assert "step" not in vars(optimizer)
    with pytest.raises(InputError, match="closed"):
        guard.step(torch.zeros(()))
    Guard(model, optimizer, run_dir=False).close()  # and it can be guarded again


def test_attaching_twice_is_an_error(model: nn.Module) -> None:
    optimizer = adam(model)
    with Guard.attach(model, optimizer, run_dir=False), pytest.raises(AttachError, match="already guarded"):
        Guard(model, optimizer, run_dir=False)


def test_disable_makes_it_a_no_op(model: nn.Module, monkeypatch: pytest.MonkeyPatch, train: Train) -> None:
    monkeypatch.setenv("TRIMTAB_DISABLE", "1")
    optimizer = adam(model)
    before = snapshot(model)
    guard = Guard(model, optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    train(guard, model, optimizer, batches(3))
    assert not same(before, snapshot(model))
    assert guard.findings == []
    assert guard.run_dir is None
    assert guard.validate(1.0) is None
    guard.observe(loss=1.0)
    assert guard.health()["overall_healthy"]
    guard.state_dict()
    guard.close()
    assert not Path("trimtab_runs").exists()


def test_a_deep_copied_or_pickled_model_carries_nothing_of_the_guard(model: nn.Module, train: Train) -> None:
    optimizer = adam(model)
    with Guard(model, optimizer, run_dir=False) as guard:
        train(guard, model, optimizer, batches(3))
        twin = copy.deepcopy(model)
        thawed = pickle.loads(pickle.dumps(model))
        before = snapshot(model)
        for other in (twin, thawed):
            other(torch.randn(4, 8))
        assert same(before, snapshot(model))
        train(guard, model, optimizer, batches(3))
    assert guard.rejected == 0
    torch.save(optimizer.state_dict(), io.BytesIO())


def test_validate_is_recorded_and_judged_in_place(model: nn.Module, train: Train) -> None:
    optimizer = adam(model)
    with Guard(model, optimizer, lag=1) as guard:
        train(guard, model, optimizer, batches(5))
        guard.validate(0.5, accuracy=0.9)
        train(guard, model, optimizer, batches(5))
        guard.validate(torch.tensor(0.4))
    assert guard.run_dir is not None
    run = read_run(guard.run_dir)
    steps, losses = run.series("val_loss", phase="val")
    assert steps.tolist() == [4, 9]
    assert losses.tolist() == pytest.approx([0.5, 0.4])
    assert run.series("val/accuracy", phase="val")[1].tolist() == [0.9]


def test_health_names_what_is_open(model: nn.Module, train: Train) -> None:
    optimizer = adam(model)
    guard = Guard(model, optimizer, run_dir=False)
    data = batches(6, bad=(4,))
    train(guard, model, optimizer, data[:5])
    sick = guard.health()
    assert sick["overall_healthy"] is sick["gradients_healthy"] is sick["losses_healthy"] is False
    assert sick["parameters_healthy"] is sick["model_healthy"] is True
    assert sick["open"] == ["DATA001", "LOSS001", "GRAD001"]
    train(guard, model, optimizer, data[5:])
    well = guard.health()
    assert well["overall_healthy"] is True
    assert well["rejected"] == 1
    guard.close()


def judged(guard: Guard) -> dict[str, Any]:
    """The state without the raw scalars: the probes of a fresh guard know nothing of the step before their first."""
    state = guard.state_dict()
    for brain in state["brains"].values():
        del brain["window"]["past"]
    return state


def test_state_dict_is_plain_data_and_goes_on_exactly(model: nn.Module, train: Train) -> None:
    data = batches(80, bad=(60,))
    optimizer = adam(model)
    whole = Guard(model, optimizer, mode="act", run_dir=False)
    train(whole, model, optimizer, data)
    whole.close()
    second = small_model()
    optimizer = adam(second)
    first_half = Guard(second, optimizer, mode="act", run_dir=False)
    train(first_half, second, optimizer, data[:50])
    state = json.loads(json.dumps(first_half.state_dict()))
    first_half.close()
    second_half = Guard(second, optimizer, mode="act", run_dir=False)
    second_half.load_state_dict(state)
    train(second_half, second, optimizer, data[50:])
    assert repr(second_half.findings) == repr(whole.findings)  # repr: NaN evidence is not equal to itself
    assert judged(second_half) == judged(whole)
    assert same(snapshot(second), snapshot(model))
    with pytest.raises(InputError, match="same optimizers"):
        second_half.load_state_dict({**state, "brains": {"x": {}}})
    second_half.close()


class TestSeveralOptimizers:
    def build(self, **kwargs: Any) -> tuple[nn.ModuleDict, dict[str, torch.optim.Optimizer], Guard]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"g": nn.Linear(8, 4), "d": nn.Linear(4, 1)})
        optimizers = {
            "g": torch.optim.Adam(model["g"].parameters(), lr=0.01),
            "d": torch.optim.SGD(model["d"].parameters(), lr=0.01, momentum=0.9),
        }
        return model, optimizers, Guard(model, optimizers, **kwargs)

    def test_each_counts_its_own_steps(self) -> None:
        model, optimizers, guard = self.build()
        for i in range(6):
            loss = model["d"](model["g"](torch.randn(4, 8))).square().mean()
            loss.backward()
            guard.step(loss, optimizer="d")
            if i % 2 == 0:
                guard.step(loss, optimizer=optimizers["g"])
            for o in optimizers.values():
                o.zero_grad()
        guard.close()
        assert guard.health()["steps"] == {"g": 3, "d": 6}
        assert guard.run_dir is not None
        run = read_run(guard.run_dir)
        assert run.series("loss", optimizer="d")[0].tolist() == list(range(6))
        assert run.series("loss", optimizer="g")[0].tolist() == list(range(3))

    def test_one_call_steps_all_and_a_bad_one_is_named(self) -> None:
        model, _, guard = self.build(run_dir=False)
        loss = model["d"](model["g"](torch.full((4, 8), math.nan))).mean()
        loss.backward()
        guard.step(loss, optimizer="all")
        assert guard.rejected == 2
        assert {f.optimizer for f in guard.findings} == {"g", "d"}
        with pytest.raises(InputError, match="key of 'g', 'd'"):
            guard.step(loss, optimizer="q")
        guard.close()

    def test_hooks_share_one_loss_between_optimizers(self) -> None:
        model, optimizers, guard = self.build()
        for _ in range(2):
            loss = model["d"](model["g"](torch.randn(4, 8))).square().mean()
            loss.backward()
            guard.observe(loss=loss)
            for o in optimizers.values():
                o.step()
                o.zero_grad()
        guard.close()
        assert guard.run_dir is not None
        run = read_run(guard.run_dir)
        assert run.series("loss", optimizer="g")[1].tolist() == run.series("loss", optimizer="d")[1].tolist()


class TestBadInput:
    def test_model(self) -> None:
        with pytest.raises(InputError, match="has no parameters"):
            Guard(nn.ReLU(), adam(nn.Linear(1, 1)))
        with pytest.raises(InputError, match=r"expected a torch\.nn\.Module"):
            Guard(3, adam(nn.Linear(1, 1)))  # type: ignore[arg-type]

    def test_optimizer(self, model: nn.Module) -> None:
        with pytest.raises(InputError, match="belong to the model"):
            Guard(model, adam(nn.Linear(1, 1)))
        with pytest.raises(InputError, match="scheduler"):
            Guard(model, torch.optim.lr_scheduler.ConstantLR(adam(model)))
        with pytest.raises(InputError, match="without param_groups"):
            Guard(model, object())
        with pytest.raises(InputError, match="empty"):
            Guard(model, [])
        one = adam(model)
        with pytest.raises(InputError, match="twice"):
            Guard(model, [one, one])
        assert not one._optimizer_step_pre_hooks

    @pytest.mark.parametrize(
        ("loss", "says"),
        [
            (torch.ones(3), "shape"),
            (1.5, "not loss.item"),
            (None, "NoneType"),
            ("x", "str"),
            (torch.ones((), dtype=torch.complex64), "complex"),
        ],
    )
    def test_loss(self, model: nn.Module, loss: Any, says: str) -> None:
        optimizer = adam(model)
        with Guard(model, optimizer, run_dir=False) as guard:
            mse(model, batches(1)[0]).backward()
            before = snapshot(model)
            grad = next(model.parameters()).grad
            with pytest.raises(InputError, match=says):
                guard.step(loss)
            assert same(before, snapshot(model))
            assert next(model.parameters()).grad is grad
            with pytest.raises(InputError):
                guard.observe(loss=torch.ones(3))
            guard.step(torch.ones(1))  # one value in any shape is a loss

    def test_config(self, model: nn.Module) -> None:
        with pytest.raises(ConfigError, match="did you mean 'clip'"):
            Guard(model, adam(model), {"clpi": 1.0})
        with pytest.raises(ConfigError, match="did you mean 'act'"):
            Guard(model, adam(model), mode="acts")
        with pytest.raises(ConfigError, match="there is no preset 'x'"):
            Guard(model, adam(model), preset="x")
        with pytest.raises(ConfigError, match="there is no rule"):
            Guard(model, adam(model), {"ignore": ["GRAD999"]})
        with pytest.raises(InputError, match="checkpoints"):
            Guard(model, adam(model), run_dir=False).resume()

    def test_every_error_is_of_one_tree(self) -> None:
        for name in trimtab.__all__:
            value = getattr(trimtab, name)
            if isinstance(value, type) and issubclass(value, Exception):
                assert issubclass(value, TrimtabError)

    def test_unwritable_run_directory(
        self, model: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture, train: Train
    ) -> None:
        (tmp_path / "file").write_text("")
        optimizer = adam(model)
        with caplog.at_level(logging.WARNING, "trimtab"):
            guard = Guard(model, optimizer, run_dir=tmp_path / "file" / "run")
            train(guard, model, optimizer, batches(5, bad=(3,)))
            guard.close()
        assert guard.rejected == 1
        assert guard.run_dir is None
        assert sum("cannot record" in r.getMessage() for r in caplog.records) == 1

    def test_callbacks_that_raise(self, model: nn.Module, caplog: pytest.LogCaptureFixture, train: Train) -> None:
        def broken(_: object) -> None:
            raise KeyError("mine")

        class Sink:
            def write(self, record: object) -> None:
                raise OSError("disk on fire")

            def close(self) -> None:
                raise OSError("still on fire")

        optimizer = adam(model)
        with caplog.at_level(logging.WARNING, "trimtab"):
            guard = Guard(model, optimizer, on_finding=broken, sinks=[Sink()], run_dir=False)
            train(guard, model, optimizer, batches(5, bad=(3,)))
            guard.close()
        assert guard.rejected == 1
        assert sum("on_finding" in r.getMessage() for r in caplog.records) == 1

    def test_the_guards_own_failure_lets_training_go_on(
        self, model: nn.Module, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, train: Train
    ) -> None:
        from trimtab.sample.measure import reference as measure

        optimizer = adam(model)
        guard = Guard(model, optimizer, run_dir=False)
        before = snapshot(model)
        monkeypatch.setattr(measure, "norms", lambda _: 1 / 0)
        with caplog.at_level(logging.ERROR, "trimtab"):
            train(guard, model, optimizer, batches(3))
        assert len(caplog.records) == 1
        assert "training goes on" in caplog.records[0].getMessage()
        assert not same(before, snapshot(model))
        guard.close()


@pytest.mark.parametrize("lag", [1, 3])
def test_raise_mode_with_lag_tells_the_first_reason(model: nn.Module, train: Train, lag: int) -> None:
    optimizer = adam(model)
    guard = Guard(model, optimizer, mode="raise", lag=lag, run_dir=False)
    with pytest.raises(TrainingStopped) as caught:
        train(guard, model, optimizer, batches(12, bad=(5, 6, 7)))
    verdict = caught.value.verdict
    assert verdict is not None
    assert (verdict.step, verdict.seen_at) == (5, 5 + lag)
    assert not optimizer._optimizer_step_pre_hooks


def test_raise_mode_tells_at_close_what_was_still_under_way(model: nn.Module) -> None:
    optimizer = adam(model)
    guard = Guard(model, optimizer, mode="raise", lag=3, run_dir=False)
    (bad,) = batches(1, bad=(0,))
    loss = mse(model, bad)
    loss.backward()
    guard.step(loss)
    with pytest.raises(TrainingStopped, match="NaN/Inf loss"):
        guard.close()
    assert not optimizer._optimizer_step_pre_hooks


def test_validation_before_the_first_step(model: nn.Module, train: Train) -> None:
    optimizer = adam(model)
    with Guard(model, optimizer) as guard:
        guard.validate(2.5)
        train(guard, model, optimizer, batches(2))
    assert guard.run_dir is not None
    assert read_run(guard.run_dir).series("val_loss", phase="val")[1].tolist() == [2.5]


def test_a_tensor_learning_rate_is_recorded_as_it_was(model: nn.Module) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    with Guard(model, optimizer, lag=3) as guard:
        for batch in batches(6):
            loss = mse(model, batch)
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"].mul_(0.5)
    assert guard.run_dir is not None
    rates = read_run(guard.run_dir).series("lr/0")[1].tolist()
    assert rates == pytest.approx([0.1 * 0.5**i for i in range(6)])


@pytest.mark.parametrize("outer", [True, False], ids=["wrapper guarded", "module guarded"])
def test_compiled_models(model: nn.Module, outer: bool) -> None:
    """`fullgraph=True` refuses any graph break: the guard's hook must not cause one."""
    fast = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = adam(model)
    with Guard(fast if outer else model, optimizer, run_dir=False) as guard:  # type: ignore[arg-type]
        for i, batch in enumerate(batches(8, bad=(5,))):
            before = snapshot(model, optimizer)
            loss = mse(fast, batch)  # type: ignore[arg-type]
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
            if i == 5:
                assert same(before, snapshot(model, optimizer))
    assert guard.rejected == 1


def test_a_directory_that_holds_a_run_is_not_written_into(tmp_path: Path, train: Train) -> None:
    folders = []
    for _ in range(3):
        model = small_model()
        optimizer = adam(model)
        with Guard(model, optimizer, run_dir=tmp_path / "run") as guard:
            train(guard, model, optimizer, batches(3))
        assert guard.run_dir is not None
        folders.append(guard.run_dir.name)
        assert len(list(read_run(guard.run_dir).samples())) == 3
    assert folders == ["run", "run-2", "run-3"]


def test_what_a_script_raises_between_steps_is_no_finding(model: nn.Module, tmp_path: Path) -> None:
    optimizer = adam(model)
    guard = Guard(model, optimizer, run_dir=tmp_path)

    def script() -> None:
        with guard:
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            guard.step(loss)
            raise KeyError("a column of a table that the script writes")

    with pytest.raises(KeyError):
        script()
    assert guard.findings == []
    closing = read_run(tmp_path).closing
    assert closing is not None
    assert closing.reason == "KeyError"


def test_an_exception_is_on_record_however_the_guard_is_closed(model: nn.Module) -> None:
    logits = nn.Linear(8, 3)
    optimizer = adam(logits)
    with (
        pytest.raises(IndexError, match="out of bounds"),
        Guard(logits, optimizer, run_dir=False) as guard,
    ):
        nn.functional.cross_entropy(logits(torch.randn(4, 8)), torch.full((4,), 7))
    assert [(f.name, f.step) for f in guard.findings] == [("label-range", 0)]
    guard = Guard(model, adam(model), run_dir=False)
    model(torch.randn(4, 8)).sum().backward()
    try:
        raise KeyError("some other trouble")
    except KeyError:
        guard.close()
    assert [f.name for f in guard.findings] == ["step-exception"]
    assert "some other trouble" in guard.findings[0].message
    guard = Guard(model, adam(model), run_dir=False)
    try:
        list(torch.utils.data.DataLoader([1, "two"], batch_size=2))  # PyTorch itself refuses a batch
    except TypeError:
        guard.close()
    assert [f.name for f in guard.findings] == ["step-exception"]
    guard = Guard(model, adam(model), run_dir=False)
    try:
        next(iter(()))
    except StopIteration:  # the end of an epoch, not an error
        guard.close()
    assert guard.findings == []
