import math

import pytest

from trimtab.report.chart import BAD, MARK, MAX_POINTS, chart, make_curve, sparkline, tail_median

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "values",
    [
        [],
        [NAN],
        [INF, -INF, NAN],
        [0.0],
        [1.0, 1.0, 1.0],
        [1e-300, 1e300],
        [-1e308, 1e308],
        [0.0, 1e9, NAN, 3.0],
        [-5.0, 5.0],
    ],
)
def test_no_value_breaks_a_chart(values):
    line = sparkline(values, 10)
    assert len(line) == len(values)
    curve = make_curve(range(len(values)), values)
    if values:
        assert curve is not None
        assert curve.num == len(values)
        assert len(chart(curve)) == 6
    else:
        assert curve is None


def test_sparkline_marks_what_is_not_finite_and_keeps_the_spike():
    line = sparkline([1.0] * 500 + [9.0] + [1.0] * 500, 20)
    assert len(line) == 20
    assert line.count("█") == 1
    assert sparkline([2.0, NAN, 4.0]) == f"▁{BAD}█"


def test_a_wide_range_is_drawn_on_a_log_scale():
    line = sparkline([1.0, 10.0, 100.0, 1000.0])
    assert len(set(line)) == 4, "on a linear axis all but the last would look alike"


def test_lines_beside_each_other_share_an_axis():
    both = [1.0, 2.0, 100.0]
    assert sparkline([1.0, 2.0], beside=both) == "▁▂"
    assert sparkline([100.0], beside=both) == "█"


def test_chart_marks_bad_steps_and_findings_under_the_axis():
    values = [1.0] * 100
    values[30] = NAN
    curve = make_curve(range(100), values)
    assert curve is not None
    axis = chart(curve, width=50, marks={60, 30}, bad={30})[-2]
    body = axis.split("└")[1]
    assert body[15] == BAD
    assert body[30] == MARK
    assert body.count(BAD) == body.count(MARK) == 1


def test_curve_is_bounded_and_keeps_extremes():
    values = [1.0] * 10_000
    values[1234], values[7777] = 50.0, NAN
    curve = make_curve(range(10_000), values)
    assert curve is not None
    assert len(curve.values) == MAX_POINTS
    assert 50.0 in curve.values
    assert 1234 in curve.steps
    assert 7777 in curve.steps
    assert (curve.num_nonfinite, curve.highest, curve.median) == (1, 50.0, 1.0)


def test_tail_median_ignores_what_is_not_finite():
    assert tail_median([9.0, 1.0, NAN, 3.0, INF], 2) == 2.0
    assert math.isnan(tail_median([NAN], 3))
