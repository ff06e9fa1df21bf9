"""A NaN or Inf anywhere in weights, buffers, moments or averages is found by name; large finite numbers are fine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from trimtab.checkpoint import state
from trimtab.checkpoint.state import nonfinite


def trained() -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    return model, optimizer, AveragedModel(model)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("where", "name"),
    [
        (lambda m, o, e: m[0].weight, "model.0.weight"),
        (lambda m, o, e: m[1].running_var, "model.1.running_var"),
        (lambda m, o, e: m.cache, "model.cache"),
        (lambda m, o, e: o.state[m[0].bias]["exp_avg"], "optimizer.exp_avg.0.bias"),
        (lambda m, o, e: o.state[m[2].weight]["exp_avg_sq"], "optimizer.exp_avg_sq.2.weight"),
        (lambda m, o, e: e.module[2].bias, "ema.module.2.bias"),
    ],
)
def test_b18_one_bad_number_is_found_by_name(where: Any, name: str, value: float) -> None:
    model, optimizer, ema = trained()
    assert nonfinite(state.capture(model=model, optimizer=optimizer, ema=ema)) == ()
    with torch.no_grad():
        where(model, optimizer, ema).view(-1)[-1] = value
    assert nonfinite(state.capture(model=model, optimizer=optimizer, ema=ema)) == (name,)


def test_several_are_told_in_order_and_some_may_be_allowed() -> None:
    bad = torch.tensor([1.0, -math.inf])
    sections = {"model": {"mask": bad, "fine": torch.ones(2), "w": bad.clone()}, "ema": {"mask": bad}}
    assert nonfinite(sections) == ("model.mask", "model.w", "ema.mask")
    assert nonfinite(sections, allowed=("model.mask", "ema.mask")) == ("model.w",)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_the_largest_finite_numbers_are_not_bad(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    assert nonfinite({"model": {"w": torch.full((300,), most, dtype=dtype)}}) == ()
    assert nonfinite({"model": {"w": torch.tensor([1.0, math.inf], dtype=dtype)}}) == ("model.w",)


ODD = {
    "float8": lambda bad: bad.to(torch.float8_e5m2),
    "coo": lambda bad: bad.to_sparse(),
    "csr": lambda bad: bad.to_sparse_csr(),
    "complex": lambda bad: torch.complex(bad, bad),
    "scalar": lambda bad: bad[0, 1],
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_tensors_of_any_kind(kind: str) -> None:
    odd = ODD[kind](torch.tensor([[0.0, math.nan]]))
    assert nonfinite({"model": {"fine": torch.ones(1), "odd": odd}}) == ("model.odd",)


def test_what_cannot_be_bad_is_passed_over() -> None:
    sections = {"model": {"n": torch.tensor(3), "e": torch.empty(0), "m": torch.empty(2, device="meta"), "x": "text"}}
    assert nonfinite(sections) == ()
    assert nonfinite({}) == ()


def test_other_sections_may_hold_infinities() -> None:
    bad = {"best": torch.tensor(math.inf)}
    assert nonfinite({"scheduler": bad, "extra": bad, "gradients": bad}) == ()


def test_several_optimizers_and_a_learning_rate_that_is_a_tensor() -> None:
    weight = nn.Parameter(torch.ones(2))
    one = torch.optim.SGD([weight], lr=0.1)
    two = torch.optim.Adam([weight], lr=torch.tensor(0.1))
    two.param_groups[0]["lr"].fill_(math.nan)
    assert nonfinite(state.capture(optimizer={"a": one, "b": two})) == ("optimizer.b.param_groups.0.lr",)
