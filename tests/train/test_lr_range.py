from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.matrix import sampled
from trimtab.core.errors import InputError
from trimtab.data import load_digits
from trimtab.doctor.target import Target, run_steps
from trimtab.torchutil.undo import untouched
from trimtab.train.lr_range import Sweep, climb, find_lr, has_left, settle, suggest_lr, sweep_rates


def digits() -> TensorDataset:
    x, y = load_digits()
    return TensorDataset(torch.from_numpy(x).float()[:640] / 16, torch.from_numpy(y).long()[:640])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3), foreach=False),
}


def target(kind: str = "adam", *, scaler: bool = False, shuffle: bool = True) -> Target:
    model = network()
    return Target(
        model=model,
        optimizer=OPTIMIZERS[kind](model.parameters()),
        loader=DataLoader(digits(), 32, shuffle=shuffle, generator=torch.Generator().manual_seed(3)),
        loss_fn=cross_entropy,
        scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) if scaler else None,
    )


def everything(of: Target) -> list[object]:
    """All that a training would notice, as bits."""
    optimizer = of.optimizers[0]
    state = optimizer.state_dict()
    seen: list[object] = [v.clone() for v in of.model.state_dict().values()]
    seen += [None if p.grad is None else p.grad.clone() for p in of.model.parameters()]
    seen += [copy.deepcopy(state["state"]), copy.deepcopy(state["param_groups"]), of.model.training]
    seen += [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy(), of.loader.generator.get_state()]
    if of.scaler is not None:
        seen.append(of.scaler.state_dict())
    return seen


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("kind", sampled(list(OPTIMIZERS), "momentum adamw"))
@pytest.mark.parametrize("scaler", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "under way"])
def test_everything_is_put_back_to_the_bit(kind, scaler, fresh):
    of = target(kind, scaler=scaler)
    if not fresh:
        run_steps(of, 5)
    of.model[3].eval()  # a part kept in evaluation mode stays in it
    before, pieces = everything(of), dict(vars(of.optimizers[0]))
    found = find_lr(of, num_steps=40, repeats=2, trial_steps=6)
    assert found.num_steps > 20
    assert same(before, everything(of))
    assert not of.model[3].training
    assert vars(of.optimizers[0]).keys() == pieces.keys()
    assert all(vars(of.optimizers[0])[k] is v for k, v in pieces.items())


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_the_training_afterwards_is_the_one_without_the_test(kind):
    torch.manual_seed(5)
    alone = target(kind)
    expected = run_steps(alone, 12)
    torch.manual_seed(5)
    tested = target(kind)
    find_lr(tested, num_steps=30, repeats=1, trial_steps=6)
    assert run_steps(tested, 12) == expected


def test_an_error_in_the_middle_puts_everything_back_too():
    of = target()
    calls = []

    def step_fn(model, batch):
        calls.append(1)
        if len(calls) > 60:
            raise RuntimeError("out of luck")
        return cross_entropy(model(batch[0]), batch[1])

    broken = Target(model=of.model, optimizer=of.optimizer, loader=of.loader, step_fn=step_fn)
    before = everything(broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        find_lr(broken)
    assert same(before, everything(broken))


def test_lazy_layers_are_refused_and_extra_state_is_kept():
    class Counting(nn.Linear):
        count = 0

        def forward(self, x):
            self.count += 1
            return super().forward(x)

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    model = Counting(2, 1)
    of = Target(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loader=[(torch.randn(8, 2), torch.zeros(8, 1))],
        loss_fn=mse_loss,
    )
    find_lr(of, num_steps=20, repeats=1, trial_steps=5)
    assert model.count == 0
    lazy = nn.LazyLinear(2)
    lazy_target = Target(model=lazy, optimizer=of.optimizer, loader=of.loader, loss_fn=mse_loss)
    with pytest.raises(InputError, match="lazy"), untouched(lazy_target):
        pass


@pytest.mark.parametrize(("kind", "low", "high"), [("momentum", 3e-3, 0.3), ("sgd", 3e-2, 3.0), ("adam", 1e-3, 0.05)])
def test_the_suggestion_trains_well(kind, low, high):
    found = find_lr(target(kind))
    assert low < found.suggested < high
    assert found.low <= found.suggested <= found.high
    assert found.diverged is None or found.suggested <= found.diverged / 3
    assert max(found.trials.values()) > 0
    swept = find_lr(target(kind), trial_steps=0)
    assert swept.trials == {}
    assert swept.suggested < swept.best
    assert swept.diverged is None or swept.suggested <= swept.diverged / 20
    of = target(kind)
    for group in of.optimizer.param_groups:
        group["lr"] = found.suggested
    losses = run_steps(of, 60)
    assert np.mean(losses[-10:]) < 0.4 * losses[0]


def test_the_ladder_grows_towards_the_better_end_and_no_further():
    asked = []

    def trial(rate):
        asked.append(rate)
        return 10.0 - abs(math.log10(rate) + 1.0) * 4

    found = climb(trial, 1e-3, low=1e-7, high=10.0)
    assert max(found, key=found.get) == pytest.approx(0.1, rel=1.0)
    assert min(found) == pytest.approx(1e-3 / 3)
    assert list(found) == sorted(found)
    assert len(asked) == len(found)
    assert max(climb(trial, 1e-3, low=1e-7, high=5e-3)) <= 5e-3
    assert list(climb(trial, 1e-3, low=1e-3, high=1e-3)) == [1e-3]
    assert list(climb(lambda rate: -math.inf, 1.0, low=1e-7, high=10.0)) == [1 / 3, 1.0, 3.0]


def test_the_ladder_goes_both_ways_while_it_is_flat_but_not_for_ever():
    found = climb(lambda rate: 1.0, 1e-3, low=1e-7, high=10.0)
    assert min(found) < 1e-4 < 1e-2 < max(found)
    assert len(found) <= 10


def test_the_middle_of_what_did_well_is_chosen():
    base = suggest_lr([curve()])
    chosen = settle(base, {1e-3: 0.5, 1e-2: 0.99, 0.1: 1.0, 1.0: -math.inf}, 50)
    assert chosen.suggested == pytest.approx(math.sqrt(1e-3))
    assert (chosen.low, chosen.high) == (1e-2, 0.1)
    assert chosen.num_steps == base.num_steps + 200
    broken = settle(base, {1e-2: -math.inf}, 50)
    assert broken.suggested == base.suggested


def test_where_short_trainings_say_nothing_they_are_made_longer():
    seen = []

    def step_fn(model, batch):
        if torch.is_grad_enabled():
            seen.append(1)
        return 30.0 + cross_entropy(model(batch[0]), batch[1])  # it cannot fall by more than a few per cent

    of = target()
    of = Target(model=of.model, optimizer=of.optimizer, loader=of.loader, step_fn=step_fn)
    found = find_lr(of, num_steps=40, repeats=1, trial_steps=10)
    assert found.suggested is not None
    assert len(seen) > 40 + 3 * 40


def test_the_scale_and_the_floor_of_the_loss_do_not_matter():
    def scaled(factor, offset):
        torch.manual_seed(0)
        model = network()
        return Target(
            model=model,
            optimizer=torch.optim.Adam(model.parameters()),
            loader=DataLoader(digits(), 32, shuffle=False),
            loss_fn=lambda out, y: factor * cross_entropy(out, y) + offset,
        )

    rates = [
        find_lr(scaled(*how), repeats=1, trial_steps=0).suggested for how in ((1.0, 0.0), (100.0, 0.0), (1.0, -5.0))
    ]
    assert max(rates) < 2.0 * min(rates)


def test_groups_keep_their_proportions():
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[4].parameters(), "lr": 1e-4}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    seen = []

    def step_fn(model, batch):
        if torch.is_grad_enabled():
            seen.append(tuple(g["lr"] for g in optimizer.param_groups))
        return cross_entropy(model(batch[0]), batch[1])

    of = Target(model=model, optimizer=optimizer, loader=DataLoader(digits(), 32), step_fn=step_fn)
    sweep_rates(of, low=1e-4, high=1e-2, num_steps=20, repeats=1)
    assert [a for a, _ in seen] == pytest.approx(list(np.geomspace(1e-4, 1e-2, 20)))
    assert all(b == pytest.approx(a / 10) for a, b in seen)
    assert [g["lr"] for g in optimizer.param_groups] == [1e-3, 1e-4]


def test_sweeps_see_other_batches():
    seen = []

    def step_fn(model, batch):
        if torch.is_grad_enabled():
            seen.append(batch[1])
        return cross_entropy(model(batch[0]), batch[1])

    of = target()
    of = Target(model=of.model, optimizer=of.optimizer, loader=of.loader, step_fn=step_fn)
    sweep_rates(of, low=1e-7, high=1e-5, num_steps=20, repeats=2)
    assert len(seen) == 40
    assert not torch.equal(seen[0], seen[20])


def test_a_loss_that_falls_nowhere_gets_no_suggestion():
    model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5))
    of = Target(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loader=[(torch.randn(16, 4), torch.zeros(16, 1))] * 3,
        step_fn=lambda model, batch: (model(batch[0]) * 0).sum() + torch.rand(()) + 1,
    )
    found = find_lr(of)
    assert found.suggested is None
    assert "fell nowhere" in found.reason


def test_nonsense_is_refused():
    with pytest.raises(InputError, match="0 < min < max"):
        find_lr(target(), low=1.0, high=0.1)
    with pytest.raises(InputError, match="at least 20"):
        find_lr(target(), num_steps=5)
    of = target()
    bad = Target(
        model=of.model,
        optimizer=of.optimizer,
        loader=of.loader,
        loss_fn=lambda out, y: cross_entropy(out, y) * math.nan,
    )
    with pytest.raises(InputError, match="nan before the first step"):
        find_lr(bad)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS needs a closure"),
        (lambda p: torch.optim.SGD([{"params": list(p), "lr": None}], lr=0.1), "learning rate None"),
    ],
)
def test_an_optimizer_that_cannot_be_swept_is_refused(make, word):
    model = network()
    of = Target(model=model, optimizer=make(model.parameters()), loader=DataLoader(digits(), 32), loss_fn=cross_entropy)
    with pytest.raises(InputError, match=word):
        find_lr(of)


def test_a_loss_that_leaves_at_the_first_step_gets_no_suggestion():
    model = network()

    def step_fn(model, batch):
        return cross_entropy(model(batch[0]), batch[1]) * (math.nan if torch.is_grad_enabled() else 1.0)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = find_lr(Target(model=model, optimizer=optimizer, loader=DataLoader(digits(), 32), step_fn=step_fn))
    assert found.suggested is None
    assert (found.rates, found.losses) == ((), ())
    assert "first step" in found.reason


def test_a_sweep_ends_when_the_loss_leaves():
    falling = [2.0 - 0.01 * i for i in range(50)]
    assert not any(has_left(falling[: i + 1], 2.0) for i in range(50))
    assert has_left([*falling, 3.5], 2.0)
    assert has_left([-5.0] * 10 + [-5.2, -4.0], -5.0)
    assert not has_left([-5.0] * 10 + [-5.2, -4.9], -5.0)
    assert not has_left([1.0, 50.0], 1.0)  # two values are no curve
    noise = np.random.default_rng(0).normal(0.0, 1.0, 200)
    assert not any(has_left(noise[: i + 1], 0.0) for i in range(200))


def curve(num: int = 60) -> Sweep:
    rates = tuple(float(r) for r in np.geomspace(1e-4, 1.0, 60))
    smooth = tuple(2.0 - 1.5 / (1 + math.exp(-(i - 25) / 4)) + (0.2 * (i - 45) if i > 45 else 0) for i in range(60))
    return Sweep(rates=rates[:num], losses=smooth[:num], smooth=smooth[:num], start=2.0, diverged=num < 60)


def test_one_bad_sweep_shortens_the_curve_but_does_not_move_it():
    alone, both = suggest_lr([curve()]), suggest_lr([curve(), curve(50)])
    assert alone.diverged is None
    assert both.diverged == curve(50).rates[-1]
    assert (alone.steepest, alone.best) == (both.steepest, both.best)
    assert both.suggested <= alone.suggested
