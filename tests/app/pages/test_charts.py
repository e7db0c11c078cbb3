from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.pages.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Series, format_value, line_chart, nice_ticks


def series(y, kind="line") -> Series:
    values = np.array(y, np.float64)
    return Series("loss", np.arange(1.0, len(values) + 1), values, 0, kind)


def points(svg: str) -> np.ndarray:
    return np.array([[float(x), float(y)] for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", svg)])


@given(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=40), st.booleans())
@example([1.0, 5e-324], False)
@example([0.0, 5e-324], False)
@example([5e-324, 1e-323], True)
def test_every_value_lies_inside_the_frame(y, from_zero):
    drawn = points(line_chart([series(y)], title="t", y_label="u", from_zero=from_zero))
    assert len(drawn) == len(y)
    assert drawn[:, 0].min() >= LEFT - 0.1
    assert drawn[:, 0].max() <= WIDTH - RIGHT + 0.1
    assert drawn[:, 1].min() >= TOP - 0.1
    assert drawn[:, 1].max() <= HEIGHT - BOTTOM + 0.1


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(6, 10))
def test_ticks_are_round_inside_and_few(low, span, most):
    high = low + span
    if high - low < 1e-9 * max(abs(low), 1):
        return
    ticks = nice_ticks(low, high, most)
    assert 2 <= len(ticks) <= most
    step = ticks[1] - ticks[0]
    assert all(low - 1e-6 * step <= tick <= high + 1e-6 * step for tick in ticks)
    assert np.allclose(np.diff(ticks), step)


def test_a_wide_span_of_positive_values_is_drawn_on_a_logarithmic_axis():
    drawn = points(line_chart([series([1e-3, 1e-2, 1e-1, 1])], title="t", y_label="u"))
    assert np.allclose(np.diff(drawn[:, 1]), np.diff(drawn[:, 1])[0], atol=0.2)


@pytest.mark.parametrize("y", [[0.0, 0.0], [5.0], [1e9, 1e9 + 1e-6], [-2.0, -2.0]])
@pytest.mark.parametrize("from_zero", [True, False])
def test_constant_values_have_an_axis_too(y, from_zero):
    svg = line_chart([series(y)], title="t", y_label="u", from_zero=from_zero)
    assert svg.count('text-anchor="end"') >= 3


def test_the_extreme_value_is_marked():
    svg = line_chart([series([3.0, 1.25, 2.0])], title="t", y_label="u", mark="min")
    assert "min 1.25" in svg
    assert svg.count('class="mark') == 1


def test_thinning_keeps_peaks():
    y = np.zeros(10_000)
    y[4321] = 7.0
    svg = line_chart([series(y)], title="t", y_label="u")
    drawn = points(svg)
    assert len(drawn) <= 400
    assert drawn[:, 1].min() < HEIGHT - BOTTOM - 100


def test_nothing_finite_is_said():
    svg = line_chart([series([np.nan, np.inf])], title="Empty", y_label="u")
    assert "No values" in svg
    assert "<svg" not in svg


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.123456, "0.1235"),
        (1024.0, "1024"),
        (40000.0, "40\u2009000"),
        (12345678.0, "1.23e7"),
        (1e-5, "1e-5"),
        (25557032, "25\u2009557\u2009032"),
        (-3.5, "−3.5"),
        (float("nan"), "–"),
    ],
)
def test_numbers_are_written_short(value, text):
    assert format_value(value) == text


def test_fewer_digits_round_but_never_lose_the_whole_part():
    assert format_value(0.46612, 3) == "0.466"
    assert format_value(1234.5, 3) == "1234"
