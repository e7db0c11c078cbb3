"""Rules, spans, cuts and parts of boxes against brute force; faults in plans of boxes are found, and named."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.space.box_bytes import AxisNeeds
from parallel.space.cuts import Span, box_spans, tile_cuts
from parallel.space.parts import MULTIPLES, divide, partition_faults, span_faults
from parallel.space.phases import Part, phases_of
from parallel.space.rule import SAME, Resample, Rule, Step, Transposed, Window, in_phases
from parallel.space.spatial_plan import RegionSpec


def windows() -> st.SearchStrategy[Window]:
    """Those of pools in ceil mode, whose pads are alike and at most half the window, among them."""
    kernel, stride, dilation, pads = st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 5)
    pools = st.builds(Window, kernel, stride, dilation, ceil=st.just(True)).flatmap(
        lambda rule: st.integers(0, rule.reach // 2).map(lambda pad: replace(rule, before=pad, after=pad))
    )
    return pools | st.builds(Window, kernel, stride, dilation, pads, pads)


@given(windows(), st.integers(1, 30), st.data())
def test_a_window_needs_the_rows_it_covers(rule: Window, side: int, data: st.DataObject) -> None:
    starts = [*range(-rule.before, side + rule.after - rule.reach + 1, rule.stride)]
    if not starts:
        return
    following, left_over = starts[-1] + rule.stride, starts[-1] + rule.reach < side + rule.after
    if rule.ceil and left_over and following < side:  # a last window hangs over what is left
        starts.append(following)
    assert rule.out(side) == len(starts)
    first = data.draw(st.integers(0, len(starts) - 1))
    last = data.draw(st.integers(first, len(starts) - 1))
    touched = [start + k * rule.dilation for start in starts[first : last + 1] for k in range(rule.kernel)]
    assert rule.need(Span(first, last + 1), side) == Span(min(touched), max(touched) + 1)


@given(
    st.builds(
        Transposed, st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 3), st.integers(0, 2)
    ),
    st.integers(1, 20),
    st.data(),
)
def test_a_transposed_window_needs_the_rows_that_reach_it(rule: Transposed, side: int, data: st.DataObject) -> None:
    count = rule.out(side)
    if count < 1:
        return
    first = data.draw(st.integers(0, count - 1))
    wanted = range(first, data.draw(st.integers(first, count - 1)) + 1)
    reached = {
        row: [row * rule.stride - rule.padding + k * rule.dilation for k in range(rule.kernel)] for row in range(side)
    }
    sources = [row for row, rows in reached.items() if set(rows) & set(wanted)]
    need = rule.need(Span(wanted.start, wanted.stop), side)
    assert all(need.start <= row < need.stop for row in sources)
    assert need.size <= (len(wanted) + rule.reach) // rule.stride + 1


def test_resampling_needs_the_rows_it_looks_up_and_few_more() -> None:
    rule = Resample(97, None, "linear")
    for row in range(97):
        at = max(0.0, (row + 0.5) * 61 / 97 - 0.5)
        need = rule.need(Span(row, row + 1), 61)
        assert need.holds(Span(int(at), min(int(at) + 2, 61)))
        assert need.size <= 6


@pytest.mark.parametrize(
    ("rule", "side", "rows", "need"),
    [
        (Window(7, 2, 1, 3, 3), 61, Span(0, 15), Span(-3, 32)),  # the study's example: member 0 of two
        (Window(7, 2, 1, 3, 3), 61, Span(15, 31), Span(27, 64)),
        (SAME, 61, Span(3, 9), Span(3, 9)),
        (Window(3, 2), 8, Span(1, 3), Span(2, 7)),  # stride alignment: not the part's begin less a halo
        (Window(2, 1, 1, 0, 1), 8, Span(7, 8), Span(7, 9)),  # even 'same': the odd row at the end
        (Window(1, 1, 1, 3, 3), 8, Span(0, 2), Span(-3, -1)),  # wholly outside: p > reach
        (Transposed(2, 4), 5, Span(2, 4), Span(1, 1)),  # rows without a source
    ],
)
def test_known_needs(rule: Rule, side: int, rows: Span, need: Span) -> None:
    found = rule.need(rows, side)
    assert found == need or (not found.size and not need.size)


@given(st.integers(1, 400), st.integers(1, 200), st.integers(1, 400))
def test_cells_partition_every_map_and_follow_the_tile(tile: int, box: int, side: int) -> None:
    cuts = tile_cuts(tile, box)
    parts = box_spans(cuts, side)
    assert [row for part in parts for row in range(*part)] == list(range(side))
    assert box_spans(cuts, tile) == tuple(Span(a, b) for a, b in pairwise(cuts))
    assert max(b - a for a, b in pairwise(cuts)) <= box + 32


def test_spans_never_touch_nothing() -> None:
    assert Span(-3, -1).touching(8) == Span(0, 1)
    assert Span(9, 12).touching(8) == Span(7, 8)
    assert Span(-3, 2).touching(8) == Span(0, 2)
    assert Span(2, 4).hull(Span(9, 9)) == Span(2, 4)
    assert Span(2, 4).hull(Span(6, 9)) == Span(2, 9)
    assert Span(2, 9).holds(Span(3, 3))
    assert not Span(2, 9).holds(Span(1, 3))


WIDE, NARROW = 64_000, 4_000


def divided(steps: list[Step], side: int, box_bytes: float, stored: float) -> list[Part]:
    sides = {"image": (side, side), **{step.name: step.sides for step in steps}}
    region = RegionSpec(tuple(steps), sides, (side, side), {"image": 0}, (steps[-1].name,))
    (phase,) = phases_of(region.steps, region.live_out)
    return divide(region, phase, 64, box_bytes, stored)


def chain(blocks: int, side: int) -> list[Step]:
    steps: list[Step] = []
    before, conv = "image", Window(3, 1, 1, 1, 1)
    for k in range(blocks):
        for name, size in ((f"a{k}", WIDE), (f"b{k}", NARROW)):
            steps.append(
                Step(name, (before,), (), (conv, conv), (side, side), flops=1e9, saves=(name,), value_bytes=size)
            )
            before = name
    return steps


@pytest.mark.parametrize("stored", [0, 2 * NARROW, 1e9])
def test_parts_cover_the_steps_and_cut_where_little_crosses(stored: float) -> None:
    steps = chain(6, 512)
    parts = divided(steps, 512, 4 * sum(s.value_bytes for s in steps) / 64, stored)
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert (parts[0].start, parts[-1].stop) == (0, len(steps))
    assert all(part.start % 2 == 0 for part in parts)
    assert sum(steps[part.stop - 1].value_bytes for part in parts[:-1]) <= stored
    assert {part.box // 64 for part in parts} <= set(MULTIPLES)


def test_deep_maps_are_computed_in_larger_boxes() -> None:
    """Their rims are as wide, and their bytes a sixteenth."""
    half = Window(3, 4, 1, 1, 1)
    steps, side, before = [], 1024, "image"
    for k in range(4):
        side //= 4 if k < 2 else 1
        rule, size = half if k < 2 else Window(9, 1, 1, 4, 4), side * side * 100
        steps.append(
            Step(f"v{k}", (before,), (), (rule, rule), (side, side), flops=1e9, kept_bytes=size, value_bytes=1)
        )
        before = f"v{k}"
    parts = divided(steps, 1024, sum(s.kept_bytes for s in steps) / 256, 1e9)
    assert len(parts) > 1
    assert parts[-1].box > parts[0].box == 64


def test_what_is_made_of_a_sum_waits_for_it() -> None:
    conv = Step("conv", ("image",), sides=(8, 8))
    pooled = Step("pooled", ("conv",), sides=(8, 8), sums=True)
    gate = Step("gate", others=("pooled",), global_op=True)
    scaled = Step("scaled", ("conv",), ("gate",), (SAME, SAME), (8, 8))
    beside = Step("beside", ("conv",), sides=(8, 8))
    phases = in_phases([conv, pooled, gate, beside, scaled])
    assert phases == [([], [conv, pooled, beside]), ([gate], [scaled])]


SIDES = {"image": (61, 61), "conv": (31, 31), "relu": (31, 31), "sum": (31, 31)}
CONV = Step("conv", ("image",), rules=(Window(7, 2, 1, 3, 3),) * 2, sides=(31, 31))
STEPS = [CONV, Step("relu", ("conv",), sides=(31, 31)), Step("sum", ("relu", "conv"), sides=(31, 31))]


def test_faults_of_plans_are_named() -> None:
    spans = AxisNeeds(STEPS[-1:], SIDES, (0, 30, 61), 0, 1).prepend_all(STEPS)
    assert spans == {"sum": Span(15, 31), "relu": Span(15, 31), "conv": Span(15, 31), "image": Span(27, 61)}
    assert not span_faults(STEPS, spans, SIDES, 0)
    narrow = {**spans, "image": Span(28, 61)}
    assert span_faults(STEPS, narrow, SIDES, 0) == ["conv needs (27, 61) of image; there is (28, 61)"]
    assert not partition_faults("conv", [Span(0, 15), Span(15, 31)], 31)
    twice, never = partition_faults("conv", [Span(0, 15), Span(14, 30)], 31)
    assert "14 to 14" in twice
    assert "30 to 30" in never
