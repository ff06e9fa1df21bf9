"""Two checkpoints side by side."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trimtab.checkpoint import state
from trimtab.checkpoint.inspect import Difference, difference, relative_change


def trained(steps: int, *, lr: float = 1e-2) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    for _ in range(steps):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return state.to_host(
        state.capture(model=model, optimizer=optimizer, scheduler=scheduler, extra={"epoch": steps, "none": None})
    )


def by_name(found: Difference) -> dict[str, Any]:
    return {change.name: change for change in found.tensors}


def settings(found: Difference) -> dict[str, tuple[str | None, str | None]]:
    return {change.name: (change.a, change.b) for change in found.settings}


def test_a_state_is_identical_to_itself() -> None:
    one = trained(3)
    found = difference(one, state.to_host(one))
    assert found.identical
    assert found.num_tensors > 20


def test_moments_weights_buffers_and_settings_are_named() -> None:
    found = difference(trained(2), trained(3, lr=3e-2))
    names = by_name(found)
    assert {"model.0.weight", "model.1.running_mean", "optimizer.exp_avg.0.weight", "optimizer.step.0.weight"} <= set(
        names
    )
    assert all(change.what == "values" for change in found.tensors)
    told = settings(found)
    assert told["optimizer.param_groups.0.lr"] == ("0.01", "0.03")
    assert told["scheduler.last_epoch"] == ("2", "3")
    assert told["extra.epoch"] == ("2", "3")
    assert "optimizer.param_groups.0.weight_decay" not in told
    assert not [name for name in told if name.startswith(("optimizer.names", "optimizer.0"))]


def test_changes_are_sorted_and_random_numbers_have_no_size() -> None:
    found = difference(trained(2), trained(3))
    ranked = [change.relative for change in found.tensors if change.relative is not None]
    assert ranked == sorted(ranked, reverse=True)
    assert by_name(found)["rng.torch"].relative is None
    assert found.tensors[-1].name.startswith("rng.")


def test_sections_that_are_the_same_are_named_and_random_numbers_anywhere_have_no_size() -> None:
    a = {"model": {"w": torch.ones(2)}, "loader": {"place": {"rng": {"torch": torch.ones(2)}}}, "extra": {}, "ema": {}}
    b = {"model": {"w": torch.ones(2)}, "loader": {"place": {"rng": {"torch": torch.zeros(2)}}}, "extra": {}}
    found = difference(a, b)
    assert found.same == ("model", "extra")
    (change,) = found.tensors
    assert (change.name, change.relative) == ("loader.place.rng.torch", None)


def test_missing_extra_and_reshaped_come_first() -> None:
    a = {"model": {"w": torch.ones(2), "gone": torch.ones(3), "d": torch.ones(2), "s": torch.ones(2, 2)}}
    b = {"model": {"w": torch.zeros(2), "new": torch.ones(1), "d": torch.ones(2).half(), "s": torch.ones(4)}}
    found = difference(a, b)
    told = {change.name: (change.what, change.a, change.b) for change in found.tensors}
    assert told == {
        "model.gone": ("only_a", "float32 (3,)", ""),
        "model.new": ("only_b", "", "float32 (1,)"),
        "model.d": ("kind", "float32 (2,)", "float16 (2,)"),
        "model.s": ("kind", "float32 (2, 2)", "float32 (4,)"),
        "model.w": ("values", "float32 (2,)", "float32 (2,)"),
    }
    assert found.tensors[-1].name == "model.w"


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.5], 0.1),
        ([0.0, 0.0], [0.0, 1.0], math.inf),
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.0, 1.0], [1.0, math.nan], math.nan),
        ([1e30, 1e30], [1e30, 2e30], math.sqrt(0.5)),
    ],
)
def test_relative_change(a: list[float], b: list[float], expected: float) -> None:
    assert relative_change(torch.tensor(a), torch.tensor(b)) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64])
def test_every_kind_of_number(dtype: torch.dtype) -> None:
    a, b = torch.tensor([1.0, 1.0]).to(dtype), torch.tensor([1.0, 0.0]).to(dtype)
    assert relative_change(a, a.clone()) == 0.0
    assert relative_change(a, b) == pytest.approx(math.sqrt(0.5))
    assert relative_change(torch.tensor(2).to(dtype), torch.tensor(2).to(dtype)) == 0.0


def test_pieces_empty_and_not_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.checkpoint.inspect._PIECE", 3)
    a = torch.arange(12.0).reshape(3, 4)
    b = a.clone()
    b[2, 3] = 22.0
    assert relative_change(a.t(), b.t()) == pytest.approx(11 / float(a.norm()))
    assert relative_change(torch.empty(0), torch.empty(0)) == 0.0


def test_minus_zero_and_zero_are_a_difference_without_size() -> None:
    for rest in (0.0, 1.0):
        a, b = ({"model": {"w": torch.tensor([zero, rest])}} for zero in (0.0, -0.0))
        (change,) = difference(a, b).tensors
        assert change.relative == 0.0


def test_sparse_tensors() -> None:
    a = torch.tensor([[3.0, 0.0], [0.0, 4.0]]).to_sparse()
    b = torch.tensor([[3.0, 0.0], [0.0, 4.5]]).to_sparse()
    assert difference({"model": {"w": a}}, {"model": {"w": a.clone()}}).identical
    assert by_name(difference({"model": {"w": a}}, {"model": {"w": b}}))["model.w"].relative == pytest.approx(0.1)


def test_plain_values_of_every_kind() -> None:
    same = {"nan": math.nan, "list": [1, [2, 3]], "text": "a", "none": None, "array": np.arange(3), "empty": {}}
    assert difference({"extra": same}, {"extra": dict(same)}).identical
    other = same | {"list": [1, [2, 4]], "array": np.arange(3) + 1, "new": 1, "long": "x" * 500}
    found = difference({"extra": same}, {"extra": other})
    told = settings(found)
    assert told["extra.list"] == ("[1, [2, 3]]", "[1, [2, 4]]")
    assert told["extra.new"] == (None, "1")
    assert len(told["extra.long"][1] or "") == 200
    assert set(by_name(found)) == {"extra.array"}


def test_several_optimizers_keep_their_labels() -> None:
    def entry(lr: float) -> dict[str, Any]:
        return {"class": "SGD", "state": {"state": {}, "param_groups": [{"lr": lr, "params": [0]}]}, "names": [["w"]]}

    a, b = ({"optimizer": {"gen": entry(0.1), "disc": entry(lr)}} for lr in (0.1, 0.2))
    assert settings(difference(a, b)) == {"optimizer.disc.param_groups.0.lr": ("0.1", "0.2")}
