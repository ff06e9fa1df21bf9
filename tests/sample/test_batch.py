"""The data of a step in a few numbers."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.sample.loops import attached, mlp
from trimtab.sample.probes.batch import (
    CHANCE_EVERY,
    HELD_BACK,
    LARGE,
    MAX_CLASSES,
    MAX_HELD,
    NUM_TENSORS,
    SLICE,
    BatchProbe,
    Epoch,
    OneClass,
    RepeatedRows,
    can_be_held,
    look_on_device,
    row_keys,
    tensors_in,
)

Pair = namedtuple("Pair", ["x", "y"])


def facts_of(*args: Any, **kwargs: Any) -> dict[str, Any]:
    probe = BatchProbe()
    probe.inputs(args, kwargs)
    return probe.take()


def told(batch: Any, kind: str = "", inputs: tuple[Any, ...] = ()) -> dict[str, Any]:
    probe = BatchProbe()
    probe.loss_kind = kind
    if inputs:
        probe.inputs(inputs, {})
    probe.told(batch)
    return probe.take()


# -- inputs --------------------------------------------------------------------------------------------------------


def test_a_usual_batch() -> None:
    x = 3.0 * torch.randn(16, 10)
    facts = facts_of(x)
    assert set(facts) == {"in_print", "in_rms"}
    assert facts["in_rms"] == pytest.approx(float(x.square().mean().sqrt()), rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_one_value_that_is_not_finite(bad: float, dtype: torch.dtype) -> None:
    x = torch.randn(16, 10).to(dtype)
    assert "in_bad" not in facts_of(x)
    x[7, 3] = bad
    assert facts_of(x)["in_bad"] == 1.0


def test_a_nan_far_behind_the_leading_elements_is_found() -> None:
    x = torch.zeros(4, 100_000)
    x[3, 99_999] = math.nan
    assert x.numel() > SLICE
    assert facts_of(x)["in_bad"] == 1.0
    assert x.numel() < LARGE


def test_every_bad_tensor_counts() -> None:
    bad = torch.full((2, 2), math.nan)
    assert facts_of(bad, mask=bad.clone(), weights=torch.ones(2))["in_bad"] == 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_values_are_finite(dtype: torch.dtype) -> None:
    x = torch.full((8, 8), torch.finfo(dtype).max, dtype=dtype)
    x[0, 0] = 1.0
    assert "in_bad" not in facts_of(x)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_an_empty_batch(shape: tuple[int, ...]) -> None:
    assert facts_of(torch.zeros(shape)) == {"in_empty": 1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_equal_rows(dtype: torch.dtype) -> None:
    row = torch.arange(6) % 2
    same = row.expand(5, 6).to(dtype)
    assert facts_of(same)["in_flat"] == 1.0
    other = same.clone()
    other[3, 1] = 1 - other[3, 1].to(torch.int64)
    assert "in_flat" not in facts_of(other)


@pytest.mark.parametrize("shape", [(4,), (1, 6), (4, 1), ()])
def test_too_little_to_call_it_constant(shape: tuple[int, ...]) -> None:
    assert "in_flat" not in facts_of(torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_have_a_print_and_no_size(dtype: torch.dtype) -> None:
    assert set(facts_of(torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype))) == {"in_print"}


def test_complex_inputs() -> None:
    facts = facts_of(torch.randn(4, 4, dtype=torch.complex64))
    assert "in_print" in facts
    assert "in_bad" not in facts


def test_half_precision_has_the_size_of_full_precision() -> None:
    x = torch.randn(16, 10)
    for dtype in (torch.bfloat16, torch.float16):
        assert facts_of(x.to(dtype))["in_rms"] == pytest.approx(facts_of(x)["in_rms"], rel=0.01)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=20), st.integers(0, 19))
def test_prints_are_equal_exactly_when_the_values_are(values: list[float], place: int) -> None:
    x = torch.tensor(values)
    assert facts_of(x)["in_print"] == facts_of(x.clone())["in_print"] == facts_of(x.double())["in_print"]
    other = x.clone()
    other[place % len(values)] += 1.0
    assert facts_of(other)["in_print"] != facts_of(x)["in_print"]


def test_prints_do_not_depend_on_memory() -> None:
    x = torch.randn(6, 8)
    strided = x.t().contiguous().t()
    assert not strided.is_contiguous()
    assert facts_of(strided)["in_print"] == facts_of(x)["in_print"]


def test_the_last_forward_has_the_print_and_the_largest_size_counts() -> None:
    probe = BatchProbe()
    for scale in (1.0, 5.0, 2.0):
        probe.inputs((scale * torch.ones(4, 2),), {})
    facts = probe.take()
    assert facts["in_rms"] == pytest.approx(5.0)
    assert facts["in_print"] == facts_of(2.0 * torch.ones(4, 2))["in_print"]
    assert probe.take() == {}


@pytest.mark.parametrize("args", [(), (3, "text"), (None,), ({"a": []},)])
def test_nothing_to_look_at(args: tuple[Any, ...]) -> None:
    assert facts_of(*args) == {}


# -- nested --------------------------------------------------------------------------------------------------------


def test_tensors_are_found_in_order_and_not_too_deep() -> None:
    a, b, c, d = (torch.full((2,), float(i)) for i in range(4))
    nested = {"x": [a, (b, {"far": c})], "y": d, "text": "none", "number": 3}
    assert [id(t) for t in tensors_in(nested)] == [id(t) for t in (a, b, d)]
    assert [id(t) for t in tensors_in(nested, depth=4)] == [id(t) for t in (a, b, c, d)]
    assert [id(t) for t in tensors_in(Pair(a, b))] == [id(a), id(b)]
    assert list(tensors_in("text")) == list(tensors_in(None)) == []


def test_dict_and_keyword_inputs() -> None:
    x, mask = torch.randn(4, 6), torch.ones(4, 6)
    want = facts_of(x)
    assert facts_of({"x": x, "mask": mask}) == want
    assert facts_of([x, mask]) == want
    assert facts_of(x=x, mask=mask) == want


def test_only_so_many_tensors_are_looked_at() -> None:
    good = [torch.ones(2, 2) * i for i in range(NUM_TENSORS)]
    assert "in_bad" not in facts_of([*good, torch.full((2, 2), math.nan)])


# -- targets -------------------------------------------------------------------------------------------------------


def test_what_no_forward_was_given_is_a_target() -> None:
    x, y = torch.randn(4, 6), torch.full((4,), math.nan)
    assert told((x, y), inputs=(x,))["in_bad"] == 1.0
    assert "in_bad" not in told((x, torch.zeros(4)), inputs=(x,))


def test_without_a_forward_the_first_is_the_input() -> None:
    x = torch.randn(4, 6)
    facts = told({"x": x, "y": torch.tensor([0, 1, 0, 1])})
    assert facts["in_print"] == facts_of(x)["in_print"]


def test_an_empty_target() -> None:
    x = torch.randn(4, 6)
    assert told((x, torch.zeros(0)), inputs=(x,))["in_empty"] == 1.0


@pytest.mark.parametrize(
    ("values", "share"),
    [([0.0, 1.0, 0.5, 1.0], 0.0), ([0.0, 255.0, 0.0, 255.0], 0.5), ([-1.0, 1.0, 1.0, 1.0], 0.25)],
)
def test_targets_outside_of_a_binary_cross_entropy(values: list[float], share: float) -> None:
    x, y = torch.randn(4, 6), torch.tensor(values)
    assert told((x, y), "bce", inputs=(x,))["targets_outside"] == share
    for kind in ("mse", "nll", ""):
        assert "targets_outside" not in told((x, y), kind, inputs=(x,))


def chance_of(target: Tensor, kind: str, times: int = 1) -> float | None:
    probe = BatchProbe()
    probe.loss_kind = kind
    x = torch.randn(4, 6)
    value: Any = None
    for _ in range(times):
        probe.inputs((x,), {})
        probe.told((x, target))
        value = probe.take().get("chance")
    return None if value is None else float(value)


def test_chance_of_classes_is_their_entropy() -> None:
    labels = torch.arange(400) % 4
    assert chance_of(labels, "nll") == pytest.approx(math.log(4))
    skewed = torch.tensor([0] * 300 + [1] * 100)
    want = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert chance_of(skewed, "nll") == pytest.approx(want)
    assert chance_of(torch.cat([skewed, torch.full((500,), -100)]), "nll") == pytest.approx(want)  # ignored ones


def test_chance_of_a_squared_error_is_the_variance() -> None:
    values = torch.randn(1000, dtype=torch.float64) * 3.0 + 5.0
    assert chance_of(values, "mse") == pytest.approx(float(values.var(correction=0)), rel=1e-5)
    assert chance_of(torch.full((300,), 7.0), "mse") is None  # nothing to predict


def test_chance_of_a_binary_cross_entropy() -> None:
    ones = (torch.arange(400) % 4 == 0).float()
    assert chance_of(ones, "bce") == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))
    assert chance_of(255.0 * ones, "bce") is None


def test_chance_is_that_of_each_place() -> None:
    masks = torch.zeros(300, 2, 2)
    masks[:, 0] = (torch.arange(300) % 2 == 0).float()[:, None]
    half = math.log(2.0) / 2  # two of the four places are always 0
    assert chance_of(masks, "bce") == pytest.approx(half, rel=1e-3)
    assert chance_of(masks, "mse") == pytest.approx(0.25 / 2)


def test_chance_needs_enough_targets_and_adds_them_up() -> None:
    assert chance_of(torch.arange(40) % 4, "nll") is None
    assert chance_of(torch.arange(40) % 4, "nll", times=4 * CHANCE_EVERY + 1) == pytest.approx(math.log(4))
    assert chance_of(torch.randn(40), "mse") is None
    assert chance_of(torch.randn(40), "mse", times=4 * CHANCE_EVERY + 1) is not None


@pytest.mark.parametrize("kind", ["nll", "mse"])
def test_chance_is_told_now_and_then(kind: str) -> None:
    target = torch.arange(400) % 4 if kind == "nll" else torch.randn(400)
    told = [chance_of(target, kind, times=times) is not None for times in range(1, 3 * CHANCE_EVERY + 1)]
    assert told == [i % CHANCE_EVERY == 0 for i in range(3 * CHANCE_EVERY)]


@pytest.mark.parametrize("kind", ["", "nll", "mse", "bce"])
@pytest.mark.parametrize(
    "target",
    [
        torch.full((400,), MAX_CLASSES),
        torch.ones(400, dtype=torch.bool),
        torch.randn(400, dtype=torch.complex64),
        torch.full((400,), -1),
        torch.tensor(3),
        torch.full((400,), 1e200, dtype=torch.float64),
    ],
)
def test_targets_that_say_nothing(kind: str, target: Tensor) -> None:
    chance = chance_of(target, kind)
    assert chance is None or (kind in ("mse", "bce") and math.isfinite(chance))


def test_the_kind_decides_which_chance() -> None:
    labels, values = torch.arange(400) % 4, torch.randn(400)
    assert chance_of(labels, "mse") is None
    assert chance_of(values, "nll") is None
    assert chance_of(values, "") is None


# -- epochs --------------------------------------------------------------------------------------------------------


def test_without_a_length_nothing_is_a_replay() -> None:
    epoch = Epoch()
    assert [epoch.saw(mark) for mark in [1, 2, 3, 1, 2, 3, 3, 3]] == [0] * 8
    assert epoch.step_done() == 0


def test_whole_epochs_are_no_replay() -> None:
    epoch = Epoch(10)
    assert [epoch.saw(mark) for _ in range(4) for mark in range(10)] == [0] * 40
    shuffled = Epoch(10)
    generator = torch.Generator().manual_seed(0)
    marks = [int(m) for _ in range(5) for m in torch.randperm(10, generator=generator)]
    seen = [m for i, m in enumerate(marks) if i == 0 or m != marks[i - 1]]
    assert seen == marks  # no batch twice in a row at the border
    assert [shuffled.saw(mark) for mark in marks] == [0] * 50


def test_an_epoch_from_its_beginning_is_a_replay() -> None:
    epoch = Epoch(100)
    assert [epoch.saw(mark) for mark in range(30)] == [0] * 30
    assert [epoch.saw(mark) for mark in range(10)] == list(range(1, 11))
    assert epoch.saw(77) == 0


def test_batches_seen_again_in_another_order_do_not_add_up() -> None:
    epoch = Epoch(100)
    for mark in range(30):
        epoch.saw(mark)
    assert [epoch.saw(mark) for mark in (20, 5, 13, 2)] == [1, 1, 1, 1]


def test_several_forwards_on_one_batch_are_one_visit() -> None:
    epoch = Epoch(10)
    assert [epoch.saw(mark) for _ in range(3) for mark in range(10) for _ in range(3)] == [0] * 90


def test_the_same_batch_again_and_again_is_stuck() -> None:
    epoch = Epoch(10)
    epoch.saw(1)
    assert epoch.step_done() == 1
    for num in range(1, 20):
        epoch.saw(5)
        epoch.saw(5)  # several forwards on it
        assert epoch.step_done() == num
    epoch.saw(6)
    assert epoch.step_done() == 1


def run_epochs(order: list[int], num: int = 10) -> tuple[list[float | None], list[float | None]]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randn(8, 4) for _ in range(num)]
    with attached(model, optimizer, loader=batches) as (_, kept):
        for i in order:
            model(batches[i]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return kept.all("replayed"), kept.all("stuck")


def test_epochs_in_a_real_loop() -> None:
    replayed, stuck = run_epochs([*range(10), *range(10)])
    assert replayed == [None] * 20
    assert stuck == [None] * 20
    replayed, _ = run_epochs([*range(5), *range(5)])
    assert replayed == [None] * 5 + [1.0, 2.0, 3.0, 4.0, 5.0]
    _, stuck = run_epochs([0, 1, 1, 1])
    assert stuck == [None, None, 2.0, 3.0]


def test_several_forwards_in_one_step_are_not_stuck() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randn(8, 4) for _ in range(10)]
    with attached(model, optimizer, loader=batches) as (guard, _):
        for x in batches:
            torch.stack([model(x).square().mean() for _ in range(20)]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [f.name for f in guard.findings] == []


# -- inputs that are no plain tensors ------------------------------------------------------------------------------


class Graph(nn.Module):
    """A layer that takes a sparse adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.sparse.mm(adjacency, self.layer(x))


def test_a_sparse_input_does_no_harm() -> None:
    model = Graph()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, optimizer):
        model(torch.randn(5, 4), torch.eye(5).to_sparse()).square().mean().backward()
        optimizer.step()


def test_a_functional_transform_does_no_harm() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, optimizer):
        parameters = dict(model.named_parameters())

        def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(model, values, (x.unsqueeze(0),))
            return out.square().mean()

        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.randn(8, 4))
        for name, p in model.named_parameters():
            p.grad = grads[name].mean(0)
        optimizer.step()


# -- on a device -----------------------------------------------------------------------------------------------------


def test_a_batch_on_a_device_is_held_until_the_step() -> None:
    probe = BatchProbe()
    first, second = torch.randn(8, 4), torch.randn(8, 4, requires_grad=True)
    for batch in (first, second):  # micro-batches: the last one counts
        probe._look_on_device(batch)
    held = probe.take()[HELD_BACK]
    assert isinstance(held, Tensor)
    assert held.data_ptr() == second.data_ptr()
    assert not held.requires_grad
    probe._look_on_device(torch.randint(0, 9, (8,)))
    assert HELD_BACK not in probe.take()


@pytest.mark.parametrize(
    "batch",
    [
        torch.randn(8, 8)[:, ::2],
        torch.randn(8, dtype=torch.float64),
        torch.randn(1).expand(MAX_HELD),
    ],
)
def test_what_the_kernels_cannot_read_is_looked_at_in_the_forward(batch: Tensor) -> None:
    assert not can_be_held(batch)
    probe = BatchProbe()
    probe._look_on_device(torch.randn(8))
    probe._look_on_device(batch)
    assert set(probe.take()) == {"in_rms", "in_bad"}


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_what_a_device_finds_in_a_batch(bad: float | None) -> None:
    batch = torch.full((40, 100), 3.0)
    if bad is not None:
        batch[-1, -1] = bad
    found = look_on_device(batch)
    assert float(found["in_rms"]) == pytest.approx(3.0)
    assert float(found["in_bad"]) == float(bad is not None)


def keys_of(*parts: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    keys = row_keys(parts)
    assert keys is not None
    return keys.numpy()


def test_equal_samples_have_equal_keys_and_others_do_not() -> None:
    x = torch.randn(12, 3, 5)
    assert len(np.unique(keys_of(x))) == 12
    assert len(np.unique(keys_of(x[:4].repeat(3, 1, 1)))) == 4
    # One query for many documents: only together they are one sample.
    assert len(np.unique(keys_of(x[:1].repeat(12, 1, 1), torch.randn(12, 7)))) == 12
    assert row_keys([torch.randint(0, 9, (12, 5))]) is None
    assert row_keys([x[:4]]) is None


def test_samples_are_repeated_where_other_batches_bring_others() -> None:
    probe = RepeatedRows()
    looks = [probe.saw(keys_of(torch.randn(8, 6).repeat(4, 1))) for _ in range(4)]
    assert looks == [(1, 0.75), (2, 0.75), (3, 0.75), (4, 0.75)]
    assert probe.saw(keys_of(torch.randn(32, 6))) == (0, 0.0)


def test_data_of_few_different_samples_are_not_meant() -> None:
    four, probe = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]), RepeatedRows()
    looks = [probe.saw(keys_of(four[torch.randint(0, 4, (32,))])) for _ in range(6)]
    assert max(row for row, _ in looks[1:]) == 0


def test_batches_of_one_class_count_where_they_were_mixed_or_the_class_changes() -> None:
    same, mixed = np.full(32, 3), np.arange(32) % 4
    assert [OneClass().saw(same) for _ in range(3)] == [0, 0, 0]
    after = OneClass()
    assert [after.saw(labels) for labels in (mixed, same, same, mixed, same)] == [0, 1, 2, 0, 1]
    ordered = OneClass()
    assert [ordered.saw(np.full(32, i // 2)) for i in range(5)] == [0, 0, 3, 4, 5]
    assert OneClass().saw(mixed[:8]) == 0


def _few(batches: list[Tensor]) -> dict[str, float]:
    probe = BatchProbe()
    out: dict[str, float | Tensor] = {}
    for i in range(21):
        probe.inputs((batches[i % len(batches)],), {})
        out |= probe.take()
    return {name: float(value) for name, value in out.items() if name.startswith("data_")}


def test_a_small_data_set_is_known_by_the_tensor_it_is_cut_from() -> None:
    data = torch.randn(96, 4)
    assert _few(list(data.split(32))) == {"data_rows": 96.0, "data_covered": 1.0}
    large = torch.randn(960, 4)
    assert _few(list(large.split(32))[:3]) == {"data_rows": 96.0, "data_covered": pytest.approx(0.1)}


def test_of_batches_that_own_their_memory_only_the_rows_are_known() -> None:
    assert _few([torch.randn(32, 4) for _ in range(3)]) == {"data_rows": 96.0}


def test_one_full_batch_and_many_batches_say_nothing() -> None:
    assert _few([torch.randn(32, 4)]) == {}
    assert _few([torch.randn(32, 4) for _ in range(5)]) == {}
