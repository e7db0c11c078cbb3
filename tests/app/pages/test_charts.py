"""Charts: a picture for every series that has a value, the same for the same values."""

from __future__ import annotations

import base64
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.pages.charts import COLOURS, MARKERS, Chart, Series, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def series(y, kind="line") -> Series:
    values = np.array(y, np.float64)
    return Series("loss & <x>", np.arange(1.0, len(values) + 1), values, 0, kind)


def drawing(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(base64.b64decode(chart.svg))


def words(chart: Chart) -> list[str]:
    return ["".join(text.itertext()) for text in drawing(chart).iter(f"{SVG}text")]


@settings(deadline=None)
@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20), st.booleans())
@example([1.0, 5e-324], False)
@example([0.0, 5e-324], True)
@example([5e-324, 1e-323], True)
@example([0.0, 0.0], True)
@example([1e9, 1e9 + 1e-6], False)
@example([-2.0, -2.0], True)
def test_whatever_the_values_there_is_a_picture_and_no_warning(y, from_zero):
    shown = line_chart([series(y)], "t", "u", from_zero=from_zero, mark="max")
    assert any(word.startswith("loss & <x>") for word in words(shown))


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("values", [(1.0, 1.0), (0.003, 4000.0), (5e-4, 6e-4)])
def test_sizes_are_the_numbers_of_the_x_axis(values, log):
    line = Series("a", np.array([512.0, 2048.0]), np.array(values), 0, "dots")
    chart = line_chart([line], "t", "u", x_label="tile", sizes=(512, 2048), from_zero=not log, log=log)
    assert {"512", "2048", "tile"} <= set(words(chart))
    assert chart.alt.startswith("t. a: ")


def test_a_wide_span_of_positive_values_is_drawn_on_a_logarithmic_axis():
    powers, plain = (
        words(line_chart([series([1e-3, 1e-2, 1e-1, 1])], "t", "u")),
        words(line_chart([series([1.0, 2.0])], "t", "u")),
    )
    assert any("10−" in "".join(word.split()) for word in powers)
    assert not any("10−" in "".join(word.split()) for word in plain)


def test_the_extreme_value_is_marked_and_the_last_one_is_in_the_legend():
    shown = words(line_chart([series([3.0, 1.25, 2.0])], "t", "u", mark="min"))
    assert "min 1.25" in shown
    assert "loss & <x> 2" in shown


def test_gaps_stay_gaps_and_nothing_finite_has_no_picture():
    assert (
        line_chart([series([3.0, np.nan, 2.5], "dots")], "t", "u", sizes=(1, 3)).alt
        == "t. loss & <x>: 3 at 1, 2.5 at 3"
    )
    assert line_chart([series([np.nan, np.inf])], "Empty", "u") == Chart("Empty", "u", "", "Empty")


def test_a_long_series_stays_small():
    assert len(line_chart([series(np.random.default_rng(0).normal(size=20_000))], "t", "u").svg) < 400_000


def test_lines_have_different_marks_or_colours():
    looks = {(COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]) for number in range(30)}
    assert len(looks) == 30


def test_same_values_same_picture():
    first, second = (line_chart([series([1.0, 2.0], "dots")], "t", "u").svg for _ in range(2))
    assert first == second
