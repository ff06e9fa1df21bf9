"""Limits that follow the run: against numpy, immune to bad values, bounded, and how they are configured."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.clipping import Agc, Clip, NormLimit, Percentile, ZScore, norm_limit
from trimtab.core.config import Config
from trimtab.core.errors import ConfigError

RNG = np.random.default_rng(0)
NORMS = [float(v) for v in np.exp(0.3 * RNG.standard_normal(400))]


def made(clip: Any) -> NormLimit:
    limit = norm_limit(Config.from_dict({"clip": clip}).clip)
    assert limit is not None
    return limit


@settings(deadline=None)  # many numpy calls an example: a busy machine is no failure
@given(
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60),
    st.floats(1, 99),
    st.integers(2, 20),
)
def test_the_percentile_is_numpys_over_the_window(norms: list[float], percentile: float, window: int) -> None:
    limit = made({"strategy": "percentile", "percentile": percentile, "window": window, "warmup": 1})
    for i, norm in enumerate(norms):
        limit.push(norm)
        kept = norms[max(0, i + 1 - window) : i + 1]
        assert limit.limit() == pytest.approx(np.percentile(kept, percentile), rel=1e-9)
    assert len(limit.state_dict()["norms"]) == min(len(norms), window)


def test_zscore_follows_mean_and_deviation_of_the_logs() -> None:
    limit = made({"strategy": "zscore", "warmup": 50, "z": 2.0})
    for norm in NORMS[:50]:
        limit.push(norm)
    logs = np.log(NORMS[:50])
    assert limit.limit() == pytest.approx(math.exp(logs.mean() + 2.0 * logs.std()))
    mean, variance, found = logs.mean(), logs.var(), limit.limit()
    for norm in NORMS[50:90]:
        away = min(math.log(norm), math.log(found)) - mean
        mean, variance = mean + 0.03 * away, 0.97 * (variance + 0.03 * away**2)
        limit.push(norm)
        found = limit.limit()
        assert found == pytest.approx(math.exp(mean + 2.0 * math.sqrt(variance)))


def test_a_steady_run_is_not_clipped_for_a_wobble() -> None:
    limit = made("zscore")
    for _ in range(100):
        limit.push(1.0)
    assert limit.limit() == pytest.approx(math.exp(0.25))


def test_a_run_whose_norms_grow_for_good_takes_its_limit_along() -> None:
    for strategy in ("zscore", "percentile"):
        limit = made(strategy)
        for norm in NORMS:
            limit.push(norm)
        for norm in NORMS * 2:
            limit.push(20.0 * norm)
        found = limit.limit()
        assert found is not None
        assert found > 20.0


@pytest.mark.parametrize(("clip", "warmup"), [("percentile", 32), ("zscore", 25)])
def test_warming_up_there_is_no_limit(clip: str, warmup: int) -> None:
    limit = made(clip)
    for norm in NORMS[: warmup - 1]:
        limit.push(norm)
        assert limit.limit() is None
    limit.push(1.0)
    assert limit.limit() is not None


@pytest.mark.parametrize("clip", ["percentile", "zscore"])
def test_what_is_not_finite_or_nothing_leaves_no_trace(clip: str) -> None:
    limit = made(clip)
    for norm in NORMS[:50]:
        limit.push(norm)
    before = json.dumps(limit.state_dict())
    for bad in (math.nan, math.inf, -math.inf, 0.0):
        limit.push(bad)
    assert json.dumps(limit.state_dict()) == before


@pytest.mark.parametrize("clip", ["percentile", "zscore"])
def test_spikes_do_not_lift_the_limit(clip: str) -> None:
    limit = made(clip)
    for norm in NORMS[:100]:
        limit.push(norm)
    for _ in range(5):
        limit.push(1e4)
    found = limit.limit()
    assert found is not None
    assert found < 4.0


@pytest.mark.parametrize("clip", ["percentile", "zscore"])
def test_the_state_round_trips(clip: str) -> None:
    one, two = made(clip), made(clip)
    for norm in NORMS[:300]:
        one.push(norm)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for norm in NORMS[300:]:
        assert one.limit() == two.limit()
        one.push(norm)
        two.push(norm)
    assert one.state_dict() == two.state_dict()


def test_the_state_of_another_strategy_is_left_alone() -> None:
    one, two = made("percentile"), made("zscore")
    fresh = [one.state_dict(), two.state_dict()]
    one.load_state_dict({"strategy": "zscore", "num": 3, "mean": 0.0, "variance": 1.0})
    two.load_state_dict({"strategy": "percentile", "norms": [1.0]})
    one.load_state_dict({})
    assert [one.state_dict(), two.state_dict()] == fresh


def test_no_memory_where_limits_are_fixed_or_come_from_the_weights() -> None:
    assert norm_limit(Clip()) is norm_limit(Clip(norm=1.0)) is norm_limit(Clip(adaptive=Agc())) is None


def test_clip_is_read_from_words_and_tables() -> None:
    def read(clip: Any) -> Clip:
        return Config.from_dict({"clip": clip}).clip

    assert read("agc") == Clip(adaptive=Agc(ratio=0.01, eps=1e-3))
    assert read({"strategy": "agc", "ratio": 0.1}) == Clip(adaptive=Agc(ratio=0.1))
    assert read("percentile") == Clip(adaptive=Percentile(percentile=90.0, window=512, warmup=32))
    assert read({"strategy": "percentile", "percentile": 10}) == Clip(adaptive=Percentile(percentile=10.0))
    assert read("zscore") == Clip(adaptive=ZScore(z=2.5, decay=0.97, warmup=25))
    for clip in (None, 1.0, "agc", "zscore", {"strategy": "percentile", "window": 64}):
        config = Config.from_dict({"clip": clip})
        assert bool(config.clip) == (clip is not None)
        assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("clip", "says"),
    [
        ("agcc", r"clip = 'agcc'; expected one of agc, percentile, zscore \(did you mean 'agc'\?\), or a number"),
        ("1.0", "or a number"),
        ({"strategy": "zskore"}, r"clip.strategy = 'zskore'; expected .*did you mean 'zscore'"),
        ({"strategy": None}, "clip.strategy = None"),
        ({"stratgy": "agc"}, "did you mean 'strategy'"),
        ({"strategy": "agc", "raito": 0.1}, "unknown setting 'clip.raito'; did you mean 'ratio'"),
        ({"strategy": "agc", "norm": 1.0}, "known are eps, ratio, strategy"),
        ({"strategy": "agc", "ratio": -1}, "clip.ratio = -1; expected a finite number above 0"),
        ({"strategy": "percentile", "percentile": 0.9}, "a number from 1 to 99"),
        ({"strategy": "percentile", "percentile": math.nan}, "a number from 1 to 99"),
        ({"strategy": "percentile", "percentile": True}, "a number from 1 to 99"),
        ({"strategy": "percentile", "window": 16}, "clip.warmup = 32; expected at most the window of 16"),
        ({"strategy": "percentile", "warmup": 0}, "at least 1"),
        ({"strategy": "zscore", "decay": 1.0}, "from 0.5 to 0.9999"),
        ({"strategy": "zscore", "z": math.inf}, "above 0"),
        ([1.0], r"expected a finite number above 0, a strategy \(agc, percentile, zscore\), or a table"),
        (True, "above 0"),
    ],
)
def test_wrong_values_are_refused_with_help(clip: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Config.from_dict({"clip": clip})
