"""The search for the largest tile finds the last one that fits, whatever the memory."""

from __future__ import annotations

import pytest

from parallel.plan.candidates import BOXES, ON_DEVICE, PLAIN, RECOMPUTE, MemoryOptions
from parallel.plan.largest_tile import LIMIT, STEP, largest_tiles, steps_of
from parallel.plan.plan import PlanRow
from parallel.strategy import Strategy


def row(name: str, over: int) -> PlanRow:
    return PlanRow(Strategy(name, 1, 1, 1), over_bytes=max(0, over))


@pytest.mark.parametrize("memory", [STEP**2, 1000**2, 1024**2, 1025**2, 5000**2])
def test_the_next_side_does_not_fit(memory: int) -> None:
    asked = []

    def least(tile: int, name: str, savings: MemoryOptions) -> PlanRow:
        asked.append(tile)
        return row(name, tile**2 - memory)

    (found,) = largest_tiles(["single"], [PLAIN], least)
    assert found.tile**2 <= memory < (found.tile + STEP) ** 2
    assert found.row is not None
    assert found.row.fits
    assert found.next_row is not None
    assert not found.next_row.fits
    assert found.doubled is not None
    assert len(asked) - 1 <= len(set(asked)) <= 20  # twice the side may have been asked for before


@pytest.mark.parametrize("fixed", [0, 1000**2, -(10**9)])
def test_bytes_of_the_rows_shorten_the_search(fixed: int) -> None:
    """They are right, shifted, or no guide at all: the answer is the same."""
    memory, asked = 5000**2, []

    def least(tile: int, name: str, savings: MemoryOptions) -> PlanRow:
        asked.append(tile)
        peak = fixed + tile**2 if fixed >= 0 else 1
        over = max(0, tile**2 - memory)
        return PlanRow(Strategy(name, 1, 1, 1), peak_bytes=(peak,), over_bytes=over)

    (found,) = largest_tiles(["single"], [PLAIN], least)
    assert found.tile == 4992
    assert len(set(asked)) <= (12 if fixed >= 0 else 16)


def test_what_never_fits_and_what_always_does() -> None:
    never, always = largest_tiles(
        ["never", "always"], [PLAIN], lambda tile, name, savings: row(name, int(name == "never"))
    )
    assert (never.tile, never.row) == (0, None)
    assert never.next_row is not None
    assert (always.tile, always.next_row, always.doubled) == (LIMIT, None, None)


def test_what_cannot_run_is_left_out() -> None:
    assert largest_tiles(["mast"], [PLAIN], lambda tile, name, savings: None) == []


@pytest.mark.parametrize(("memory", "tile"), [(5000**2, 4992), (400**2, 384), (100**2, 0)])
def test_models_that_run_on_no_small_tiles_are_searched_on_those_they_run_on(memory: int, tile: int) -> None:
    found = largest_tiles(
        ["single"], [PLAIN], lambda side, name, savings: None if side < 256 else row(name, side**2 - memory)
    )
    assert [one.tile for one in found] == [tile][: bool(tile)]


def test_what_does_not_fit_is_not_tried_again() -> None:
    candidate, steps = Strategy("gpipe", 2, 2, 4), steps_of(MemoryOptions())
    tried = [variant for step in steps for tier in step.escalation(candidate) for variant in tier]
    assert len(steps) == 4
    assert len(tried) == len(set(tried)) > 4
    assert set(tried) == {variant for tier in MemoryOptions().escalation(candidate) for variant in tier}


def test_savings_follow_each_other_as_far_as_they_gain_anything() -> None:
    def least(tile: int, name: str, savings: MemoryOptions) -> PlanRow:
        side = {"ddp": 1000, "fsdp": 600}[name]
        if name == "ddp":
            side *= len(savings.offload) * (1 + (savings.recompute != ("none",))) * (1 + 5 * savings.stream)
        return row(name, tile - side)

    found = largest_tiles(["ddp", "fsdp"], steps_of(MemoryOptions()), least)
    assert [(one.name, one.tile, one.savings) for one in found] == [
        ("ddp", 960, PLAIN),
        ("ddp", 1984, ON_DEVICE),
        ("ddp", 3968, MemoryOptions(stream=False)),
        ("ddp", 5952, BOXES),
        ("fsdp", 576, PLAIN),
    ]


def test_steps_of_what_is_asked_for() -> None:
    assert steps_of(PLAIN) == [PLAIN]
    block = [MemoryOptions(("block",), (False,), False), MemoryOptions(("block",), (False, True), False)]
    assert steps_of(MemoryOptions(("block",))) == block
    assert steps_of(MemoryOptions(("none",), (True,))) == [MemoryOptions(("none",), (True,), False)]
    assert steps_of(MemoryOptions())[-2:] == [MemoryOptions(RECOMPUTE, (False, True), False), BOXES]
