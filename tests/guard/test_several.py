"""Several models and several optimizers: nothing is stepped that was not meant, and every part is seen by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F  # noqa: N812

from trimtab import Checkpointer, Guard, InputError
from trimtab.record.reader import read_run


def players() -> tuple[dict[str, nn.Module], dict[str, optim.Optimizer]]:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.LeakyReLU(), nn.Linear(16, 1))
    ways: dict[str, optim.Optimizer] = {
        "critic": optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99)),
        "maker": optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.99)),
    }
    return {"maker": maker, "critic": critic}, ways


def play(models: dict[str, nn.Module], ways: dict[str, Any], step: Any, *, steps: int = 40, bad: int = -1) -> None:
    maker, critic = models["maker"], models["critic"]
    source = torch.Generator().manual_seed(1)
    for i in range(steps):
        real, noise = torch.randn(16, 8, generator=source) + 2, torch.randn(16, 4, generator=source)
        if i == bad:
            real[3] = float("nan")
        ways["critic"].zero_grad()
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(maker(noise).detach())).mean()
        loss.backward()
        step(loss, "critic")
        ways["maker"].zero_grad()
        loss = F.softplus(-critic(maker(noise))).mean()
        loss.backward()
        step(loss, "maker")


def weights(models: dict[str, nn.Module]) -> list[Tensor]:
    return [t.clone() for m in models.values() for t in m.state_dict().values()]


def test_a_step_that_does_not_say_which_optimizer_is_refused_and_changes_nothing() -> None:
    models, ways = players()
    guard = Guard(models, ways, run_dir=False)
    loss = models["critic"](models["maker"](torch.randn(16, 4))).mean()
    loss.backward()
    before = weights(models)
    with pytest.raises(InputError, match=r"2 optimizers \('critic', 'maker'\).*optimizer='critic'.*\"all\""):
        guard.step(loss)
    assert all(map(torch.equal, weights(models), before))
    guard.close()
    assert guard.health()["steps"] == {"critic": 0, "maker": 0}


@pytest.mark.parametrize("given", ["list", "dict"])
def test_the_optimizer_is_named_by_key_by_place_or_by_itself(given: str) -> None:
    models, ways = players()
    several: Any = ways if given == "dict" else list(ways.values())
    guard = Guard(models, several, run_dir=False)
    keys: list[Any] = ["critic", "maker"] if given == "dict" else [0, "1"]
    for how in (keys[0], keys[1], ways["critic"], "all"):
        loss = models["critic"](models["maker"](torch.randn(16, 4))).mean()
        loss.backward()
        guard.step(loss, optimizer=how)
    assert list(guard.health()["steps"].values()) == [3, 2]
    with pytest.raises(InputError, match="is not one of this guard's"):
        guard.step(loss, optimizer="generator")
    guard.close()


def test_a_key_called_all_means_that_one() -> None:
    models, ways = players()
    guard = Guard(models, {"all": ways["critic"], "maker": ways["maker"]}, run_dir=False)
    loss = models["critic"](models["maker"](torch.randn(16, 4))).mean()
    loss.backward()
    guard.step(loss, optimizer="all")
    guard.close()
    assert guard.health()["steps"] == {"all": 1, "maker": 0}


def test_one_optimizer_needs_no_name() -> None:
    model = nn.Linear(2, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for several in (optimizer, [optimizer], {"only": optimizer}):
        with Guard({"body": model}, several, run_dir=False) as guard:
            loss = model(torch.randn(4, 2)).square().mean()
            loss.backward()
            guard.step(loss)
            guard.step(loss, optimizer="all")
        assert guard.health()["steps"] == {"": 2}


def test_models_in_a_dict_train_as_without_and_are_named(tmp_path: Path) -> None:
    models, ways = players()
    play(models, ways, lambda loss, key: ways[key].step())
    want = weights(models)
    models, ways = players()
    with Guard(models, ways, run_dir=tmp_path / "run") as guard:
        play(models, ways, lambda loss, key: guard.step(loss, optimizer=key))
    assert all(map(torch.equal, weights(models), want))
    assert guard.findings == []
    run = read_run(tmp_path / "run")
    assert run.info is not None
    assert run.info.model == "maker (Sequential), critic (Sequential)"
    rows = {name for layout in run.layouts.values() for name in layout.names}
    assert {"maker.0.weight", "critic.3.bias"} <= rows


def test_inputs_and_buffers_of_every_part_are_looked_after() -> None:
    models, ways = players()
    with Guard(models, ways, run_dir=False) as guard:
        play(models, ways, lambda loss, key: guard.step(loss, optimizer=key), bad=20)
    assert [f.name for f in guard.findings][:1] == ["nonfinite-input"]
    assert {f.optimizer for f in guard.findings} == {"critic"}
    assert all(bool(torch.isfinite(t).all()) for t in weights(models))


@pytest.mark.parametrize("model", [{}, {"a": 3}, {"a": nn.Linear(1, 1), "b": None}])
def test_a_dict_that_holds_no_models_is_refused(model: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="model is a dict"):
        Guard(model, optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))


def test_checkpoints_of_several_models(tmp_path: Path) -> None:
    models, ways = players()
    with Guard(models, ways, run_dir=False, checkpoint=Checkpointer(tmp_path)) as guard:
        play(models, ways, lambda loss, key: guard.step(loss, optimizer=key), steps=3)
        next(iter(guard._keepers)).save(6)
        want = weights(models)
    models, ways = players()
    with Guard(models, ways, run_dir=False, checkpoint=tmp_path) as guard:
        snapshot = guard.resume()
    assert snapshot is not None
    assert all(map(torch.equal, weights(models), want))


def test_a_holder_of_modules_is_looked_at_through_what_it_holds() -> None:
    models, ways = players()
    holder = nn.ModuleDict(models)
    with Guard(holder, ways, run_dir=False) as guard:
        play(models, ways, lambda loss, key: guard.step(loss, optimizer=key), bad=20)
    assert [f.name for f in guard.findings][:1] == ["nonfinite-input"]


def test_a_step_returns_the_verdict_of_the_optimizer_it_was_for() -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 1), "b": torch.nn.Linear(4, 1)})
    optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=0.01) for name in model}
    returned = []
    with Guard(model, optimizers, run_dir=False) as guard:
        for step in range(120):
            for name in ("a",) if step % 3 else ("a", "b"):  # so that their counts of steps differ
                optimizers[name].zero_grad()
                loss = model[name](torch.randn(8, 4)).square().mean()
                loss.backward()
                verdict = guard.step(loss, optimizer=name)
                returned.append((name, guard.lanes[name].attempts - 1, verdict.optimizer, verdict.step))
    assert all(name == optimizer and attempt == step for name, attempt, optimizer, step in returned)
