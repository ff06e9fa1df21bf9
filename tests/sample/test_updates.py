"""The size of an update: exact for small models, estimated from a share of each tensor for large ones."""

from __future__ import annotations

import pytest
import torch

from trimtab.sample import thorough as updates
from trimtab.sample.measure.meter import Meter
from trimtab.sample.thorough import UpdateProbe


def moved(params: list[torch.Tensor], amount: float) -> torch.Tensor:
    probe = UpdateProbe(params, Meter({torch.device("cpu")}, "auto"))
    probe.start()
    with torch.no_grad():
        for p in params:
            p += amount
    return probe.table()[:, 0]


def test_small_models_exactly() -> None:
    params = [torch.randn(30, 40), torch.randn(7), torch.randn(20, 10).t(), torch.randn(4, dtype=torch.complex64)]
    want = [0.5 * p.numel() ** 0.5 for p in params]
    assert moved(params, 0.5).tolist() == pytest.approx(want, rel=1e-5)


def test_large_models_by_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "MAX_COPIED", 1000)
    monkeypatch.setattr(updates, "MIN_COPIED", 50)
    params = [torch.randn(100, 100), torch.randn(10), torch.randn(300)]
    want = [0.5 * p.numel() ** 0.5 for p in params]
    assert moved(params, 0.5).tolist() == pytest.approx(want, rel=1e-5)
