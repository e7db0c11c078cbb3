"""Numbers as readers would write them."""

from __future__ import annotations

import pytest
from jinja2 import UndefinedError

from app.pages.html import format_value, rendered


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


def test_a_template_does_not_go_without_what_it_asks_for():
    with pytest.raises(UndefinedError, match="settings"):
        rendered("comparison.html.j2", runs=2)
