"""Going back in memory: what is put back and what is not, in place, without the detectors noticing."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trimtab import Guard
from trimtab.checkpoint.loader import Quarantine, content_hash
from trimtab.core.config import PolicyConfig
from trimtab.core.policy import Ladder
from trimtab.core.types import Action, Finding, Outcome, Severity, Verdict
from trimtab.guard.batches import Batches, ids_in, samples_in
from trimtab.guard.rollback import Branches, Copied, RecentStates
from trimtab.remedies import BUILTIN

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
}


def make(kind: str = "adam") -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    norm = nn.Identity() if kind == "plain" else nn.BatchNorm1d(12)
    model = nn.Sequential(nn.Linear(6, 12), norm, nn.ReLU(), nn.Linear(12, 1))
    return model, OPTIMIZERS.get(kind, OPTIMIZERS["adam"])(model.parameters())


def data(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = data(step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
    return losses


def state_of(model: nn.Module, optimizer: Any) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_from_a_copy_as_it_did_the_first_time(kind: str) -> None:
    model, optimizer = make(kind)
    train(model, optimizer, range(5))
    copied = Copied(model, {"": optimizer}, None)
    kept = copied.take()
    before = state_of(model, optimizer)
    where = [p.data_ptr() for p in model.parameters()]
    first = train(model, optimizer, range(5, 12))
    assert copied.put_back(*kept) == 0
    assert same(state_of(model, optimizer), before)
    assert [p.data_ptr() for p in model.parameters()] == where
    assert train(model, optimizer, range(5, 12)) == first
    assert not same(state_of(model, optimizer), before)  # the copy is one: what came later did not reach it
    copied.put_back(*kept)
    assert same(state_of(model, optimizer), before)


def test_lost_and_new_state_is_put_right() -> None:
    model, optimizer = make()
    train(model, optimizer, range(5))
    copied = Copied(model, {"": optimizer}, None)
    kept, before = copied.take(), state_of(model, optimizer)
    optimizer.state.clear()
    copied.put_back(*kept)
    assert same(state_of(model, optimizer), before)
    next(iter(optimizer.state.values()))["exp_avg"] = torch.zeros(3)
    copied.put_back(*kept)
    assert same(state_of(model, optimizer), before)
    extra = nn.Linear(2, 2)
    model.add_module("extra", extra)
    optimizer.add_param_group({"params": list(extra.parameters())})
    extra(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert extra.weight in optimizer.state
    copied.put_back(*kept)
    assert extra.weight not in optimizer.state  # it had none then


def test_rates_and_other_settings_are_not_put_back_but_counters_in_groups_are() -> None:
    model, optimizer = make("sgd")
    optimizer.param_groups[0]["k"] = 3
    copied = Copied(model, {"": optimizer}, None)
    kept = copied.take()
    optimizer.param_groups[0].update(lr=7.0, weight_decay=0.5, k=9)
    copied.put_back(*kept)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["k"]) == (7.0, 0.5, 3)


def test_averages_go_back_as_well() -> None:
    model, optimizer = make()
    ema = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
    for average in (ema, SimpleNamespace(shadow=shadow)):
        copied = Copied(model, {"": optimizer}, average)
        kept = copied.take()
        tensors = list(ema.module.parameters()) if average is ema else list(shadow.values())
        want = [t.detach().clone() for t in tensors]
        for t in tensors:
            t.data.add_(1.0)
        copied.put_back(*kept)
        assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))
    assert kept[0].keys() > {("ema", "0.weight")}


def test_memory_of_a_copy_no_longer_needed_is_used_again() -> None:
    model, optimizer = make()
    train(model, optimizer, range(3))
    copied = Copied(model, {"": optimizer}, None)
    old = copied.take()[0]
    where = {k: t.data_ptr() for k, t in old.items()}
    train(model, optimizer, range(3, 6))
    new = copied.take(old)[0]
    assert {k: t.data_ptr() for k, t in new.items()} == where
    assert torch.equal(new["model", "0.weight"], model[0].weight)


class FakeLane:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.attempts, self.label, self.put_back = optimizer, 0, "", 0

    def memory(self) -> dict[str, Any]:
        return {"norms": self.attempts}

    def was_put_back(self, memory: Any) -> None:
        self.put_back += 1
        self.seen = memory


class Ringed:
    """A ring with one lane, stepped by hand; the first weight counts the steps."""

    def __init__(self, **settings: Any) -> None:
        self.model = nn.Linear(2, 2)
        self.lane = FakeLane(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.ring = RecentStates(
            self.model, {"": self.lane.optimizer}, None, {"": self.lane}, PolicyConfig(**{"ring_every": 10} | settings)
        )

    def step(self, *, bad: bool = False, rejected: bool = False, loss: float = 1.0) -> None:
        number = self.lane.attempts
        self.lane.attempts += 1
        with torch.no_grad():
            self.model.weight.fill_(number)
        finding = Finding(code="X", name="x", step=number, severity=Severity.ERROR, message="")
        self.ring.heard("", number, Verdict(step=number, seen_at=number, findings=(finding,) * bad), rejected=rejected)
        self.ring.after("", SimpleNamespace(number=number, rejected=rejected, scalars={"loss": loss}))  # type: ignore[arg-type]

    def steps(self, num: int) -> None:
        for _ in range(num):
            self.step()

    def kept(self) -> list[tuple[int, bool]]:
        return [(s.steps[""], s.good) for s in self.ring._kept]


class TestRing:
    def test_a_copy_is_a_candidate_until_quiet_steps_followed(self) -> None:
        ringed = Ringed()
        ringed.steps(35)
        assert ringed.kept() == [(9, True), (19, True), (29, False)]
        chosen = ringed.ring.before("", 100, 0)
        assert chosen is not None
        assert chosen.steps == {"": 19}

    def test_trouble_sets_candidates_back_and_no_copy_is_taken_near_it(self) -> None:
        ringed = Ringed()
        ringed.steps(25)
        ringed.step(bad=True)
        ringed.steps(7)
        assert ringed.kept() == [(9, True), (19, False)]  # without the trouble there would be one of step 29
        ringed.steps(5)
        assert ringed.kept() == [(9, True), (19, True), (35, False)]

    def test_rejected_steps_and_bad_losses_are_no_states_to_keep(self) -> None:
        ringed = Ringed()
        for _ in range(30):
            ringed.step(rejected=True)
        for _ in range(30):
            ringed.step(loss=math.nan)
        assert ringed.kept() == []

    def test_the_newest_good_one_before_the_onset_and_further_back_on_demand(self) -> None:
        ringed = Ringed()
        ringed.steps(60)
        ring = ringed.ring
        assert [ring.before("", 45, back).steps[""] for back in (0, 1, 2, 3, 9)] == [39, 29, 19, 9, 9]  # type: ignore[union-attr]
        assert ring.before("", 9, 0) is None
        young = Ringed()
        young.steps(12)
        chosen = young.ring.before("", 12, 0)
        assert chosen is not None
        assert not chosen.good  # better than none

    def test_going_back_drops_what_came_after(self) -> None:
        ringed = Ringed()
        ringed.steps(60)
        state = ringed.ring.before("", 35, 0)
        assert state is not None
        ringed.ring.go_back_to(state)
        assert ringed.model.weight.detach()[0, 0] == 29.0
        assert ringed.kept() == [(9, True), (19, True), (29, True)]
        assert ringed.lane.put_back == 1
        assert ringed.lane.seen == {"norms": 30}

    def test_it_is_bounded_dense_lately_and_sparse_further_back(self) -> None:
        ringed = Ringed()
        ringed.steps(1000)
        ages = [1000 - step for step, _ in ringed.kept()]
        assert len(ages) <= 24
        assert ages[-3:] == [21, 11, 1]
        assert 300 <= ages[0] <= 420
        ringed = Ringed(ring_bytes=5 * 6 * 4)  # five copies of six numbers
        ringed.steps(1000)
        assert len(ringed.kept()) == 4

    def test_a_model_too_large_for_it_is_told_once(self, caplog: pytest.LogCaptureFixture) -> None:
        ringed = Ringed(ring_bytes=2 * 6 * 4)
        with caplog.at_level(logging.WARNING, "trimtab"):
            ringed.steps(50)
        assert len(ringed.ring) == 0
        assert len(caplog.records) == 1
        assert "ring_bytes" in caplog.text
        for settings in ({"ring_every": 0}, {"ring_bytes": 0}):
            off = Ringed(**settings)
            off.steps(50)
            assert len(off.ring) == 0

    def test_out_of_memory_costs_the_ring_and_not_the_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ringed = Ringed()

        def fail(*args: Any) -> Any:
            raise torch.OutOfMemoryError("no memory")

        monkeypatch.setattr(ringed.ring._copied, "take", fail)
        ringed.steps(30)
        assert "memory" in ringed.ring.why_none


def test_branches_keep_samples_under_way_apart() -> None:
    from trimtab.core.types import Layout, Sample

    layout = Layout(names=(), kinds=(), numel=())

    def sample(step: int, phase: str = "train") -> Sample:
        return Sample(step=step, layout=layout, table=torch.zeros(0, 7).numpy(), scalars={}, phase=phase)

    branches = Branches()
    assert branches.marked(sample(5)).branch == 0
    branches.begin(10)
    branches.begin(12)
    assert [branches.marked(sample(s)).branch for s in (9, 10, 11, 12, 20)] == [0, 1, 1, 2, 2]
    assert branches.marked(sample(3, "val")).branch == 2
    assert branches.now == 2


# -- the remedy on a live guard ------------------------------------------------------------------------------------


def guarded(steps: int, kind: str = "adam", **kwargs: Any) -> tuple[nn.Module, Any, Guard]:
    model, optimizer = make(kind)
    guard = Guard.attach(model, optimizer, mode="act", run_dir=False, **kwargs)
    for step in range(steps):
        x, y = data(step)
        loss = (model(x) - y).square().mean()
        loss.backward()
        guard.observe(loss=loss, batch=(x, y))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, guard


def rewind(guard: Guard, **args: float) -> Outcome:
    lane = guard._lanes[""]
    return BUILTIN["rewind"].apply(Action(kind="rewind", args=args), lane, lane.attempts)


@pytest.mark.parametrize("lag", [0, 2])
def test_nobody_alarms_at_the_jump_back(lag: int) -> None:
    model, optimizer, guard = guarded(60, lag=lag)
    outcome = rewind(guard, before=45)
    assert outcome.applied
    assert "those after step 39 again" in outcome.detail
    assert "data, schedule and random numbers go on" in outcome.detail
    assert next(iter(optimizer.state.values()))["step"] == 40
    for step in range(60, 130):
        x, y = data(step)
        loss = (model(x) - y).square().mean()
        loss.backward()
        guard.observe(loss=loss, batch=(x, y))
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    assert guard.findings == []


def test_with_no_state_but_the_initial_one_it_says_so() -> None:
    _, _, guard = guarded(60)
    outcome = rewind(guard, before=5)
    assert outcome.applied
    assert outcome.detail.startswith("no state between the first step and step 5 is kept: weights, buffers and")
    assert "are the initial ones again" in outcome.detail
    guard.close()


def test_without_a_state_it_says_so() -> None:
    with Guard(*make(), run_dir=False) as other:
        assert not rewind(other, before=5).applied


def test_a_rate_that_was_raised_is_held_until_the_schedule_is_back() -> None:
    model, optimizer, guard = guarded(60)
    group = optimizer.param_groups[0]
    group["lr"] = 3.0
    outcome = rewind(guard, before=45, limit=1.0)
    assert "the rate (3) is held at 0.01" in outcome.detail
    used = []
    hook = optimizer.register_step_pre_hook(lambda *_: used.append(group["lr"]))
    lane = guard._lanes[""]
    for step in range(6):
        group["lr"] = 3.0 if step < 3 else 0.005
        x, y = data(step)
        loss = (model(x) - y).square().mean()
        loss.backward()
        guard.observe(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        assert group["lr"] in (3.0, 0.005)  # its owner sees nothing of it
    hook.remove()
    assert used == pytest.approx([0.01] * 3 + [0.005] * 3)
    assert not lane.multiplier.limited
    guard.close()
    assert "step" not in vars(optimizer)


def test_a_cut_after_going_back_is_mild_and_none_where_the_rate_is_held() -> None:
    _, optimizer, guard = guarded(60)
    lane = guard._lanes[""]
    cut = Action(kind="cut_lr", args={"factor": 0.1, "after_rewind": 0.5})
    assert BUILTIN["cut_lr"].apply(cut, lane, lane.attempts).detail.startswith("LR multiplier 1 -> 0.1")
    lane.multiplier.value = 1.0
    rewind(guard, before=45)
    assert BUILTIN["cut_lr"].apply(cut, lane, lane.attempts).detail.startswith("LR multiplier 1 -> 0.5")
    optimizer.param_groups[0]["lr"] = 3.0
    rewind(guard, before=35, limit=1.0)
    outcome = BUILTIN["cut_lr"].apply(cut, lane, lane.attempts)
    assert (outcome.applied, outcome.detail) == (False, "the weights are back, and the rate is held already")
    guard.close()


def test_the_limit_survives_a_saved_state() -> None:
    _, optimizer, guard = guarded(60)
    optimizer.param_groups[0]["lr"] = 3.0
    rewind(guard, before=45, limit=1.0)
    state = guard.state_dict()
    guard.close()
    with Guard.attach(*make(), mode="act", run_dir=False) as other:
        other.load_state_dict(state)
        assert other._lanes[""].multiplier.limited
        assert other._lanes[""].state_dict()["branch"] == 1


# -- samples that are put aside ------------------------------------------------------------------------------------


def put_aside(batches: Batches, step: int) -> Outcome:
    lane = SimpleNamespace(batches=batches, last_step=step)
    return BUILTIN["skip_data"].apply(Action(kind="skip_data"), lane, step + 1)


def test_samples_are_put_aside_by_the_ids_in_the_batch() -> None:
    batches = Batches(None, lag=1)
    for step in range(4):
        batches.told({"x": torch.ones(2, 3), "index": torch.tensor([2 * step, 2 * step + 1])})
        batches.step_done(step)
    outcome = put_aside(batches, 2)
    assert outcome.applied
    assert outcome.detail.startswith("2 samples are in quarantine by their ids")
    assert batches.quarantine.ids == (4, 5)
    assert not put_aside(batches, 0).applied  # too long ago


def test_ids_come_from_a_loader_that_knows_them_and_go_into_its_quarantine() -> None:
    loader = SimpleNamespace(last_ids=[7, 8], quarantine=Quarantine())
    batches = Batches(loader, lag=0)
    batches.told((torch.ones(2, 3), torch.zeros(2)))
    batches.step_done(0)
    assert put_aside(batches, 0).applied
    assert loader.quarantine.ids == (7, 8)


def test_samples_without_an_id_are_known_by_their_content() -> None:
    batches = Batches(None, lag=0)
    x, y = torch.randn(3, 2), torch.tensor([0, 1, 2])
    batches.told((x, y))
    batches.step_done(0)
    assert put_aside(batches, 0).detail.startswith("3 samples are in quarantine by their content")
    assert batches.quarantine.hides((x[1], y[1]))
    assert not batches.quarantine.hides((x[1], y[2]))
    assert set(batches.quarantine.hashes) == {content_hash((a, b)) for a, b in zip(x, y, strict=True)}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_of_a_batch_only_the_samples_that_are_no_numbers_are_put_aside(bad: float) -> None:
    x, y = torch.zeros(4, 2), torch.arange(4)
    x[2, 1] = bad
    loader = SimpleNamespace(last_ids=[10, 11, 12, 13], quarantine=Quarantine())
    known, unknown = Batches(loader, lag=0), Batches(None, lag=0)
    for batches in (known, unknown):
        batches.told((x, y))
        batches.step_done(0)
        assert put_aside(batches, 0).detail.startswith("1 sample is in quarantine")
    assert loader.quarantine.ids == (12,)
    assert unknown.quarantine.hides((x[2], y[2]))
    assert not unknown.quarantine.hides((x[1], y[1]))


def test_of_several_batches_that_make_a_step_the_bad_one_is_found() -> None:
    loader = SimpleNamespace(last_ids=[], quarantine=Quarantine())
    batches = Batches(loader, lag=0)
    for first, value in ((10, 0.0), (20, float("nan")), (30, 0.0)):
        loader.last_ids = [first, first + 1]
        batches.told((torch.tensor([[0.0], [value]]), torch.zeros(2)))
    batches.step_done(0)
    assert put_aside(batches, 0).applied
    assert loader.quarantine.ids == (21,)


def test_ids_that_are_not_those_of_the_batch_are_put_aside_all() -> None:
    loader = SimpleNamespace(last_ids=[10, 11, 12], quarantine=Quarantine())
    batches = Batches(loader, lag=0)
    batches.told((torch.tensor([[0.0], [float("nan")]]), torch.zeros(2)))  # the loop made something else of them
    batches.step_done(0)
    assert put_aside(batches, 0).applied
    assert loader.quarantine.ids == (10, 11, 12)


def test_what_nobody_told_cannot_be_put_aside() -> None:
    batches = Batches(None, lag=0)
    batches.step_done(0)
    assert not batches.knows(0)
    assert "guard.observe" in put_aside(batches, 0).detail
    assert not BUILTIN["skip_data"].apply(Action(kind="skip_data"), SimpleNamespace(batches=None), 1).applied
    assert ids_in((1, 2)) == ids_in({"x": 1}) == ids_in({"id": torch.ones(2)}) == []
    assert ids_in({"sample_id": ["a", "b"]}) == ["a", "b"]
    assert len(samples_in({"x": torch.ones(4, 2), "y": torch.ones(4)})) == 4
    assert len(samples_in(torch.ones(5, 2))) == 5
    assert samples_in("text") == []


def outlier(norm: bool, times: float = 1000.0) -> tuple[nn.Module, Guard, Tensor, Tensor, list[Tensor]]:
    """A run of 60 steps and one batch a thousand times too large; the weights as they were before it."""
    model, optimizer, guard = guarded(60, kind="adam" if norm else "plain")
    before = [p.detach().clone() for p in model.parameters()]
    x, y = data(60)
    loss = (model(x * times) - y).square().mean()
    loss.backward()
    guard.observe(loss=loss, batch=(x * times, y))
    optimizer.step()
    return model, guard, x, y, before


def test_an_outlier_batch_is_taken_back_and_put_aside() -> None:
    model, guard, x, y, before = outlier(norm=False)
    lane = guard._lanes[""]
    assert lane.batches is not None
    assert lane.batches.quarantine.hides((x[3] * 1000, y[3]))
    assert lane.rewound_at == 61
    far = max(float((p.detach() - w).abs().max()) for p, w in zip(model.parameters(), before, strict=True))
    assert 0 < far < 0.5
    guard.close()


def test_an_outlier_batch_that_did_no_harm_costs_no_step() -> None:
    """BatchNorm hides the size of its input from the weights, but its running averages have taken it in."""
    model, guard, x, y, _ = outlier(norm=True)
    twin, optimizer = make()
    train(twin, optimizer, range(60))
    optimizer.zero_grad()
    (twin(x * 1000) - y).square().mean().backward()
    optimizer.step()
    lane = guard._lanes[""]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert float(twin[1].running_var.max()) > 1000 > 100 > float(model[1].running_var.max())
    assert lane.rewound_at != 61
    assert lane.batches is not None
    assert lane.batches.quarantine.hides((x[3] * 1000, y[3]))
    guard.close()


def odd(step: int, harm: float, name: str = "outlier-batch") -> Verdict:
    evidence = {"onset": float(step), "update_applied": 1.0, "harm": harm}
    finding = Finding(code="X", name=name, step=step, severity=Severity.ERROR, message="", evidence=evidence)
    return Verdict(step=step, seen_at=step, findings=(finding,))


def test_putting_buffers_back_is_no_attempt_that_counts() -> None:
    ladder = Ladder(settings=PolicyConfig())
    state = ladder.init()
    for step in (50, 51, 52):
        state, decision = ladder.decide(state, odd(step, harm=0.9))
        assert [(a.kind, a.args.get("buffers")) for a in decision.actions] == [("rewind", 1.0), ("skip_data", None)]
    assert state["spent"] == 0
    state, decision = ladder.decide(state, odd(60, harm=1.1))
    (first, *_) = decision.actions
    assert (first.kind, first.args["back"], first.args.get("buffers")) == ("rewind", 0.0, None)
    both = replace(odd(200, 0.9), findings=(*odd(200, 0.9).findings, *odd(200, 9.0, "loss-spike").findings))
    _, decision = ladder.decide(state, both)
    assert "buffers" not in decision.actions[0].args  # something else says that the weights are damaged


def test_a_rate_that_crept_up_is_held_at_what_it_was_for_long() -> None:
    ringed = Ringed()
    group = ringed.lane.optimizer.param_groups[0]
    for step in range(100):
        group["lr"] = 0.1 if step < 75 else 0.1 * 1.05 ** (step - 75)
        ringed.step()
    state = ringed.ring.before("", 90, 0)
    assert state is not None
    assert state.rates[""][0] > 0.12
    assert ringed.ring.sound_rates("", state) == [0.1]
    for step in range(60):  # a schedule that decays: the newest is the lowest
        group["lr"] = 0.1 * 0.98**step
        ringed.step()
    state = ringed.ring.before("", 160, 0)
    assert state is not None
    assert ringed.ring.sound_rates("", state) == state.rates[""]
