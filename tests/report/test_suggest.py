from __future__ import annotations

import math

import numpy as np
import pytest

from trimtab.record.reader import read_run
from trimtab.report.suggest import MIN_STEPS, settled, suggest_clip, suggest_warmup


def noisy(num: int, level: float = 2.0, spread: float = 0.2, seed: int = 0) -> list[float]:
    return list(level * np.exp(np.random.default_rng(seed).normal(0.0, spread, num)))


def falling(num: int) -> list[float]:
    return [0.1 + 2.0 * 0.98**i + 0.01 * (i % 3) for i in range(num)]


def clip_of(folder):
    (advice,) = suggest_clip(read_run(folder))
    return advice


def warmup_of(folder):
    (advice,) = suggest_warmup(read_run(folder))
    return advice


def test_a_healthy_run_gets_a_threshold_just_above_what_is_usual(write_run):
    advice = clip_of(write_run(falling(300), noisy(300)))
    assert 2.0 * math.exp(0.2 * 1.5) < advice.threshold < 2.0 * math.exp(0.2 * 3.5)
    assert advice.usual == pytest.approx(2.0, rel=0.1)
    assert advice.clipped_frac < 0.03
    assert not advice.chronic
    assert len(advice.reasons) == 2


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_threshold_follows_the_scale_of_the_gradients(write_run, scale):
    norms = noisy(200)
    base, other = (
        clip_of(write_run(falling(200), norms, name="a")),
        clip_of(write_run(falling(200), [scale * n for n in norms], name="b")),
    )
    assert other.threshold == pytest.approx(scale * base.threshold, rel=0.06)


def test_incidents_rejected_steps_and_the_beginning_do_not_raise_it(write_run):
    norms = noisy(300)
    plain = clip_of(write_run(falling(300), norms, name="plain")).threshold
    norms[:10] = [50.0] * 10
    norms[100:104] = [900.0, 3000.0, 800.0, 500.0]
    norms[200] = math.nan
    losses = falling(300)
    losses[200] = math.nan
    advice = clip_of(write_run(losses, norms, name="bad"))
    assert advice.threshold == pytest.approx(plain, rel=0.15)
    assert advice.highest == 3000.0
    assert "1/" in advice.reasons[1]
    assert advice.num_healthy < 290


def test_what_follows_a_wreck_is_not_healthy(write_run):
    losses = [*falling(120), *[40.0 + 0.1 * (i % 4) for i in range(180)]]
    norms = [*noisy(120), 5000.0, *noisy(179, level=30.0)]
    wrecked = clip_of(write_run(losses, norms, name="wrecked"))
    assert wrecked.threshold == pytest.approx(
        clip_of(write_run(falling(120), noisy(120), name="till")).threshold, rel=0.2
    )
    assert wrecked.num_healthy <= 120
    assert any("fix that first" in r or "1/" in r for r in wrecked.reasons)


def test_a_spike_nobody_noticed_does_not_raise_it_either(write_run):
    norms = noisy(200)
    for at in (60, 61, 62, 120, 150, 180):
        norms[at] = 16.0  # six in 200: above the 97th percentile
    assert clip_of(write_run(falling(200), norms)).threshold < 5.0


def test_a_norm_that_drifts_is_told_to_be_chronic(write_run):
    assert not clip_of(write_run(falling(300), noisy(300), name="steady")).chronic
    late = [n * (30.0 if i >= 200 else 1.0) for i, n in enumerate(noisy(300))]
    advice = clip_of(write_run(falling(300), late))
    assert advice.chronic
    assert any('clip="percentile"' in r for r in advice.reasons)


def test_a_run_that_was_clipped_hard_is_told_what_that_means(write_run):
    advice = clip_of(write_run(falling(200), noisy(200, level=40.0)))  # its clip_coef is 1/40
    assert advice.threshold > 30.0
    assert any("really so much lower" in r for r in advice.reasons)


@pytest.mark.parametrize("num", [0, 1, 5, MIN_STEPS - 1])
def test_a_run_too_short_says_so(write_run, num):
    folder = write_run(falling(num), noisy(num))
    for advice, value in ((clip_of(folder), "threshold"), (warmup_of(folder), "num_steps")):
        assert getattr(advice, value) is None
        assert str(MIN_STEPS) in advice.reasons[0]


def test_a_run_of_nan_says_so_too(write_run):
    assert clip_of(write_run([math.nan] * 100, [math.nan] * 100, name="nans")).threshold is None
    assert warmup_of(write_run([math.nan] * 100, [math.nan] * 100, name="nans2")).num_steps is None


def test_no_warm_up_where_the_loss_falls_from_the_beginning(write_run):
    advice = warmup_of(write_run(falling(200), noisy(200)))
    assert advice.num_steps == 0
    assert advice.loss_rose == 0.0
    assert any("fell from the beginning" in r for r in advice.reasons)


def test_a_warm_up_where_the_loss_rose_first(write_run):
    rising = [2.0 + 0.5 * i for i in range(12)]
    losses = rising + [7.5 * 0.9**i + 0.3 for i in range(188)]
    advice = warmup_of(write_run(losses, noisy(200)))
    assert 26 <= advice.num_steps <= 66
    assert advice.loss_rose > 0.5
    assert any("rose" in r for r in advice.reasons)


def test_a_warm_up_where_gradients_were_large_before_they_settled(write_run):
    norms = [40.0 * 0.85**i for i in range(30)] + noisy(170, level=0.4)
    advice = warmup_of(write_run(falling(200), norms))
    assert advice.early_norm > 10
    assert advice.settled_at <= advice.num_steps == 66
    assert any("a third" in r for r in advice.reasons)


def test_a_long_run_needs_no_third_of_itself(write_run):
    norms = [40.0 * 0.85**i for i in range(30)] + noisy(1170, level=0.4)
    assert warmup_of(write_run(falling(1200), norms)).num_steps == 200


@pytest.mark.parametrize(("lr", "expected"), [(1e-3, 0), (1.0, 40)])
def test_updates_that_throw_the_weights_about_ask_for_a_warm_up(tmp_path, lr, expected):
    import torch

    from trimtab import Guard

    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    with Guard(model, optimizer, run_dir=tmp_path / "run") as guard:
        for _ in range(120):
            x = torch.randn(64, 8)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
    advice = warmup_of(tmp_path / "run")
    assert advice.adam
    assert advice.num_steps == expected
    assert (advice.early_update > 0.125) == (expected > 0)


def test_noise_is_no_rise(write_run):
    random = np.random.default_rng(1)
    losses = [v + float(random.normal(0, 0.3)) for v in falling(200)]
    assert warmup_of(write_run(losses, noisy(200))).num_steps == 0


def test_settled():
    assert settled(np.array(noisy(100))) == 0
    assert settled(np.array([100.0] * 8 + noisy(100))) == 8
    assert settled(np.array([math.nan] * 50)) == 0
    assert settled(np.array([])) == 0
    assert settled(np.array([1e9] * 60 + [1.0] * 60)) == 30  # too late: a quarter of the run at most
