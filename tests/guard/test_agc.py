"""Adaptive gradient clipping against a float64 reference, for every kind of tensor."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.guard.conftest import batches, mse, same, small_model, snapshot
from trimtab import Guard
from trimtab.core.clipping import Agc
from trimtab.guard import protect as agc
from trimtab.record.reader import read_run
from trimtab.sample.rows import Rows

LOSS = torch.tensor(1.0)


def reference(weight: Tensor, grad: Tensor, ratio: float = 0.01, eps: float = 1e-3) -> Tensor:
    """Row by row, in float64."""
    w, g = weight.detach().double(), grad.double()
    rows = [(w, g)] if w.dim() < 2 else list(zip(w, g, strict=True))
    out = []
    for wr, gr in rows:
        limit, norm = ratio * max(float(wr.norm()), eps), float(gr.norm())
        out.append(gr * (limit / norm) if norm > limit else gr)
    return out[0] if w.dim() < 2 else torch.stack(out)


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5))
    with torch.no_grad():
        model[3].weight[2].zero_()  # a dead row: its limit comes from eps
        model[3].bias.zero_()
    return model


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e10, 1e19, 1e30, 1e38])
@pytest.mark.parametrize("fused", [False, True])
def test_equals_the_float64_reference(scale: float, fused: bool) -> None:
    model = network()
    for i, p in enumerate(model.parameters()):
        p.grad = torch.randn_like(p).clamp(-3, 3) * scale * (0.3 if scale == 1e38 else 10.0 ** -(i % 2))
    want = [reference(p, p.grad) for p in model.parameters()]
    whole = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    kept = math.sqrt(sum(float(w.square().sum()) for w in want))
    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.0, fused=fused), clip="agc") as guard:
        guard.step(LOSS)
    assert guard.rejected == 0
    for p, w in zip(model.parameters(), want, strict=True):
        assert torch.allclose(p.grad.double(), w, rtol=1e-5, atol=0.0)
    assert guard.run_dir is not None
    (sample,) = read_run(guard.run_dir).samples()
    assert sample.scalars["clip_coef"] == pytest.approx(kept / whole, rel=1e-4)
    assert sample.scalars["grad_norm"] == pytest.approx(whole, rel=1e-4)


def test_small_gradients_are_not_touched_in_a_single_bit() -> None:
    model = network()
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-8
    before = [p.grad.clone() for p in model.parameters()]
    assert float(agc.clip_units(list(model.parameters()), Agc())) == 1.0
    assert same(before, [p.grad for p in model.parameters()])


def test_settings_are_used() -> None:
    weight = nn.Parameter(torch.eye(3) * torch.tensor([1.0, 2.0, 0.0]))
    weight.grad = torch.full((3, 3), 10.0)
    agc.clip_units([weight], Agc(ratio=0.5, eps=0.1))
    assert weight.grad.norm(dim=1).tolist() == pytest.approx([0.5, 1.0, 0.05])


def test_gradients_that_a_scaler_has_scaled() -> None:
    weight = nn.Parameter(torch.eye(3))
    weight.grad = torch.full((3, 3), 10.0) * 1024.0
    agc.clip_units([weight], Agc(ratio=0.5), scale=torch.tensor(1024.0))
    assert (weight.grad / 1024.0).norm(dim=1).tolist() == pytest.approx([0.5] * 3)


def test_a_unit_that_is_not_finite_is_left_as_it_is_and_spoils_no_other() -> None:
    weight = nn.Parameter(torch.ones(4, 2))
    weight.grad = torch.tensor([[math.nan, 1.0], [5.0, 5.0], [math.inf, 1.0], [1e-9, 0.0]])
    coef = agc.clip_units([weight], Agc())
    assert torch.isnan(weight.grad[0, 0])
    assert weight.grad[0, 1] == weight.grad[2, 1] == 1.0
    assert float(weight.grad[1].norm()) == pytest.approx(0.01 * math.sqrt(2))
    assert 0.0 < float(coef) < 1.0


def test_sparse_complex_empty_low_precision_and_missing() -> None:
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(6, 4))
    rows, values = torch.tensor([[1, 4, 1]]), torch.randn(3, 4) * 10
    table.grad = torch.sparse_coo_tensor(rows, values.clone(), (6, 4), check_invariants=True)
    dense = torch.zeros(6, 4).index_add_(0, rows[0], values)
    phase = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
    phase.grad = torch.randn(3, 2, dtype=torch.complex64)
    seen = torch.view_as_real(phase.grad).clone()
    low = nn.Parameter(torch.randn(5, 7).bfloat16())
    low.grad = torch.randn(5, 7).bfloat16()
    low_before = low.grad.clone()
    vector = nn.Parameter(torch.randn(9).bfloat16())
    vector.grad = torch.randn(9).bfloat16()
    vector_before = vector.grad.clone()
    number = nn.Parameter(torch.tensor(2.0))
    number.grad = torch.tensor(7.0)
    empty, unused = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.ones(2))
    empty.grad = torch.empty(0, 4)
    agc.clip_units([table, phase, low, vector, number, empty, unused], Agc())
    assert torch.allclose(table.grad.to_dense().double(), reference(table, dense), rtol=1e-5)
    assert not table.grad.is_coalesced()
    weights = torch.view_as_real(phase.detach())
    assert torch.allclose(torch.view_as_real(phase.grad).double(), reference(weights, seen), rtol=1e-5)
    assert torch.allclose(low.grad.double(), reference(low, low_before), rtol=1e-2)
    assert torch.allclose(vector.grad.double(), reference(vector, vector_before), rtol=1e-2)
    assert float(number.grad) == pytest.approx(0.02)
    assert unused.grad is None


def test_channels_last_gradients_are_clipped_where_they_are() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    conv.weight.grad = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last)
    want = reference(conv.weight, conv.weight.grad)
    agc.clip_units([conv.weight], Agc())
    assert torch.allclose(conv.weight.grad.double(), want, rtol=1e-5)


@pytest.fixture
def off_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths of an accelerator, made to run on the CPU."""
    original = Rows.__init__

    def forced(self: Rows, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.on_host = False

    monkeypatch.setattr(Rows, "__init__", forced)


@pytest.mark.parametrize("fused", [True, False])
def test_off_the_host_it_does_the_same(fused: bool, request: pytest.FixtureRequest) -> None:
    results = []
    for accelerator in (False, True):
        if accelerator:
            request.getfixturevalue("off_the_host")
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        with Guard(model, optimizer, clip="agc", lag=1) as guard:
            for batch in batches(12, bad=(7,)):
                loss = mse(model, batch)
                loss.backward()
                guard.step(loss)
                optimizer.zero_grad()
        assert guard.rejected == 1
        assert guard.run_dir is not None
        samples = list(read_run(guard.run_dir).samples())
        coefs = [s.scalars.get("clip_coef", 1.0) for s in samples if not s.scalars.get("rejected")]
        results.append((snapshot(model, optimizer), coefs))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4)
    assert all(0 < c < 1 for c in results[0][1])


def test_a_guard_in_observe_mode_clips_nothing() -> None:
    model = network()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    before = [p.grad.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Guard(model, optimizer, clip="agc", mode="observe", run_dir=False) as guard:
        guard.step(LOSS)
    assert same(before, [p.grad for p in model.parameters()])


def test_a_step_without_gradients_and_a_frozen_twin() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = copy.deepcopy(model)
    with Guard(model, optimizer, clip="agc", run_dir=False) as guard:
        guard.step(LOSS)
    assert same(snapshot(model), snapshot(twin))
    assert guard.findings == []
