"""Several processes go back together, to the same state at the same step, or not at all."""

from __future__ import annotations

import json
import multiprocessing
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trimtab.core.types import Action, Decision
from trimtab.guard.ranks import REFUSED, TOGETHER, Together, hashes_of
from trimtab.sample.reduce import Peers, is_replicated

FAULT, STEPS = 40, 60


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def worker(rank: int, port: int, folder: str) -> None:
    """One of two processes: a few data-parallel runs in which something goes wrong at step `FAULT`."""
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    from trimtab.sample import reduce

    reduce.WAIT_S = 3.0
    told = {what: course(rank, what) for what in ("both", "one rank", "one guard")}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def course(rank: int, what: str) -> dict[str, Any]:
    from tests.guard.test_rewind_combos import Kept
    from trimtab import Guard

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sink = Kept()
    mode = "advise" if what == "one guard" and rank == 1 else "act"
    guard = Guard(model, optimizer, mode=mode, run_dir=False, sinks=[sink])
    for step in range(STEPS):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(2 * step + rank))
        if step == FAULT and (what != "one rank" or rank == 0):
            with torch.no_grad():
                model.module[0].weight.mul_(1e3)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        guard.step(loss)
        if step == 20 and rank == 0:
            guard.state_dict()  # as one process alone may do: nobody waits for the other
    guard.close()
    return {
        "rewinds": [[o.at, o.applied, o.detail] for o in sink.outcomes("rewind")],
        "weights": [float(p.detach().double().sum()) for p in model.parameters()],
        "losses": [r.scalars["loss"] for r in sink.records if type(r).__name__ == "Sample"],
    }


Told = dict[str, tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What both processes told of each run."""
    folder = tmp_path_factory.mktemp("ranks")
    context, port = multiprocessing.get_context("spawn"), free_port()
    both = [context.Process(target=worker, args=(rank, port, str(folder))) for rank in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(200)
        assert one.exitcode == 0
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    return {what: (first[what], second[what]) for what in first}


@pytest.mark.long
def test_all_processes_go_back_at_the_same_step_to_the_same_state(told: Told) -> None:
    one, two = told["both"]
    assert one["rewinds"] == two["rewinds"]
    ((at, applied, detail),) = one["rewinds"]
    assert (at, applied) == (FAULT + 1, True)
    assert "those after step 29 again, from memory" in detail
    assert one["weights"] == two["weights"]
    assert one["losses"] == two["losses"]  # all judge the mean


@pytest.mark.long
def test_where_they_do_not_decide_the_same_nobody_goes_back_and_it_is_told(told: Told) -> None:
    one, two = told["one rank"]
    assert one["rewinds"][0] == two["rewinds"][0] == [FAULT + 1, False, REFUSED]  # one saw what did it, one did not
    assert [r[:2] for r in one["rewinds"] if r[1]] == [r[:2] for r in two["rewinds"] if r[1]]  # later both, or neither


@pytest.mark.long
def test_a_guard_that_others_do_not_have_waits_once_and_changes_nothing_alone(told: Told) -> None:
    one, two = told["one guard"]
    assert [(applied, detail) for _, applied, detail in one["rewinds"]][:1] == [(False, REFUSED)]
    assert two["rewinds"] == []
    assert one["weights"] == two["weights"]


# -- without processes -------------------------------------------------------------------------------------------------


class Fake(Peers):
    """Two processes, of which the other one would do what it is told here."""

    def __init__(self, other: list[int]) -> None:
        self.other, self.alone = other, False

    def present(self) -> bool:
        return True

    def agreed(self, values: Any) -> list[bool]:
        return [a == b for a, b in zip(values, self.other, strict=True)]


def lane_with(step: int | None) -> Any:
    acted: list[Decision] = []
    ring = SimpleNamespace(would_reach=lambda label, before, back: step)
    return SimpleNamespace(
        label="",
        rollback=SimpleNamespace(memory=ring, disk=None),
        attempts=50,
        acted=acted,
        decided=lambda d, settled: acted.append(d) if settled else None,
    )


REWIND = Decision(about=49, at=50, actions=(Action(kind="rewind", args={"before": 40.0}), Action(kind="stop")))


@pytest.mark.parametrize(("other", "refused"), [(29, False), (19, True), (None, True)])
def test_the_state_that_would_be_reached_is_part_of_what_is_compared(other: int | None, refused: bool) -> None:
    mine, theirs = lane_with(29), lane_with(other)
    together = Together(Fake(hashes_of([REWIND], theirs)))
    assert together.waits(REWIND)
    assert mine.acted == []
    together.settle(mine)
    assert mine.acted == [REWIND]
    assert ("rewind" in together.refused) == refused
    assert "stop" not in together.refused  # each kind is agreed on by itself
    together.settle(mine)
    assert mine.acted == [REWIND]


def test_buffers_are_each_processes_own() -> None:
    action = Action(kind="rewind", args={"before": 40.0, "buffers": 1.0})
    lane = lane_with(29)
    assert hashes_of([Decision(about=49, at=50, actions=(action,))], lane) == [0] * len(TOGETHER)
    together = Together(Fake([7] * len(TOGETHER)))
    together.settle(lane)
    assert together.refuses(REWIND.actions[0])
    assert not together.refuses(action)


def test_hashes_are_the_same_for_the_same_and_fit_into_63_bits() -> None:
    assert hashes_of([], lane_with(1)) == [0] * len(TOGETHER)
    one, two = hashes_of([REWIND], lane_with(1)), hashes_of([REWIND], lane_with(1))
    assert one == two
    assert 0 < one[0] < 2**62


def test_one_process_has_no_peers_and_a_plain_model_is_nobody_elses() -> None:
    model = nn.Linear(2, 2)
    assert not is_replicated(model)
    assert not Peers(model).present()
