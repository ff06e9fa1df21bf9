"""Samples that were put aside stay aside: through reshuffles and restarts, with and without a resumable loader."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from trimtab import Checkpointer, Guard
from trimtab.checkpoint.loader import Quarantine, QuarantineSampler, ResumableLoader, content_hash
from trimtab.guard.batches import Batches

BAD = (7, 21)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Two of them hold no numbers; each says which one it is."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(i)) * (math.nan if i in BAD else 1.0)
        return {"x": x, "index": torch.tensor(i)}


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def epoch(guard: Guard, model: nn.Module, optimizer: Any, loader: Any, *, told: bool = True) -> set[int]:
    seen: set[int] = set()
    for batch in loader:
        seen |= set(batch["index"].tolist())
        optimizer.zero_grad()
        loss = (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().mean()
        loss.backward()
        guard.step(loss, batch if told else None)
    return seen


def run(folder: Path, epochs: int, *, seed: int = 0) -> tuple[Guard, list[set[int]]]:
    """A plain DataLoader whose sampler asks the guard's quarantine."""
    model, optimizer = parts()
    settings = {"checkpoint_every": 12, "checkpoint_on_signal": False}
    guard = Guard(model, optimizer, settings, mode="act", run_dir=False, checkpoint=folder)
    guard.resume()
    torch.manual_seed(seed)
    sampler = QuarantineSampler(RandomSampler(range(48)), guard.quarantine)
    loader = DataLoader(Rows(), batch_size=2, sampler=sampler)
    return guard, [epoch(guard, model, optimizer, loader) for _ in range(epochs)]


def test_what_was_put_aside_stays_so_through_reshuffles_and_restarts_without_a_resumable_loader(tmp_path: Path) -> None:
    guard, epochs = run(tmp_path, 4)
    assert epochs[0] == set(range(48))
    assert set(BAD) <= set(guard.quarantine.ids)
    assert len(guard.quarantine) <= 2 * len(BAD)  # their batches, and no others
    assert not epochs[-1] & set(guard.quarantine.ids)
    hidden = set(guard.quarantine.ids)
    guard.close()
    again, epochs = run(tmp_path, 2, seed=5)
    assert hidden == set(again.quarantine.ids)
    assert all(not seen & hidden for seen in epochs)
    again.close()


def test_it_is_part_of_the_state_as_plain_data() -> None:
    model, optimizer = parts()
    with Guard(model, optimizer, run_dir=False) as guard:
        guard.quarantine.add(ids=[3, "a"], hashes=["f00d"])
        state = json.loads(json.dumps(guard.state_dict()))
    with Guard(*parts(), run_dir=False) as other:
        other.quarantine.add(ids=[9])
        other.load_state_dict(state)
        assert other.quarantine.ids == (9, 3, "a")  # loading brings nothing back
        assert other.quarantine.hashes == ("f00d",)
        del state["quarantine"]
        other.load_state_dict(state)  # one from before there was a quarantine


def test_samples_without_an_id_are_known_again_by_their_content_after_a_restart(tmp_path: Path) -> None:
    model, optimizer = parts()
    x = Rows()[7]["x"]
    with Guard(model, optimizer, {"checkpoint_every": 1}, run_dir=False, checkpoint=tmp_path) as guard:
        guard.quarantine.add(hashes=[content_hash(x)])
        for _ in range(3):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            guard.step(loss)
    with Guard(*parts(), run_dir=False, checkpoint=Checkpointer(tmp_path)) as other:
        other.resume()
        assert other.quarantine.hides(Rows()[7]["x"])
        assert not other.quarantine.hides(Rows()[8]["x"])


@pytest.mark.parametrize("where", ["loader", "sampler", "batch sampler", "nobody"])
def test_the_quarantine_that_a_loader_asks_is_the_guards(where: str) -> None:
    asked = Quarantine()
    inner = QuarantineSampler(RandomSampler(range(48)), asked)
    loader: Any = DataLoader(Rows(), batch_size=4)
    if where == "loader":
        loader = ResumableLoader(loader, quarantine=asked)
    elif where == "sampler":
        loader = DataLoader(Rows(), batch_size=4, sampler=inner)
    elif where == "batch sampler":
        loader = DataLoader(Rows(), batch_sampler=torch.utils.data.BatchSampler(inner, 4, False))
    with Guard(*parts(), run_dir=False, loader=loader, mode="act") as guard:
        assert (guard.quarantine is asked) == (where != "nobody")
        batches = guard._lanes[""].batches
        assert batches is not None
        assert batches.quarantine is guard.quarantine


def test_a_guard_that_is_switched_off_has_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_DISABLE", "1")
    guard = Guard(*parts())
    assert len(guard.quarantine) == 0
    guard.state_dict()


class _Loader:
    """Gives out what it is told, from a data set of that many samples."""

    def __init__(self, num: int) -> None:
        self.dataset, self.last_ids = range(num), []


def _harm(batches: Batches, loader: _Loader, step: int, ids: list[int]) -> str:
    loader.last_ids = ids
    batches.step_done(step)
    return batches.offended(step)


def test_a_sample_in_every_harmful_batch_is_put_aside_by_its_id() -> None:
    loader = _Loader(1000)
    batches = Batches(loader, lag=0)
    assert _harm(batches, loader, 0, [7, 1, 2, 3]) == ""
    told = _harm(batches, loader, 5, [4, 7, 5, 6])
    assert told == "sample 7 was in the last 2 harmful batches and is in quarantine by id from now on"
    assert batches.quarantine.ids == (7,)


def test_batches_that_share_samples_by_chance_blame_nobody() -> None:
    """Half of the data in each batch tells nothing for six harmful batches; other data each time tells nothing ever."""
    loader, chance = _Loader(64), random.Random(0)
    batches = Batches(loader, lag=0)
    assert [_harm(batches, loader, step, chance.sample(range(64), 32)) for step in range(6)] == [""] * 6
    batches = Batches(loader, lag=0)
    assert [_harm(batches, loader, step, list(range(16 * step, 16 * step + 16))) for step in range(4)] == [""] * 4


def test_with_large_shares_more_harm_is_needed() -> None:
    loader, chance = _Loader(350), random.Random(1)
    batches = Batches(loader, lag=0)
    harms = 0
    while len(batches.quarantine) == 0:
        _harm(batches, loader, harms, [349, *chance.sample(range(349), 31)])
        harms += 1
    assert harms == 3
    assert 349 in batches.quarantine.ids
    assert len(batches.quarantine) <= 3
