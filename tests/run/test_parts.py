"""The parts of `trimtab run`, each on its own: finding models, seeing losses and clipping, being told of an import."""

from __future__ import annotations

import copy
import gc
import math
import sys
import types
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from trimtab import Guard, TrainingStopped
from trimtab.core.contain import Contained
from trimtab.guard.loop_clipping import wrap_clipping
from trimtab.guard.loop_losses import Losses
from trimtab.run.auto_guard import AutoGuard
from trimtab.run.children import when_imported
from trimtab.run.discover import Census, LooseParameters, owners_of, seen_from_outside, uncalled
from trimtab.run.guarded_training import GuardedTraining


class Net(nn.Module):
    """A body, a norm that no optimizer need know of, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.norm(self.body(x))))
        return out


class Outer(nn.Module):
    """A module around another, which computes the loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x).square().mean()
        return out


# -- finding models --------------------------------------------------------------------------------------------------


def test_the_tightest_owner_comes_first_and_those_around_it_follow() -> None:
    net = Net()
    outer = Outer(net)
    assert owners_of(list(net.parameters())) == [net, outer]
    assert owners_of(list(net.head.parameters())) == [net.head, net, outer]


def test_tensors_without_a_module_get_a_stand_in() -> None:
    w = torch.zeros(3, requires_grad=True)
    (found,) = owners_of([w])
    assert isinstance(found, LooseParameters)
    assert [p is w for p in found.parameters()] == [True]
    assert owners_of([w])[0] is not found  # a stand-in is no owner


def test_a_compiled_form_is_preferred_because_its_calls_are_seen() -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager")
    owners = owners_of(list(net.parameters()))
    assert seen_from_outside(owners) is compiled
    assert seen_from_outside([net]) is None


def test_the_uncalled_twin_shares_everything_but_the_hooks() -> None:
    net = Net()
    twin = uncalled(net)
    twin.register_forward_pre_hook(lambda *a: pytest.fail("the model was hooked"))
    net(torch.randn(2, 4))
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in net.named_parameters()]
    assert all(a is b for a, b in zip(twin.parameters(), net.parameters(), strict=True))
    assert all(a is b for a, b in zip(twin.buffers(), net.buffers(), strict=True))


def test_parts_side_by_side_stand_together() -> None:
    encoder, norm, head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
    (found,) = owners_of([*encoder.parameters(), *norm.parameters(), *head.parameters()])
    assert list(found.children()) == [encoder, norm, head]
    assert len(list(found.buffers())) == 3
    with Tower() as tower:
        optimizer = torch.optim.SGD([*encoder.parameters(), *norm.parameters(), *head.parameters()], lr=0.1)
        for i in range(4):
            x = torch.full((8, 4), math.nan) if i == 2 else torch.randn(8, 4)
            optimizer.zero_grad()
            head(norm(encoder(x))).square().mean().backward()
            optimizer.step()
    assert [f.rejected for f in tower.trainings] == [1]
    assert all(torch.isfinite(b).all() for b in norm.buffers())


# -- seeing losses ---------------------------------------------------------------------------------------------------


W = torch.zeros(2, requires_grad=True)
"""What the optimizer under the key 1 moves."""


@pytest.fixture
def losses() -> Iterator[Losses]:
    backward, scale = torch.autograd.backward, torch.amp.GradScaler.scale
    W.grad = None
    found = Losses(lambda: {1: None if W.grad is None else (id(W.grad), W.grad._version)}, Contained())
    found.listen()
    yield found
    found.remove()
    assert torch.autograd.backward is backward
    assert torch.amp.GradScaler.scale is scale


def loss(value: float) -> Tensor:
    return W.sum() + value


def told(losses: Losses, optimizer: int = 1, guard: int = 9) -> list[float]:
    return [v.item() for v in losses.take(optimizer, guard)]


def test_losses_are_those_since_the_last_step(losses: Losses) -> None:
    loss(6.0).backward()
    torch.autograd.backward([loss(10.0)])
    assert told(losses) == [6.0, 10.0]
    losses.ended(closure=False)
    assert told(losses) == []  # this guard knows
    assert told(losses, guard=8) == [6.0, 10.0]  # a second optimizer steps on the same backward
    loss(14.0).backward()
    assert told(losses) == [14.0]


def test_a_loss_that_gave_an_optimizer_no_gradient_is_not_its_own(losses: Losses) -> None:
    other = torch.ones(1, requires_grad=True)
    (3.0 * other).sum().backward()
    assert told(losses) == []
    assert told(losses, optimizer=2) == [3.0]  # one that was not known at the time


def test_what_a_closure_did_is_told_by_the_closure(losses: Losses) -> None:
    told(losses)
    loss(6.0).backward()
    losses.ended(closure=True)
    assert told(losses) == []


def test_scaled_losses_are_told_unscaled(losses: Losses) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss(6.0)).backward()
    (scaler.scale(loss(6.0)) / 4).backward()
    loss(6.0).backward()
    assert told(losses) == [6.0, 1.5, 6.0]


def test_what_is_no_loss_is_not_told(losses: Losses) -> None:
    (W * 2).backward(torch.ones(2))
    assert told(losses) == []


# -- seeing clipping -------------------------------------------------------------------------------------------------


def parameters(*grads: list[float]) -> list[nn.Parameter]:
    out = []
    for grad in grads:
        p = nn.Parameter(torch.zeros(len(grad)))
        p.grad = torch.tensor(grad)
        out.append(p)
    return out


def clipped(params: list[nn.Parameter], *, guarded: bool, max_norm: float = 1.0) -> tuple[float, list[Any]]:
    told: list[Any] = []

    def tell(which: list[Tensor], norm: Tensor | float) -> bool:
        told.append(float(norm))
        return guarded

    undo = wrap_clipping(tell, Contained())
    try:
        norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    finally:
        undo()
    return float(norm), told


@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_finite_gradients_are_clipped_bit_for_bit_as_by_pytorch(grads: list[list[float]]) -> None:
    mine, theirs = parameters(*grads), parameters(*grads)
    norm, told = clipped(mine, guarded=True)
    wanted = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert norm == float(wanted)
    assert told == [float(wanted)]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))  # type: ignore[arg-type]


def test_a_nan_stays_where_it_arose_if_the_update_is_kept_out_anyway() -> None:
    mine = parameters([1.0, 2.0], [math.nan])
    norm, told = clipped(mine, guarded=True)
    assert math.isnan(norm)
    assert math.isnan(told[0])
    assert mine[0].grad is not None
    assert mine[0].grad.tolist() == [1.0, 2.0]
    spread = parameters([1.0, 2.0], [math.nan])
    clipped(spread, guarded=False)
    assert spread[0].grad is not None
    assert spread[0].grad.isnan().all()  # PyTorch's way, where nobody guards


def test_huge_finite_gradients_are_clipped_and_not_zeroed() -> None:
    mine = parameters([3e20, 0.0], [4e20])
    norm, told = clipped(mine, guarded=True)
    assert norm == math.inf  # what the script is used to get
    assert told == [pytest.approx(5e20)]
    assert [p.grad.tolist() for p in mine if p.grad is not None] == [
        [pytest.approx(0.6), 0.0],
        [pytest.approx(0.8)],
    ]


def warnings_of_no_gradients() -> list[str]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.nn.utils.clip_grad_norm_((p for p in ()), 1.0)
    return [str(one.message) for one in heard]


def test_clipping_errors_and_warnings_are_pytorchs_own() -> None:
    alone = warnings_of_no_gradients()  # newer releases warn of an empty generator
    undo = wrap_clipping(lambda params, norm: True, Contained())
    try:
        with pytest.raises(RuntimeError, match="non-finite"):
            torch.nn.utils.clip_grad_norm_(parameters([math.inf]), 1.0, error_if_nonfinite=True)
        assert warnings_of_no_gradients() == alone
        one = parameters([3.0, 4.0])[0]
        assert float(torch.nn.utils.clip_grad_norm_(one, 1.0, norm_type=math.inf)) == 4.0
    finally:
        undo()


# -- being told of an import -----------------------------------------------------------------------------------------


def test_an_import_is_told_once_it_has_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    when_imported("late_module", lambda: seen.append(sys.modules["late_module"].value))
    assert seen == []
    import late_module  # type: ignore[import-not-found]

    assert seen == [1]
    when_imported("late_module", lambda: seen.append(2))
    assert seen == [1, 2]
    del sys.modules["late_module"]
    assert isinstance(late_module, types.ModuleType)


def test_a_module_that_is_missing_stays_missing() -> None:
    when_imported("no_such_module_at_all", lambda: pytest.fail("it was not imported"))
    with pytest.raises(ModuleNotFoundError):
        import no_such_module_at_all  # type: ignore[import-not-found]  # noqa: F401


def test_the_census_knows_modules_from_their_birth_and_keeps_none_alive() -> None:
    before = Net()
    census = Census()
    inits = nn.Module.__init__, nn.Module.__setstate__
    stop = census.take()
    born, copied = Net(), copy.deepcopy(before)
    assert all(any(m is known for known in census.modules()) for m in (before, born, copied))
    gone = weakref.ref(born)
    del born
    gc.collect()
    assert gone() is None
    num = len(census.modules())
    stop()
    assert (nn.Module.__init__, nn.Module.__setstate__) == inits
    Net()
    assert len(census.modules()) <= num


# -- the guards of a script ------------------------------------------------------------------------------------------


class Tower:
    """A auto_guard in this very process, and what it reported."""

    def __init__(self, **settings: Any) -> None:
        self.trainings: list[GuardedTraining] = []
        self.auto_guard = AutoGuard({"run_dir": False, **settings}, self.trainings.append)

    def __enter__(self) -> Tower:
        self.auto_guard.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.auto_guard.finish()


def train(net: nn.Module, optimizer: Any, num: int = 5, nan_at: int = -1, clip: float | None = None) -> None:
    for i in range(num):
        x = torch.randn(8, 4)
        if i == nan_at:
            x[0, 0] = math.nan
        optimizer.zero_grad()
        out = net(x)
        (out if out.dim() == 0 else out.square().mean()).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()


def test_who_stops_watching_leaves_no_wrapper_and_goes_on_with_the_same_guard() -> None:
    hooks = torch_optimizer._global_optimizer_pre_hooks
    before = torch.autograd.backward, torch.optim.Optimizer.__init__, len(hooks)
    with Tower() as tower:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        train(net, optimizer)
        tower.auto_guard.stop_watching()
        assert (torch.autograd.backward, torch.optim.Optimizer.__init__, len(hooks)) == before
        tower.auto_guard.start()
        train(net, optimizer)
    (training,) = tower.trainings
    assert sum(training.steps.values()) == 10


def test_everything_is_as_before_once_it_has_finished() -> None:
    before = (
        torch.optim.Optimizer.__init__,
        torch.amp.GradScaler.step,
        torch.nn.utils.clip_grad_norm_,
        torch.autograd.backward,
        torch.jit.script,
        Guard.__init__,
    )
    net = Net()
    with Tower() as tower:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        train(net, optimizer)
    after = (
        torch.optim.Optimizer.__init__,
        torch.amp.GradScaler.step,
        torch.nn.utils.clip_grad_norm_,
        torch.autograd.backward,
        torch.jit.script,
        Guard.__init__,
    )
    assert after == before
    assert not net._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert [(f.model, dict(f.steps), f.reason) for f in tower.trainings] == [("Net", {"": 5}, "closed")]


def test_buffers_that_no_optimizer_knows_of_are_protected() -> None:
    net = Net()
    with Tower() as tower:
        train(net, torch.optim.SGD(net.head.parameters(), lr=0.1), nan_at=2)
    assert tower.trainings[0].rejected == 1
    assert all(torch.isfinite(b).all() for b in net.buffers())


def test_a_guard_is_collected_with_its_optimizer_and_its_record_completed(tmp_path: Path) -> None:
    with Tower(run_dir=tmp_path / "run") as tower:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        train(net, optimizer)
        gone = weakref.ref(net)
        del net, optimizer
        gc.collect()
        assert gone() is None
    assert [dict(f.steps) for f in tower.trainings] == [{"": 5}]
    assert '"reason":"closed"' in (tmp_path / "run" / "run.jsonl").read_text().replace(" ", "")


def test_a_second_stage_on_the_same_model_is_a_record_of_its_own() -> None:
    net = Net()
    with Tower() as tower:
        first = torch.optim.SGD(net.head.parameters(), lr=0.1)
        train(net, first, num=3)
        second = torch.optim.SGD(net.parameters(), lr=0.1)
        train(net, second, num=4)
        train(net, first, num=2)  # both in use after all
        train(net, second, num=1)
    assert sorted(sum(f.steps.values()) for f in tower.trainings) == [2, 3, 5]


def test_the_norm_before_a_scripts_own_clipping_is_the_one_on_record() -> None:
    samples: list[Any] = []

    class Keep:
        def write(self, record: Any) -> None:
            samples.append(record)

        def close(self) -> None:
            pass

    net = Net()
    with Tower(sinks=[Keep()]):
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), clip=1e-3)
    scalars = [s.scalars for s in samples if hasattr(s, "scalars")]
    assert all(s["grad_norm"] > 1e-3 for s in scalars)
    assert all(s["grad_norm"] * s["clip_coef"] == pytest.approx(1e-3, rel=1e-3) for s in scalars)


def test_stopping_passes_through_and_other_failures_do_not(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    with Tower(mode="raise"), pytest.raises(TrainingStopped, match="NaN/Inf loss"):
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), nan_at=1)
    with Tower(mode="no such mode"):
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), num=3)
    told = [r.message for r in caplog.records if "not guarded" in r.message]
    assert len(told) == 1
    assert "no such mode" in told[0]


def test_a_copied_model_carries_no_door() -> None:
    net = Net()
    with Tower():
        torch.optim.SGD(net.parameters(), lr=0.1)
        twin = copy.deepcopy(net)
        twin(torch.randn(2, 4))
        assert all("trimtab" not in type(h).__module__ for h in twin._forward_pre_hooks.values())
