"""The compiled readings are those of NumPy and PyTorch, and what they cannot read they leave to them."""

from __future__ import annotations

import math
import sys
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trimtab.sample.measure import native as loader
from trimtab.sample.measure import reference as measure
from trimtab.sample.probes.batch import MARKED, SLICE

native = loader.native
pytestmark = pytest.mark.skipif(native is None, reason="built without a compiler, or TRIMTAB_NATIVE=0")

OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""PyTorch may have added up in another way then: where ours is not the same, PyTorch clips."""
as_torch = pytest.mark.skipif(OLDER and not loader.clips_as_torch(), reason="this PyTorch adds up in another way")

SIZES = st.lists(st.integers(0, 70) | st.integers(2040, 4200), min_size=1, max_size=5)
SCALES = st.sampled_from([0.0, 1e-30, 1e-22, 1e-8, 1.0, 1e8, 1e19, 1e30])


def params_of(sizes: list[int], scale: float, seed: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    out: list[Tensor] = []
    for size in sizes:
        p = nn.Parameter(torch.zeros(size))
        p.grad = torch.randn(size, generator=source) * scale
        out.append(p)
    return out


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, scale=SCALES, seed=st.integers(0, 99))
def test_norms_are_those_of_float64(sizes: list[int], scale: float, seed: int) -> None:
    params = params_of(sizes, scale, seed)
    out = np.empty((len(params), 1), np.float32)
    whole, least = native.grad_norms(params, out)
    wide = np.array([p.grad.double().norm().item() for p in params if p.grad is not None])
    assert out[:, 0] == pytest.approx(wide, rel=1e-6, abs=1e-45)
    assert whole == pytest.approx(np.linalg.norm(wide), rel=1e-6)
    assert least == out.min()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 31, 2047, 2048, 4099])
def test_what_is_not_finite_is_seen_wherever_it_is(bad: float, at: int) -> None:
    params = params_of([4100, 3], 1.0, 0)
    assert params[0].grad is not None
    params[0].grad[at] = bad
    out = np.empty(2, np.float32)
    whole, _ = native.grad_norms(params, out)
    assert not math.isfinite(whole)
    assert [math.isfinite(v) for v in out] == [False, True]


@as_torch
@settings(max_examples=60, deadline=None)
@given(
    sizes=SIZES,
    scale=st.sampled_from([0.0, 1e-22, 1e-8, 1.0, 1e8, 1e17]),
    limit=st.sampled_from([1e-3, 0.3, 1.0, 50.0]),
    seed=st.integers(0, 99),
)
def test_clipping_is_pytorchs_bit_for_bit(sizes: list[int], scale: float, limit: float, seed: int) -> None:
    assert loader.clips_as_torch()
    ours, theirs = params_of(sizes, scale, seed), params_of(sizes, scale, seed)
    versions = [p.grad._version for p in ours if p.grad is not None]
    out = np.empty((len(ours), 1), np.float32)
    norm, least, coef = native.clip(ours, limit, 0.0, math.inf, out)
    parts = [p.grad.norm().item() for p in theirs if p.grad is not None]
    want = nn.utils.clip_grad_norm_(theirs, limit).item()
    assert (norm, least, out[:, 0].tolist()) == (want, min(parts), parts)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)
    assert (coef < 1.0) == (norm > limit) or abs(norm / limit - 1) < 1e-5
    now = [p.grad._version for p in ours if p.grad is not None]
    assert now == [v + (coef < 1.0) for v in versions]


def test_what_must_not_be_clipped_is_left_as_it_is() -> None:
    params = params_of([40, 7], 10.0, 0)
    before = [p.grad.clone() for p in params if p.grad is not None]
    out = np.empty(2, np.float32)
    norm, _, coef = native.clip(params, 1.0, 1e6, math.inf, out)
    assert coef == 1.0
    assert native.clip(params, 1.0, 0.0, norm, out) is None  # not below the ceiling
    assert native.clip(params, math.inf, 0.0, math.inf, out)[2] == 1.0
    assert native.clip(params, 1e-31, 0.0, math.inf, out) is None
    assert native.clip([], 1.0, 0.0, math.inf, np.empty(0, np.float32)) is None
    assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True) if p.grad is not None)
    assert params[1].grad is not None
    params[1].grad[3] = math.nan
    assert native.clip(params, 1.0, 0.0, math.inf, out) is None
    assert params[0].grad is not None
    assert torch.equal(params[0].grad, before[0])


@as_torch
def test_where_no_way_of_adding_up_is_pytorchs_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_WAYS", ((3, 1),))
    try:
        assert not loader.clips_as_torch.__wrapped__()
    finally:
        monkeypatch.undo()
        assert loader.clips_as_torch.__wrapped__()


def no_gradient(p: Tensor) -> None:
    p.grad = None


def other_type(p: Tensor) -> None:
    p.data = p.data.double()
    p.grad = torch.ones_like(p)


def not_straight(p: Tensor) -> None:
    p.data = torch.zeros(4, 3)
    p.grad = torch.ones(3, 4).t()


def sparse(p: Tensor) -> None:
    p.grad = torch.ones(len(p)).to_sparse()


class Special(Tensor):
    pass


def subclass(p: Tensor) -> None:
    p.grad = torch.ones_like(p).as_subclass(Special)


def given_back(p: Tensor) -> None:
    p.grad = torch.ones_like(p)
    p.grad.untyped_storage().resize_(0)


@pytest.mark.parametrize("change", [no_gradient, other_type, not_straight, sparse, subclass, given_back])
def test_what_is_not_plain_is_left_to_others(change: Any) -> None:
    params = params_of([5, 6], 1.0, 0)
    change(params[1])
    assert native.grad_norms(params, np.empty(2, np.float32)) is None
    assert native.clip(params, 1.0, 0.0, math.inf, np.empty(2, np.float32)) is None


def test_rooms_of_another_size_and_other_arguments_are_refused() -> None:
    params = params_of([5], 1.0, 0)
    with pytest.raises(ValueError, match="room for 8 bytes, expected 4"):
        native.grad_norms(params, np.empty(2, np.float32))
    with pytest.raises(TypeError):
        native.grad_norms(tuple(params), np.empty(1, np.float32))
    with pytest.raises(TypeError):
        native.clip(tuple(params), 1.0, 0.0, 1.0, np.empty(1, np.float32))
    with pytest.raises(TypeError):
        native.imitate(17, 0, params, np.empty(1, np.float32))
    one = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="do not belong"):
        native.same(params, one, one, np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="does not belong"):
        native.versions(params, np.zeros(2, np.int64))
    with pytest.raises(TypeError, match="same length"):
        native.held([], params)


@settings(max_examples=60, deadline=None)
@given(
    sizes=SIZES,
    scale=SCALES,
    seed=st.integers(0, 99),
    odd=st.lists(
        st.tuples(st.integers(0, 4199), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e-9])), max_size=6
    ),
)
def test_all_columns_are_those_of_numpy(
    sizes: list[int], scale: float, seed: int, odd: list[tuple[int, float]]
) -> None:
    tensors = [p.grad for p in params_of(sizes, scale, seed) if p.grad is not None]
    for at, value in odd:
        for t in tensors:
            if at < t.numel():
                t[at] = value
    got = np.empty((len(tensors), 7), np.float32)
    assert native.columns(tensors, measure.FP16_SMALLEST, got)
    want = measure.full_on_cpu([t.numpy() for t in tensors])
    with np.errstate(all="ignore"):  # squares of tiny numbers are lost in float32
        want[:, 0] = [math.nan if t.isnan().any() else t.double().norm().item() for t in tensors]
    assert got[:, [0, 1, 3, 4, 5, 6]] == pytest.approx(want[:, [0, 1, 3, 4, 5, 6]], rel=1e-6, abs=1e-44, nan_ok=True)
    # A mean of values of both signs is as exact as their size allows.
    for mine, theirs, largest in zip(got[:, 2], want[:, 2], want[:, 1], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6 * float(largest) if math.isfinite(largest) else None, nan_ok=True)
    assert native.columns([*tensors, torch.ones(2).double()], 1.0, np.empty((len(tensors) + 1, 7), np.float32)) is None


@settings(max_examples=40, deadline=None)
@given(shape=st.lists(st.integers(1, 40), min_size=1, max_size=3), seed=st.integers(0, 9), same=st.booleans())
def test_an_input_is_read_as_numpy_reads_it(shape: list[int], seed: int, same: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if same:
        x = x[:1].expand_as(x).contiguous()
    num, square, mark, alike = native.leading(x, SLICE, MARKED)
    values = x.numpy().reshape(-1)[:SLICE]
    assert num == values.size
    assert square == pytest.approx(float((values.astype(np.float64) ** 2).mean()), rel=1e-6)
    assert mark == zlib.crc32(values[:MARKED].tobytes())
    assert not (same and x.dim() > 1) or alike
    tokens = (100 * x).long()
    numbers = tokens.numpy().reshape(-1)[:SLICE]
    assert native.leading(tokens, SLICE, MARKED)[:3] == (numbers.size, None, zlib.crc32(numbers[:MARKED].tobytes()))
    for other in (x.double(), x.int(), x.bfloat16()):
        assert native.leading(other, SLICE, MARKED) is None


def test_parts_are_compared_and_kept() -> None:
    tensors = [torch.arange(40.0), torch.full((3, 3), 2.0)]
    at = np.array([measure.address(t) for t in tensors])
    counts, kept = np.array([20, 9]), np.zeros(29, np.float32)
    assert native.keep(tensors, at, counts, kept) == (2470.0 + 36.0, 2470.0 + 36.0)
    assert native.same(tensors, at, counts, kept)
    tensors[0][30] = 7.0  # not of the part that is kept
    assert native.same(tensors, at, counts, kept)
    tensors[0][3] = 4.0
    assert not native.same(tensors, at, counts, kept)
    assert native.keep(tensors, at, counts, kept) == (2470.0 + 36.0 - 9.0 + 16.0, 1.0)
    tensors[1].data = tensors[1] + 1.0
    assert native.same(tensors, at, counts, kept) is None
    before = kept.copy()
    assert native.keep(tensors, at, counts, kept) is None
    assert (kept == before).all()


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 5000), scale=SCALES, step=st.sampled_from([0.0, 1e-20, 1e-6, 1.0]), seed=st.integers(0, 9))
def test_how_far_parts_moved_is_added_up_as_widely_as_needed(size: int, scale: float, step: float, seed: int) -> None:
    source = np.random.default_rng(seed)
    old = (source.standard_normal(size) * scale).astype(np.float32)
    now = (old + source.standard_normal(size) * scale * step).astype(np.float32)
    tensor, kept = torch.from_numpy(now.copy()), old.copy()
    moved = native.keep([tensor], np.array([measure.address(tensor)]), np.array([size]), kept)
    wide = now.astype(np.float64), (now - old).astype(np.float64)
    assert moved == pytest.approx([float((v * v).sum()) for v in wide], rel=1e-5)
    assert kept.tobytes() == now.tobytes()


def test_versions_and_slots_are_compared() -> None:
    tensors = [torch.zeros(2), torch.zeros(3)]
    known = np.array([t._version for t in tensors])
    assert native.versions(tensors, known)
    tensors[1].add_(1.0)
    assert not native.versions(tensors, known)
    assert native.versions(tensors, known)
    slots = [({"a": tensors[0]}, "a"), ({"b": tensors[1]}, "b")]
    assert native.held(slots, tensors)
    slots[1][0]["b"] = tensors[1].clone()
    assert not native.held(slots, tensors)
    del slots[1][0]["b"]
    assert not native.held(slots, tensors)


def test_marks_change_with_gradients() -> None:
    params = params_of([3, 4], 1.0, 0)
    seen = [native.marks(params)]
    assert params[1].grad is not None
    params[1].grad.add_(1.0)
    seen.append(native.marks(params))
    params[1].grad = None
    seen.append(native.marks(params))
    assert len(set(seen)) == 3
    assert native.marks(params) == seen[-1]


def test_readings_keep_nothing_alive() -> None:
    params = params_of([50, 60], 1.0, 0)
    out = np.empty(2, np.float32)
    grads = [p.grad for p in params]
    counts = [sys.getrefcount(one) for one in (*params, *grads, out)]
    for _ in range(50):
        native.grad_norms(params, out)
        native.leading(grads[0], 8, 8)
        native.marks(params)
    assert [sys.getrefcount(one) for one in (*params, *grads, out)] == counts


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loader._load() is native
    monkeypatch.setenv("TRIMTAB_NATIVE", "0")
    assert loader._load() is None


def test_one_that_was_built_from_another_source_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "VERSION", -1)
    assert loader._load() is None
