"""Reducing a run for the page: nothing that matters is lost, and nothing grows without bound."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.conftest import WriteRun
from trimtab.core.types import ABSENT, FROZEN, NORM_COLUMNS, Closing, Kind, Layout, Sample
from trimtab.record.reader import read_run
from trimtab.record.writer import RunWriter
from trimtab.report.downsample import MAX_CLOSE, REACH
from trimtab.report.figures import (
    FIRST,
    FROZEN_CELL,
    INF,
    LAST,
    NAN,
    NO_GRADIENT,
    UNKNOWN,
    ZERO,
    Figures,
    HeatMap,
    HeatTable,
    make_figures,
    quantise,
)

Norms = tuple[int, tuple[str, ...], np.ndarray]


def make_heat_map(samples: list[Norms], max_stretches: int = 512) -> HeatMap | None:
    table = HeatTable(max_stretches)
    for step, names, norms in samples:
        table.add(step, names, norms)
    return table.finish()


cell = st.one_of(st.sampled_from([math.nan, math.inf, 0.0, ABSENT, FROZEN]), st.floats(2.0**-100, 2.0**100, width=32))


@given(
    rows=st.lists(st.lists(cell, min_size=3, max_size=3), min_size=1, max_size=60),
    stride=st.integers(1, 1000),
    most=st.integers(1, 20),
)
def test_the_worst_of_a_stretch_wins(rows: list[list[float]], stride: int, most: int) -> None:
    names = ("a", "b", "c")
    table = np.array(rows, dtype=np.float32)
    heat = make_heat_map([(i * stride, names, table[i]) for i in range(len(rows))], max_stretches=most)
    assert heat is not None
    assert heat.names == names
    assert heat.codes.shape[0] == 3
    assert heat.codes.shape[1] <= most
    for column in range(heat.codes.shape[1]):
        inside = [i for i in range(len(rows)) if (i * stride) // heat.width == column]
        for row in range(3):
            part, code = table[inside, row], heat.codes[row, column]
            if not inside:
                assert code == UNKNOWN
            elif np.isnan(part).any():
                assert code == NAN
            elif np.isinf(part).any():
                assert code == INF
            elif (part > 0).any():
                assert decoded(heat, row, column) == pytest.approx(float(np.log2(part.max())), abs=0.5)
            else:
                assert code == {0.0: ZERO, ABSENT: NO_GRADIENT, FROZEN: FROZEN_CELL}[float(part.max())]


@pytest.mark.parametrize("order", ["forward", "backward", "rewound"])
@pytest.mark.parametrize("most", [7, 100])
def test_the_order_and_the_flushes_do_not_matter(monkeypatch: pytest.MonkeyPatch, order: str, most: int) -> None:
    rng = np.random.default_rng(0)
    steps = [1000 + s for s in range(300)]
    samples = [(s, ("a", "b"), rng.random(2, dtype=np.float32)) for s in steps]
    whole = make_heat_map(samples, most)
    turned = {"forward": samples, "backward": samples[::-1], "rewound": samples[:200] + samples[100:]}[order]
    monkeypatch.setattr("trimtab.report.figures._MAX_PENDING", 30)
    pieces = make_heat_map(turned, most)
    assert whole is not None
    assert pieces is not None
    assert (whole.first_step, whole.width) == (pieces.first_step, pieces.width)
    assert np.array_equal(whole.codes, pieces.codes)


def decoded(heat: HeatMap, row: int, column: int) -> float:
    code = int(heat.codes[row, column])
    assert FIRST <= code <= LAST
    return float(heat.low[row] + (code - FIRST) / (LAST - FIRST) * (heat.high[row] - heat.low[row]))


def test_one_byte_is_precise_within_the_range_of_its_row() -> None:
    norms = np.array([np.geomspace(1e-3, 1e3, 500), np.full(500, 7.0)], dtype=np.float32)
    codes, low, high = quantise(norms)
    back = low[:, None] + (codes.astype(float) - FIRST) / (LAST - FIRST) * (high - low)[:, None]
    assert np.abs(back - np.log2(norms)).max() < 0.05


def test_rows_that_come_and_go_are_blank_where_they_were_not_measured() -> None:
    heat = make_heat_map([(0, ("a",), np.float32([1.0])), (1, ("b", "a"), np.float32([2.0, 3.0]))])
    assert heat is not None
    assert heat.names == ("a", "b")
    assert heat.codes[1].tolist()[0] == UNKNOWN
    assert (heat.codes[0] >= FIRST).all()
    assert make_heat_map([]) is None


def test_a_thinned_record_leaves_no_stripes() -> None:
    heat = make_heat_map([(s, ("a",), np.float32([1.0])) for s in range(0, 64_000, 64)])
    assert heat is not None
    assert (heat.codes != UNKNOWN).all()


def only(figures: tuple[Figures, ...]) -> Figures:
    (found,) = figures
    return found


def test_panels_of_a_run(write_run: WriteRun) -> None:
    losses = [2.0] * 30 + [math.nan] + [1.5] * 30
    figures = only(make_figures(read_run(write_run(losses, [3.0] * 30 + [math.nan] + [0.5] * 30)), {}))
    panels = {p.title: {s.name: s for s in p.series} for p in figures.panels}
    assert list(panels) == ["Loss", "Gradient norm"]
    assert np.isnan(panels["Loss"]["training"].values[30])
    assert panels["Gradient norm"]["before clipping"].values[0] == 3.0
    after = panels["Gradient norm"]["after clipping"]
    assert after.values[0] == pytest.approx(1.0)
    assert 30 not in after.steps
    assert panels["Gradient norm"]["update rejected"].steps.tolist() == [30]
    assert (panels["Loss"]["training"].num, panels["Loss"]["training"].num_bad) == (61, 1)
    assert (figures.first_step, figures.last_step) == (0, 60)
    assert figures.heat is not None
    assert figures.heat.names == ("w", "b")
    assert figures.heat.codes[0, 30] == NAN


def write_samples(folder: Path, scalars: list[dict[str, float]], *, phase: str = "train", optimizer: str = "") -> Path:
    layout = Layout(names=("w",), kinds=(Kind.GRAD,), numel=(1,), columns=NORM_COLUMNS, optimizer=optimizer)
    writer = RunWriter(folder)
    for step, now in enumerate(scalars):
        writer.write(
            Sample(step=step, layout=layout, table=np.ones((1, 1), np.float32), scalars=now, phase=phase),
        )
    writer.write(Closing(steps={optimizer: len(scalars)}, rejected=0, findings=0, reason="closed"))
    writer.close()
    return folder


def test_learning_rates_of_groups_and_what_is_in_force(tmp_path: Path) -> None:
    rates = [{"lr/0": 0.1, "lr/1": 0.1, "lr/2": 0.01, "scale": 8.0, "update_ratio": 0.5} for _ in range(10)]
    rates[5]["lr_multiplier"] = 0.5
    figures = only(make_figures(read_run(write_samples(tmp_path, rates)), {}))
    panels = {p.title: p for p in figures.panels}
    assert list(panels) == ["Learning rate", "Update ratio", "Loss scale"]
    series = {s.name: s.values.tolist() for s in panels["Learning rate"].series}
    assert list(series) == ["group 0, 1", "group 0, 1, in force", "group 2", "group 2, in force"]
    assert series["group 0, 1, in force"] == [0.1] * 5 + [0.05] + [0.1] * 4
    many = write_samples(tmp_path / "many", [{f"lr/{g}": g + s for g in range(20)} for s in range(3)])
    rate = only(make_figures(read_run(many), {})).panels[0]
    assert [s.name for s in rate.series][:3] == ["group 0", "group 1", "group 2"]
    assert rate.note == "6 of 20 different groups"


def test_several_optimizers_share_one_axis_and_validation_is_points(tmp_path: Path) -> None:
    write_samples(tmp_path, [{"loss": 1.0, "grad_norm": 1.0}] * 5, optimizer="g")
    write_samples(tmp_path, [{"loss": 2.0}] * 8, optimizer="d")
    write_samples(tmp_path, [{"val_loss": 3.0}] * 2, optimizer="d", phase="val")
    figures = only(make_figures(read_run(tmp_path), {}))
    assert (figures.optimizer, figures.first_step, figures.last_step) == ("", 0, 7)
    assert [(s.name, s.drawn_as, len(s.steps)) for s in figures.panels[0].series] == [
        ("g", "line", 5),
        ("d", "line", 8),
        ("d, validation", "points", 2),
    ]
    assert [s.name for s in figures.panels[1].series] == ["g"]


def test_what_the_machine_reports_has_its_own_charts_and_axes(tmp_path: Path) -> None:
    scalars = [
        {"loss": 1.0, "epoch": float(s // 10), "clock": 1e9 + 0.5 * s, "gpu_memory": 2e9, "gpu_memory_peak": 3e9}
        | {"gpu_utilisation": 0.9, "data_wait": 0.25}
        for s in range(30)
    ]
    figures = only(make_figures(read_run(write_samples(tmp_path, scalars)), {}))
    panels = {p.title: p for p in figures.panels}
    assert [s.name for s in panels["GPU memory"].series] == ["in use", "peak"]
    assert panels["GPU memory"].series[1].values[0] == pytest.approx(3.0)
    assert panels["GPU utilisation"].series[0].values[0] == pytest.approx(90.0)
    assert panels["Waiting for data"].series[0].values[0] == pytest.approx(25.0)
    assert panels["Waiting for data"].unit == "%"
    assert {a.name: (a.values[0], a.values[-1]) for a in figures.axes} == {"epoch": (0.0, 2.0), "time": (0.0, 14.5)}


def test_other_numbers_of_the_layers_have_heat_maps_too(tmp_path: Path) -> None:
    kinds = (Kind.GRAD, Kind.GRAD, Kind.WEIGHT, Kind.WEIGHT, Kind.UPDATE, Kind.UPDATE)
    layout = Layout(names=("a", "b") * 3, kinds=kinds, numel=(4, 16) * 3)
    table = np.zeros((6, 7), np.float32)
    table[:, 0] = [2.0, 4.0, 10.0, 20.0, 1.0, 0.0]
    table[:2, 5] = [0.5, 0.0]
    table[2:, 5] = np.nan
    writer = RunWriter(tmp_path)
    writer.write(Sample(step=0, layout=layout, table=table, scalars={"loss": 1.0}))
    writer.close()
    heats = {h.metric: h for h in only(make_figures(read_run(tmp_path), {})).heats}
    assert list(heats) == ["Gradient RMS", "Update ratio", "Weight norm", "Zero fraction"]
    assert 2 ** heats["Gradient RMS"].low[0] == pytest.approx(1.0)
    assert 2 ** heats["Gradient RMS"].low[1] == pytest.approx(1.0)
    assert 2 ** heats["Update ratio"].low[0] == pytest.approx(0.1)
    assert heats["Update ratio"].codes[1, 0] == ZERO
    assert 2 ** heats["Weight norm"].low[1] == pytest.approx(20.0)
    assert 2 ** heats["Zero fraction"].low[0] == pytest.approx(0.5)


@pytest.mark.long
def test_sizes_stay_bounded(write_run: WriteRun) -> None:
    losses = [math.nan if 2000 <= s < 4000 else 1.0 + (s % 7) for s in range(6000)]
    run = read_run(write_run(losses, [1.0 + (s % 11) for s in range(6000)]))
    figures = only(make_figures(run, {"": list(range(0, 6000, 300))}))
    assert figures.heat is not None
    assert 256 <= figures.heat.codes.shape[1] <= 512
    assert (figures.panels[0].series[0].num, figures.panels[0].series[0].num_bad) == (6000, 2000)  # also if not drawn
    for panel in figures.panels:
        for series in panel.series:
            assert len(series.steps) <= 3 * 800 + 2 + MAX_CLOSE * (2 * REACH + 1)
