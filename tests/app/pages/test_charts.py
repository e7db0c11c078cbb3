"""Charts: every value inside the frame, on axes that suit it, in the page's colours."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.pages.charts import BOTTOM, COLOURS, HEIGHT, LEFT, MARKERS, RIGHT, TOP, WIDTH, Chart, Event, Series, line_chart


def series(y, kind="line") -> Series:
    values = np.array(y, np.float64)
    return Series("loss", np.arange(1.0, len(values) + 1), values, 0, kind)


def drawing(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(f"<svg>{chart.drawing}</svg>")


def points(chart: Chart) -> np.ndarray:
    """Corners of the first series' line, (n, 2)."""
    (line, *_) = drawing(chart).findall(".//g[@class]/path")
    return np.array([[float(x), float(y)] for x, y in re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", line.get("d", ""))])


def ticks(chart: Chart) -> list[str]:
    """Numbers of the y axis."""
    return [text.text or "" for text in drawing(chart).iter("text") if text.get("text-anchor") == "end"][1:]


def check_inside(drawn: np.ndarray) -> None:
    assert drawn[:, 0].min() >= LEFT - 0.1
    assert drawn[:, 0].max() <= WIDTH - RIGHT + 0.1
    assert drawn[:, 1].min() >= TOP - 0.1
    assert drawn[:, 1].max() <= HEIGHT - BOTTOM + 0.1


@settings(deadline=None)
@given(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=20), st.booleans())
@example([1.0, 5e-324], False)
@example([0.0, 5e-324], False)
@example([5e-324, 1e-323], True)
def test_every_value_lies_inside_the_frame(y, from_zero):
    check_inside(points(line_chart([series(y)], "t", "u", from_zero=from_zero)))


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("values", [(1.0, 1.0), (0.003, 4000.0), (5e-4, 6e-4), (7.0, 7.1)])
def test_sizes_and_their_values_lie_inside_the_frame(values, log):
    line = Series("a", np.array([512.0, 2048.0]), np.array(values), 0, "dots")
    chart = line_chart([line], "t", "u", x_label="tile", sizes=(512, 2048), from_zero=not log, log=log)
    check_inside(points(chart))
    assert len(ticks(chart)) >= 2
    said = [text.text for text in drawing(chart).iter("text")]
    assert {"512", "2048", "tile"} <= set(said)


def test_a_wide_span_of_positive_values_is_drawn_on_a_logarithmic_axis():
    drawn = points(line_chart([series([1e-3, 1e-2, 1e-1, 1])], "t", "u"))
    assert np.allclose(np.diff(drawn[:, 1]), np.diff(drawn[:, 1])[0], atol=0.2)


@pytest.mark.parametrize("y", [[0.0, 0.0], [5.0], [1e9, 1e9 + 1e-6], [-2.0, -2.0]])
@pytest.mark.parametrize("from_zero", [True, False])
def test_constant_values_have_an_axis_too(y, from_zero):
    shown = ticks(line_chart([series(y)], "t", "u", from_zero=from_zero))
    assert len(shown) == len(set(shown)) >= 2


def test_the_extreme_value_is_marked():
    chart = line_chart([series([3.0, 1.25, 2.0])], "t", "u", mark="min")
    assert drawing(chart).findtext(".//g[@class='value']/text") == "min 1.25"


def test_values_have_their_numbers_to_hover_over():
    chart = line_chart([series([3.0, np.nan, 2.5], "dots")], "t", "u")
    assert [title.text for title in drawing(chart).iter("title")] == ["loss: 3 (step: 1)", "loss: 2.5 (step: 3)"]
    assert "loss: 3 at 1, 2.5 at 3" in line_chart([series([3.0, np.nan, 2.5])], "t", "u", sizes=(1, 3)).said


def test_a_long_series_stays_small_and_keeps_its_peaks():
    y = np.random.default_rng(0).normal(size=20_000)
    y[4321] = 70.0
    chart = line_chart([series(y)], "t", "u")
    assert len(chart.drawing) < 200_000
    assert points(chart)[:, 1].min() < HEIGHT - BOTTOM - 100


def test_nothing_finite_has_no_drawing():
    assert line_chart([series([np.nan, np.inf])], "Empty", "u") == Chart("Empty", "u", (), "", "Empty")


def test_colours_and_letters_are_those_of_the_page():
    lines = [series([1.0, 2.0]), Series("b", np.array([1.0, 2.0]), np.array([2.0, 1.0]), 1, "ideal")]
    drawn = line_chart(lines, "t", "u", sizes=(1, 2), events=[Event(1.5, "now & <then>")], mark="max").drawing
    assert set(re.findall(r"var\(--(\w+)\)", drawn)) == {"c0", "c1", "soft", "line", "bad", "card"}
    assert not re.search(r"#[0-9a-f]{6}|font|url\(|\bid=\"(?!m)", drawn)
    assert "now &amp; &lt;then&gt;" in drawn


def test_lines_have_different_marks_or_colours():
    x = np.array([1.0, 2.0])
    looks = [(number % COLOURS, tuple(MARKERS)[number % len(MARKERS)]) for number in range(30)]
    lines = [Series(f"{n}", x, x + n, *look[:1], "dots", look[1]) for n, look in enumerate(looks)]
    marks = set(re.findall(r'<use href="#(\w+)"[^>]*fill: (var\(--c\d\))', line_chart(lines, "t", "u").drawing))
    assert len(marks) == 30


def test_same_values_same_drawing():
    first, second = (line_chart([series([1.0, 2.0], "dots")], "t", "u").drawing for _ in range(2))
    assert first == second
