"""The module: its scale, the bound it cannot leave but come back from, and what it passes on."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from tests.losses.agree import rows
from trimtab.losses import NWayLoss, NWayOutput, nway_loss
from trimtab.losses.module import initial_scale


def test_same_as_the_function_and_learns_its_scale() -> None:
    xs = rows(3, 5)
    criterion = NWayLoss("norm", "full", init_scale=5.0, label_smoothing=0.1)
    want = nway_loss(xs, similarity="norm", objective="full", logit_scale=5.0, label_smoothing=0.1)
    torch.testing.assert_close(criterion(*xs), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(criterion(xs), criterion(*xs))
    torch.testing.assert_close(criterion(torch.stack(xs)), criterion(*xs))
    criterion(*xs).backward()
    assert criterion.log_scale.grad is not None
    assert criterion.log_scale.grad != 0
    assert [name for name, _ in criterion.named_parameters()] == ["log_scale"]


def test_a_scale_at_the_bound_can_come_back() -> None:
    criterion = NWayLoss("norm", "full", init_scale=100.0, max_scale=100.0)
    xs = [x.detach() for x in rows(3, 5)]  # random rows: the loss wants a smaller scale
    optimizer = torch.optim.SGD(criterion.parameters(), lr=0.1)
    with torch.no_grad():
        criterion.log_scale.fill_(9.0)  # some step went too far
    criterion(*xs).backward()
    assert float(criterion.log_scale.detach()) == pytest.approx(math.log(100.0))
    assert criterion.log_scale.grad is not None
    assert criterion.log_scale.grad > 0
    optimizer.step()
    assert criterion.scale < 100


def test_in_evaluation_nothing_is_written_and_the_bound_holds() -> None:
    criterion = NWayLoss("norm", "axis", max_scale=50.0).eval()
    with torch.no_grad():
        criterion.log_scale.fill_(9.0)
    loss = criterion(*rows(3, 4))
    assert criterion.log_scale == 9.0
    assert criterion.scale.item() == pytest.approx(50.0)
    torch.testing.assert_close(loss, nway_loss(rows(3, 4), similarity="norm", logit_scale=50.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_not_a_number_shows(value: float) -> None:
    criterion = NWayLoss("norm", "full")
    with torch.no_grad():
        criterion.log_scale.fill_(value)
    loss = criterion(*rows(3, 4))
    if math.isnan(value):
        assert loss.isnan()
    else:
        assert loss.isfinite()  # at the bound, or a scale of 0: every candidate alike
    if value == -math.inf:
        assert float(loss.detach()) == pytest.approx(math.log(16))


def test_initial_scales() -> None:
    assert initial_scale("paircos") == 1 / 0.07
    assert [initial_scale("mip", "auto", n) for n in (None, 3, 6)] == [1.0, 1.0, 1.0]
    assert initial_scale("mip", "auto", 2) == 1 / 0.07
    assert initial_scale("mip", "l2", 6) == 1 / 0.07
    assert NWayLoss("mip", modalities=6).scale.item() == NWayLoss().scale.item() == pytest.approx(1.0)


def test_fixed_scale_bias_and_details() -> None:
    fixed = NWayLoss("norm", learnable=False)
    assert not list(fixed.parameters())
    assert list(fixed.state_dict()) == ["log_scale"]
    sigmoid = NWayLoss("norm", "sigmoid", init_scale=2.0, init_bias=-1.0)
    xs = rows(3, 4)
    want = nway_loss(xs, similarity="norm", objective="sigmoid", logit_scale=2.0, logit_bias=-1.0)
    loss = sigmoid(*xs)
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    loss.backward()
    assert sigmoid.bias is not None
    assert sigmoid.bias.grad is not None
    out = NWayLoss("norm", details=True)(*xs, mask=torch.ones(3, 4, dtype=torch.bool))
    assert isinstance(out, NWayOutput)


def test_state_moves_and_copies() -> None:
    criterion = NWayLoss("norm", init_scale=7.0)
    other = NWayLoss("norm")
    other.load_state_dict(criterion.state_dict())
    assert other.scale == criterion.scale
    assert copy.deepcopy(criterion).scale == criterion.scale
    assert "scale=7, max_scale=100, chunk=9" in repr(NWayLoss("norm", init_scale=7.0, chunk=9))


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"similarity": "nrom"}, "Did you mean 'norm'"),
        ({"objective": "ful"}, "Did you mean 'full'"),
        ({"similarity": "norm", "backend": "x"}, "backend is 'x'"),
        ({"similarity": "norm", "chunks": 3}, "Did you mean 'chunk'"),
        ({"similarity": "norm", "init_scale": 200.0}, "init_scale <= max_scale"),
        ({"similarity": "norm", "init_scale": 0.0}, "0 < init_scale"),
        ({"similarity": "norm", "label_smoothing": -1.0}, r"\[0, 1\)"),
    ],
)
def test_what_is_wrong_is_said_at_once(told: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NWayLoss(**told)  # type: ignore[arg-type]


def test_the_number_of_modalities_is_checked_where_it_was_told() -> None:
    with pytest.raises(ValueError, match="made for 4 modalities and got 3"):
        NWayLoss("mip", modalities=4)(*rows(3, 4))
