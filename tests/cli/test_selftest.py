from __future__ import annotations

import pytest


def test_a30_selftest_prints_the_documented_lines(trimtab):
    said = trimtab("selftest")
    assert said.code == 0
    assert "Testing Gradient Health Monitor" in said.out
    assert "✓ healthy gradients passed!" in said.out
    for label in ("Global norm: ", "Max norm: ", "Min norm: ", "Has NaN: False", "Has Inf: False", "Has NaN: True"):
        assert label in said.out
    assert "ALL TESTS COMPLETED!" in said.out
    assert "✗" not in said.out
    assert said.err == ""
    assert max(map(len, said.out.splitlines())) <= 80


def test_a30_selftest_tries_every_loss(trimtab):
    said = trimtab("selftest")
    assert "Testing Stable Loss Functions" in said.out
    for name in ("Einsum-based (v0)", "Norm-based (v1)", "Cosine similarity (v2)", "Distance-based (v3)"):
        assert f"✓ {name} passed!" in said.out
    assert said.out.count("Shape: torch.Size([16, 16, 16])") == 4
    for label in ("Range: [", "Mean: ", "Std: ", "Valid: ✓", "Backward pass: ✓"):
        assert said.out.count(label) == 4
    assert "✓ six modalities passed!" in said.out


def test_a30_a_loss_that_has_gone_wrong_is_told(trimtab, monkeypatch):
    from trimtab.compat.stable_losses import StableLossFunctions

    true = StableLossFunctions.stable_euclidean_distance_nd
    wrong = lambda *args, **kwargs: true(*args, **kwargs) * 1.01  # noqa: E731
    monkeypatch.setattr(StableLossFunctions, "stable_euclidean_distance_nd", wrong)
    said = trimtab("selftest")
    assert said.code == 1
    assert "✗ Distance-based (v3) failed:" in said.out
    assert "differ from their formula" in said.out


def test_a30_a_failing_part_is_shown_and_exits_1(trimtab, monkeypatch):
    from trimtab.compat.monitors.gradient_monitor import GradientHealthMonitor

    true = GradientHealthMonitor.check_gradients
    monkeypatch.setattr(GradientHealthMonitor, "check_gradients", lambda self: true(self) | {"has_nan": False})
    said = trimtab("selftest")
    assert said.code == 1
    assert "✗ NaN in a gradient failed:" in said.out
    assert "has_nan is False" in said.out
    assert "✓ exploding gradients passed!" in said.out
    assert "1 of 17 tests failed" in said.out
    assert "ALL TESTS COMPLETED!" not in said.out


def test_selftest_json(trimtab):
    data = trimtab("selftest", "--json").json()
    assert data["passed"] is True
    assert {"trimtab", "torch", "Python"} == set(data["versions"])
    assert data["parts"][0]["name"] == "healthy gradients"
    assert all(p["passed"] and p["problem"] == "" for p in data["parts"])


def test_without_a_guard_there_is_nothing_to_test(trimtab, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRIMTAB_DISABLE", "1")
    said = trimtab("selftest")
    assert said.code == 2
    assert "TRIMTAB_DISABLE" in said.err
