"""`log_histograms`: every value is counted once, in its bin, and nothing but the log changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import trimtab
from tests.integrations.loggers.kit import WandbFile, needs, offline
from trimtab.core.errors import InputError
from trimtab.integrations.loggers import histogram_log
from trimtab.integrations.loggers.histogram import NUM_CODES, SHIFT, Histogram, as_scalars
from trimtab.integrations.loggers.histogram_log import CodeCounter

__all__ = ["offline"]
LARGEST = float(np.finfo(np.float32).max)


def codes_of(values: np.ndarray) -> np.ndarray:
    return np.bincount(values.astype(np.float32).view(np.uint32) >> SHIFT, minlength=NUM_CODES)


def counted(tensors: list[torch.Tensor]) -> list[np.ndarray]:
    found: dict[int, np.ndarray] = {}
    for rows, counts in CodeCounter().count(tensors):
        found |= dict(zip(rows, counts.numpy(), strict=True))
    return [found[i] for i in range(len(tensors))]


floats = arrays.arrays(
    np.float32, st.integers(1, 200), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)
)


@settings(max_examples=200, deadline=None)
@given(floats)
def test_every_value_is_counted_once_in_its_bin(values: np.ndarray) -> None:
    found = Histogram.of(codes_of(values))
    finite = values[np.isfinite(values)].astype(np.float64)
    assert (found.num, found.num_nan, found.num_inf) == (
        len(finite),
        int(np.isnan(values).sum()),
        int(np.isinf(values).sum()),
    )
    assert np.all(np.diff(found.edges) > 0)
    if not len(finite):
        assert math.isnan(found.quantile(0.5))
        return
    assert found.edges[0] <= finite.min()
    assert finite.max() <= found.edges[-1]
    for i, count in enumerate(found.counts):
        low, high = found.edges[i], found.edges[i + 1]
        # An edge belongs to the bin that is further from zero.
        strictly = ((finite > low) & (finite < high)).sum()
        at_most = ((finite >= low) & (finite <= high)).sum()
        assert strictly <= count <= at_most
    counts, edges = found.linear(16)
    assert counts.sum() == len(finite)
    assert (counts >= 0).all()
    assert (edges[0], edges[-1]) == (found.edges[0], found.edges[-1])
    assert found.edges[0] <= found.quantile(0.5) <= found.edges[-1]


@settings(max_examples=60, deadline=None)
@given(st.lists(floats, min_size=1, max_size=5), st.integers(1, 3))
def test_tensors_counted_together_and_alone_are_counted_alike(some: list[np.ndarray], together: int) -> None:
    tensors = [torch.from_numpy(values) for values in some]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(histogram_log, "MOST_TOGETHER", together)
        for small in (0, 1 << 16):
            patch.setattr(histogram_log, "SMALL", small)
            patch.setattr(histogram_log, "PIECE", 7)
            for values, counts in zip(some, counted(tensors), strict=True):
                np.testing.assert_array_equal(counts, codes_of(values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float32])
def test_other_types_are_counted_by_their_values(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.5, 3e-5, math.nan, math.inf, -math.inf, 60000.0], dtype=dtype)
    (counts,) = counted([values])
    np.testing.assert_array_equal(counts, codes_of(values.float().numpy()))
    found = Histogram.of(counts)
    assert (found.num, found.num_nan, found.num_inf) == (6, 1, 2)


def test_what_is_too_large_for_float32_is_not_infinite() -> None:
    (counts,) = counted([torch.tensor([1e300, -1e300, math.inf], dtype=torch.float64)])
    found = Histogram.of(counts)
    assert (found.num, found.num_inf) == (2, 1)


def test_a_device_that_the_host_cannot_read_counts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(n) * 10.0**p for n, p in ((5, -9), (1000, 0), (70_000, 3))]
    here = counted(tensors)
    monkeypatch.setattr(histogram_log, "is_here", lambda tensor: False)
    for one, other in zip(here, counted(tensors), strict=True):
        np.testing.assert_array_equal(one, other)


class Log:
    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.rows[step] = values


def trained(closures: bool = False, num: int = 5, model: torch.nn.Module | None = None) -> Iterator[torch.nn.Module]:
    """A loop that hands out the model before each step."""
    torch.manual_seed(0)
    model = model if model is not None else torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in torch.randn(num, 8, 4):

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        if closures:
            yield model
            optimizer.step(closure)
        else:
            closure()
            yield model
            optimizer.step()


@pytest.mark.parametrize("closures", [False, True])
def test_histograms_come_on_a_cadence_and_training_is_unchanged(closures: bool) -> None:
    log = Log()
    model = next(trained())
    with trimtab.log_histograms(model, log, every=2):
        for _ in trained(closures, model=model):
            pass
    plain = next(trained())
    for _ in trained(closures, model=plain):
        pass
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert sorted(log.rows) == [0, 2, 4]
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        for kind in ("gradients", "parameters"):
            assert math.isfinite(log.rows[2][f"trimtab/{kind}/{name}/p50"])
    assert log.rows[0]["trimtab/gradients/nan"] == 0.0


def test_gradients_are_those_of_the_step_and_nonfinite_ones_are_counted() -> None:
    log = Log()
    loop = trained(num=2)
    model = next(loop)
    with trimtab.log_histograms(model, log, every=1, weights=False):
        grad = model[0].weight.grad  # type: ignore[index]
        grad[0, 0], grad[0, 1], grad[1, 0] = math.nan, math.inf, -math.inf
        for _ in loop:
            pass
    row = log.rows[0]
    assert (row["trimtab/gradients/nan"], row["trimtab/gradients/inf"]) == (1.0, 2.0)
    assert (row["trimtab/gradients/0.weight/nan"], row["trimtab/gradients/0.weight/inf"]) == (1.0, 2.0)
    assert not any("parameters" in name for name in row)


def test_scaled_gradients_are_logged_unscaled() -> None:
    log = Log()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with trimtab.log_histograms(model, log, every=1):
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
    row = log.rows[0]
    assert 1.0 <= row["trimtab/gradients/weight/p50"] <= 1.5, "each is 1"


def test_only_the_models_own_optimizers_count() -> None:
    log = Log()
    other = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with trimtab.log_histograms(torch.nn.Linear(2, 2), log, every=1):
        other(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert log.rows == {}


def test_it_stops_when_it_is_closed() -> None:
    log = Log()
    model = next(trained())
    handle = trimtab.log_histograms(model, log, every=1)
    handle.close()
    handle.close()
    for _ in trained(model=model):
        pass
    assert log.rows == {}


def test_a_logger_that_fails_does_not_stop_training(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def log(self, values: object) -> None:
            raise RuntimeError("no room")

    model = next(trained())
    with trimtab.log_histograms(model, Broken(), every=1):
        for _ in trained(model=model):
            pass
    assert "no room" in caplog.text
    assert "records did not reach it" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"every": 0}, "every is 0"),
        ({"every": True}, "every is True"),
        ({"gradients": False, "weights": False}, "nothing to log"),
        ({"model": 3}, "expected a torch.nn.Module"),
        ({"logger": 3}, "no logger that is known"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        trimtab.log_histograms(**{"model": torch.nn.Linear(1, 1), "logger": Log(), **arguments})


def test_other_ranks_stay_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    log = Log()
    model = next(trained())
    with trimtab.log_histograms(model, log, every=1):
        for _ in trained(model=model):
            pass
    assert log.rows == {}


def test_sparse_gradients_and_names_under_wrappers() -> None:
    log = Log()
    model = torch.nn.Sequential()
    model.add_module("module", torch.nn.Embedding(10, 3, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trimtab.log_histograms(model, log, every=1):
        model(torch.tensor([1, 1, 2])).sum().backward()
        optimizer.step()
    assert log.rows[0]["trimtab/gradients/weight/p99"] > 1.5, "two of them were added"


def test_quantiles_of_nothing_are_left_out() -> None:
    none = Histogram.of(codes_of(np.array([math.nan], np.float32)))
    assert as_scalars({"gradients/a": none}) == {"gradients/nan": 1.0, "gradients/inf": 0.0, "gradients/a/nan": 1.0}
    assert none.linear(4)[0].tolist() == [0, 0, 0, 0]
    assert none.moments() == (0.0, 0.0)


@needs("tensorboard")
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_draws_them(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path)
    model = next(trained())
    with trimtab.log_histograms(model, writer, every=2):
        for _ in trained(model=model):
            pass
    writer.close()
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
    events.Reload()
    found = events.Histograms("trimtab/gradients/0.weight")
    assert [one.step for one in found] == [0, 2, 4]
    assert all(one.histogram_value.num == 12 == sum(one.histogram_value.bucket) for one in found)
    assert [one.step for one in events.Scalars("trimtab/gradients/nan")] == [0, 2, 4]


@needs("wandb")
@pytest.mark.filterwarnings("ignore")
def test_wandb_draws_them_beside_a_guard(offline: Path) -> None:
    import wandb

    run = wandb.init(project="forest", mode="offline")
    model = next(trained())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with trimtab.log_histograms(model, run, every=2), trimtab.Guard(model, optimizer, sinks=[run], run_dir=False) as g:
        for step, x in enumerate(torch.randn(5, 8, 4)):
            optimizer.zero_grad()
            loss = model(x).square().mean() * (math.nan if step == 4 else 1.0)
            loss.backward()
            g.step(loss)
            run.log({"mine": step}, step=step)
    run.finish()
    file = WandbFile(offline)
    drawn = file.series("trimtab/gradients/0.weight/values")
    assert sorted(drawn) == [0, 2]
    assert sum(drawn[2]) == 12
    assert file.series("trimtab/gradients/0.weight/nan") == {4: 12.0}, "the guard rejects it after it was counted"
    assert sorted(file.series("trimtab/loss")) == [0, 1, 2, 3, 4]
    assert [row["_step"] for row in file.rows if "mine" in row] == [0, 1, 2, 3, 4]
