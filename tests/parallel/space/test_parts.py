"""Parts of a region: they cover it, keep to the memory they are given, and cut where little crosses."""

from __future__ import annotations

import pytest

from parallel.space.parts import MULTIPLES, divide
from parallel.space.phases import Part, phases_of
from parallel.space.region import PaperRegion
from parallel.space.rule import SAME, Step, Window, in_phases

WIDE, NARROW = 64_000, 4_000


def divided(steps: list[Step], side: int, box_bytes: float, stored: float) -> list[Part]:
    """Return the parts of steps that are one phase, in boxes of 64 px."""
    sides = {"image": (side, side), **{step.name: step.sides for step in steps}}
    region = PaperRegion(tuple(steps), sides, (side, side), {"image": 0}, (steps[-1].name,))
    (phase,) = phases_of(region.steps, region.leaving)
    return divide(region, phase, 64, box_bytes, stored)


def chain(blocks: int, side: int) -> list[Step]:
    """Blocks of two 3 x 3 convolutions; the value between two blocks is narrow."""
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
