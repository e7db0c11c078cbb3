"""Faults in plans of boxes are found, and named."""

from __future__ import annotations

from parallel.space.box_bytes import AxisNeeds
from parallel.space.grid import Span
from parallel.space.parts import partition_faults, rule_faults, span_faults
from parallel.space.rule import Step, Window

SIDES = {"image": (61, 61), "conv": (31, 31), "relu": (31, 31), "sum": (31, 31)}
CONV = Step("conv", ("image",), rules=(Window(7, 2, 1, 3, 3),) * 2, sides=(31, 31))
STEPS = [CONV, Step("relu", ("conv",), sides=(31, 31)), Step("sum", ("relu", "conv"), sides=(31, 31))]


def test_needed_spans_lack_nothing() -> None:
    spans = AxisNeeds(STEPS[-1:], SIDES, (0, 30, 61), 0, 1).begin_with_all(STEPS)
    assert spans == {"sum": Span(15, 31), "relu": Span(15, 31), "conv": Span(15, 31), "image": Span(27, 61)}
    assert not span_faults(STEPS, spans, SIDES, 0)


def test_a_halo_of_the_wrong_width_is_named() -> None:
    spans = {**AxisNeeds(STEPS[-1:], SIDES, (0, 30, 61), 0, 1).begin_with_all(STEPS), "image": Span(28, 61)}
    assert span_faults(STEPS, spans, SIDES, 0) == ["conv needs (27, 61) of image; there is (28, 61)"]


def test_rows_given_twice_or_never_are_named() -> None:
    assert not partition_faults("conv", [Span(0, 15), Span(15, 31)], 31)
    assert partition_faults("conv", [Span(0, 15), Span(14, 30)], 31) == [
        "rows 14 to 14 of conv are given twice",
        "rows 30 to 30 of conv are given by no box",
    ]


def test_a_rule_that_gives_other_rows_is_named() -> None:
    assert not rule_faults(STEPS, SIDES)
    assert rule_faults([CONV], {"image": (64, 61)}) == ["conv has 31 rows; its rule gives [32]"]
