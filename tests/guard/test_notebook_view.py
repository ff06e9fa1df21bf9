"""What a guard shows of itself."""

from __future__ import annotations

import math

import pytest
import torch

from trimtab import Guard


def test_a_guard_says_what_it_guards_and_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guard(model, optimizer, run_dir="here") as guard:
        assert repr(guard) == "<trimtab.Guard of Linear: mode advise, steps 0, findings 0, recorded in here>"
        for step in range(12):
            loss = model(torch.randn(4, 2)).square().mean()
            (loss * (math.nan if step == 10 else 1.0)).backward()
            guard.step(loss)
            optimizer.zero_grad()
        assert "steps 12, findings 1," in repr(guard)
        html = guard._repr_html_()
        assert "nonfinite-gradient" in html
        assert "Do first: " in html
    assert repr(guard).endswith(", closed>")
    monkeypatch.setenv("TRIMTAB_DISABLE", "1")
    assert "TRIMTAB_DISABLE" in repr(Guard(model, optimizer))
    assert "TRIMTAB_DISABLE" in Guard(model, optimizer)._repr_html_()
