"""The search for the largest tile finds the last one that fits, whatever the memory."""

from __future__ import annotations

import pytest

from parallel.candidate import Candidate
from parallel.largest_tile import LIMIT, STEP, largest_tiles
from parallel.plan import Row


def row(name: str, over: int) -> Row:
    return Row(Candidate(name, 1, 1, 1), over_bytes=max(0, over))


@pytest.mark.parametrize("memory", [STEP**2, 1000**2, 1024**2, 1025**2, 5000**2])
def test_the_next_side_does_not_fit(memory: int) -> None:
    asked = []

    def least(tile: int, name: str) -> Row:
        asked.append(tile)
        return row(name, tile**2 - memory)

    (found,) = largest_tiles(["single"], least)
    assert found.tile**2 <= memory < (found.tile + STEP) ** 2
    assert found.row is not None
    assert found.row.fits
    assert found.next_row is not None
    assert not found.next_row.fits
    assert len(asked) == len(set(asked)) <= 20


def test_what_never_fits_and_what_always_does() -> None:
    never, always = largest_tiles(["never", "always"], lambda tile, name: row(name, int(name == "never")))
    assert (never.tile, never.row) == (0, None)
    assert never.next_row is not None
    assert (always.tile, always.next_row) == (LIMIT, None)


def test_what_cannot_run_is_left_out() -> None:
    assert largest_tiles(["mast"], lambda tile, name: None) == []
