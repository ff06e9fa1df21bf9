"""The documented lines, letter by letter."""

from __future__ import annotations

import doctest
import math

from trimtab.compat import lines


def test_the_examples_run() -> None:
    result = doctest.testmod(lines)
    assert result.attempted >= 8
    assert result.failed == 0


def test_a11_line_and_both_warnings() -> None:
    assert lines.gradient_health(150, 125.43, 340.12, 3.2e-08, 45.67) == (
        "Step 150 - Gradient Health: Global Norm=125.4300, Max=340.1200, Min=3.20e-08, Mean=45.6700"
    )
    assert lines.gradient_health(None, 1, 1, 1, 1).startswith("Gradient Health: Global Norm=1.0000")
    assert lines.exploding(125.43).split("\n") == [
        "⚠️ Exploding gradients detected (norm=125.43)!",
        "   Consider: (1) Gradient clipping, (2) Reducing learning rate",
    ]
    assert lines.vanishing(3.2e-8).split("\n") == [
        "⚠️ Vanishing gradients detected (min norm=3.2e-08)!",
        "   Consider: (1) Using residual connections, (2) Changing activation functions",
    ]


def test_b5_early_warning() -> None:
    assert lines.high_norm(2.5, 0.5) == "⚠️  High gradient norm detected: 2.50 (clipped to 0.5)"


def test_b7_values_beside_a_progress_bar() -> None:
    assert lines.bar_values(2.37, 0.423) == {"loss": "2.37", "grad": "0.423"}
    assert lines.bar_values(math.nan, math.inf) == {"loss": "nan", "grad": "inf"}


def test_b8_lines_of_an_epoch() -> None:
    assert lines.epoch_bar(44, 140, 125, 125, 345, 2.37, 0.423) == (
        "Epoch 44/140: 100%|████| 125/125 [05:45<00:00, loss=2.37, grad=0.423]"
    )
    assert lines.epoch_bar(1, 2, 0, 10, 0, 1.0, 1.0).startswith("Epoch 1/2:   0%|    | 0/10 [00:00<?, loss=1.00")
    assert "[1:01:40<1:01:40," in lines.epoch_bar(1, 2, 1, 2, 3700, 1.0, 1.0)
    assert lines.norm_summary(0.381, 0.498) == "   Gradient norm - Avg: 0.381, Max: 0.498"
    assert lines.epoch_metrics({"Loss": 2.37, "IoU": 0.5845, "Dice": 0.735}) == (
        "Loss: 2.3700 | IoU: 0.5845 | Dice: 0.7350"
    )


def test_b9_lines_before_a_run_stops() -> None:
    assert lines.nonfinite_gradients(5, math.inf).split("\n") == [
        "❌ NaN/Inf detected in gradients at batch 5!",
        "   Gradient norm: inf",
        "   This indicates gradient explosion.",
    ]
    assert lines.nonfinite_loss(5, math.nan).split("\n") == ["❌ NaN/Inf detected in loss at batch 5!", "   Loss: nan"]


def test_c4_diagnostic_line() -> None:
    assert lines.step_diagnostics(20, 3.21, 0.75, 0.75, 11.3, 5e-5) == (
        "[Step 20] Loss: 3.2100 | Grad norm: 0.7500 -> 0.7500 (clipped: NO) | Param norm: 11.3000 | LR: 0.000050"
    )
    assert "Grad norm: 3.0000 -> 1.5000 (clipped: YES)" in lines.step_diagnostics(0, 1.0, 3.0, 1.5, 1.0, 1.0)


def test_d2_both_norms() -> None:
    assert lines.norm_before_clipping(2.5) == "Gradient norm before clipping: 2.500000"
    assert lines.norm_after_clipping(1.0) == "Gradient norm after clipping: 1.000000"


def test_e13_grad_line() -> None:
    assert lines.gradient_diagnostics(0, 1.23, [], num_zero=3, num_nonfinite=9, num_parameters=12) == (
        "[GRAD] Step    0 | Global: 1.23e+00 | Zero: 3/12 | NaN/Inf: 9/12 | Max: nan | Avg: nan | Range: [nan, nan]"
    )
    assert lines.gradient_problem("NaN/Inf", ["a"]) == "[GRAD]   NaN/Inf: a"
