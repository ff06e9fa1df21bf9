"""Who is out of line among processes that train together: found where one is, silent where all are alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trimtab.core.registry import find_rule
from trimtab.core.types import Finding, Layout, Sample
from trimtab.core.window import Window
from trimtab.sample.family import SPAN, Family
from trimtab.sample.reduce import NUM_TOLD, Mine, Told, told_from
from trimtab.sample.replicas import Replicas, is_data_parallel, kept_alike

NO_ROWS = Layout(names=(), kinds=(), numel=(), columns=())
NAMES = {
    "DIST001": "replicas-diverged",
    "DIST002": "rank-out-of-family",
    "DIST003": "straggler",
    "DIST004": "duplicated-data",
}
CODES = tuple(NAMES)
Make = Callable[[int, int], Mine]


def told(mine: list[Mine]) -> Told:
    return told_from(torch.tensor([one.numbers() for one in mine], dtype=torch.float64).reshape(-1), len(mine))


def judged(make: Make, *, ranks: int, steps: int = 100) -> dict[str, Finding]:
    """The first finding of each rule about processes, where `make(step, rank)` is what each tells."""
    family, window = Family(), Window()
    out: dict[str, Finding] = {}
    for step in range(steps):
        facts, notes = family.heard(step, told([make(step, rank) for rank in range(ranks)]))
        window.look(Sample(step=step, layout=NO_ROWS, table=np.zeros((0, 0), np.float32), scalars=facts, notes=notes))
        for code in CODES:
            for finding in find_rule(code)().check(window):
                out.setdefault(code, finding)
        window.absorb(alarming=False)
    return out


def usual(step: int, rank: int, **other: Any) -> Mine:
    draw = np.random.default_rng([step, rank])
    told: dict[str, Any] = {
        "loss": 2.0 * 0.99**step * float(draw.lognormal(0.0, 0.2)),
        "batch_print": float(1000 * step + rank),
        "checksum": float(step) if step % 50 == 0 else -1.0,
        "late_s": 0.02 + 0.002 * float(draw.random()),
        "spent_s": 0.2,
    }
    return Mine(**{**told, **other})


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_processes_that_are_alike_raise_nothing(ranks: int) -> None:
    assert judged(usual, ranks=ranks) == {}


@settings(max_examples=8, deadline=None)
@given(ranks=st.integers(2, 8), bad=st.integers(0, 7), what=st.sampled_from(CODES))
def test_the_one_that_is_out_of_line_is_named(ranks: int, bad: int, what: str) -> None:
    bad %= ranks

    def make(step: int, rank: int) -> Mine:
        if rank != bad:
            return usual(step, rank)
        return {
            "DIST001": usual(step, rank)._replace(checksum=7.5e15 if step == 50 else usual(step, rank).checksum),
            "DIST002": usual(step, rank, loss=9.0),
            "DIST003": usual(step, rank, late_s=0.12),
            "DIST004": usual(step, rank, batch_print=usual(step, (bad + 1) % ranks).batch_print),
        }[what]

    found = judged(make, ranks=ranks)
    assert list(found) == [what]
    assert found[what].name == NAMES[what]
    name = f"rank {bad}"
    if what == "DIST001" and ranks == 2:
        name = "rank 1"  # which of two is the right one nobody knows: it is the other than the first
    assert name in found[what].subject
    assert len(found[what].subject) == (2 if what == "DIST004" else 1)


LOOK_ALIKES: dict[str, Make] = {
    "an input that never changes": lambda step, rank: usual(step, rank, batch_print=5.0),
    "the end of every epoch": lambda s, r: usual(s, r, batch_print=s if s % 6 == 0 else 1e6 * (1 + r) + s),
    "one shard a little harder": lambda s, r: usual(s, r, loss=(1.2 if r else 1.0) * (usual(s, r).loss or 0.0)),
    "a validation on one rank now and then": lambda s, r: usual(s, r, late_s=9.0 if s % 20 == 0 and r == 0 else 0.02),
    "one rank a little later": lambda s, r: usual(s, r, late_s=0.03 if r else 0.02),
    "fast steps, one rank later": lambda s, r: usual(s, r, late_s=0.001 if r else 0.0001, spent_s=0.002),
    "no loss on one rank": lambda s, r: usual(s, r, loss=None if r else 9.0),
    "losses that are not finite": lambda s, r: usual(s, r, loss=float("nan") if r else 9.0),
    "losses of both signs": lambda s, r: usual(s, r, loss=float(np.random.default_rng([s, r]).normal())),
    "batches that nobody knows": lambda s, r: usual(s, r, batch_print=-1.0),
    "nothing known": lambda s, r: Mine(),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_only_looks_like_it_stays_silent(name: str, ranks: int) -> None:
    assert judged(LOOK_ALIKES[name], ranks=ranks) == {}


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.integers(0, 2**32), st.integers(0, 2**52 - 2)), min_size=2))
def test_what_is_told_arrives_as_it_was(all_of: list[tuple[float, int, int]]) -> None:
    mine = [Mine(loss, batch_print=float(mark), checksum=float(whole)) for loss, mark, whole in all_of]
    rows = [np.zeros((len(mine), NUM_TOLD)) for _ in mine]
    for rank, (row, one) in enumerate(zip(rows, mine, strict=True)):
        row[rank] = one.numbers()
    heard = told_from(torch.from_numpy(np.sum(rows, axis=0).reshape(-1)), len(mine))
    assert heard.losses.tolist() == [loss for loss, _, _ in all_of]
    assert heard.prints.tolist() == [mark for _, mark, _ in all_of]
    assert heard.checksums.tolist() == [whole for _, _, whole in all_of]
    assert heard.samples.tolist() == [-1.0] * len(mine)


class Wrapped(nn.parallel.DistributedDataParallel):
    """As it looks from outside, without other processes."""

    def __init__(self, module: nn.Module, ignored: tuple[str, ...] = ()) -> None:
        nn.Module.__init__(self)
        self.module, self.parameters_to_ignore = module, set(ignored)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(torch.bfloat16)


def test_a_checksum_sees_every_bit_of_every_weight() -> None:
    first = Replicas(Wrapped(net())).checksum()
    sums = [first]
    for i, param in enumerate(net().parameters()):
        model = net()
        flat = list(model.parameters())[i].detach().view(-1)
        flat[-1] = torch.nextafter(flat[-1], flat[-1] + 1)
        sums.append(Replicas(Wrapped(model)).checksum())
        assert len(param)
    assert Replicas(Wrapped(net())).checksum() == first
    assert len(set(sums)) == len(sums)
    assert all(0 <= one < 2**52 for one in sums if one is not None)


def test_what_is_not_kept_alike_is_not_compared() -> None:
    model = net()
    model[0].requires_grad_(False)  # type: ignore[index]
    other = copy.deepcopy(model)
    for name in ("0.weight", "2.bias"):
        with torch.no_grad():
            other.get_parameter(name).add_(1.0)
    with torch.no_grad():
        other[1].running_mean.add_(1.0)  # type: ignore[index]
    one, two = (Replicas(Wrapped(m, ("2.bias",))).checksum() for m in (model, other))
    assert one == two
    assert Replicas(model).checksum() is None  # nobody keeps it alike
    assert list(kept_alike(model)) == []


def test_processes_that_part_on_purpose_are_not_compared() -> None:
    def post_localSGD_hook(state: object, bucket: object) -> None:  # noqa: N802
        """By its name: torch's own needs processes."""

    model = Wrapped(net())
    model._comm_hooks = [(post_localSGD_hook, None)]  # type: ignore[list-item]
    assert Replicas(model).checksum() is None


def test_a_model_of_one_process_is_not_data_parallel() -> None:
    assert is_data_parallel(Wrapped(net()))
    assert not is_data_parallel(net())


def test_medians_need_a_full_span() -> None:
    family = Family()
    heard = [family.heard(step, told([usual(step, 0), usual(step, 1)]))[0] for step in range(2 * SPAN)]
    with_pace = [step for step, facts in enumerate(heard) if "rank_late" in facts]
    assert with_pace[0] >= SPAN - 1
    assert {b - a for a, b in pairwise(with_pace)} == {10}
