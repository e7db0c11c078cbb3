"""Arrangements: the same from any box asked for; the two classes differ in nothing that a 256 px tile sees."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pipelines.synthetic.arrangement import CROWDED, EVEN, GROUPED, SMALL_WINDOW, Arrangement
from pipelines.synthetic.glands import HALO

SIDE = 12_288


def _centres(arrangement: Arrangement, seed: int) -> NDArray[np.int64]:
    return np.array([(gland.l0_x, gland.l0_y) for gland in arrangement.glands(seed, 0, 0, SIDE, SIDE)])


@pytest.mark.parametrize("arrangement", [EVEN, GROUPED, CROWDED])
def test_boxes_that_tile_the_plane_give_each_gland_once(arrangement: Arrangement) -> None:
    whole = arrangement.glands(3, -1000, 500, 3000, 3500)
    parts = [
        gland
        for x in range(-1000, 3000, 500)
        for y in range(500, 3500, 1000)
        for gland in arrangement.glands(3, x, y, x + 500, y + 1000)
    ]
    key = lambda gland: (gland.l0_x, gland.l0_y, gland.stamp)  # noqa: E731 - two uses, one line
    assert sorted(whole, key=key) == sorted(parts, key=key)
    assert len(whole) > 20


@pytest.mark.parametrize("arrangement", [EVEN, GROUPED])
@pytest.mark.parametrize("seed", range(6))
def test_no_small_window_touches_two_rows(arrangement: Arrangement, seed: int) -> None:
    centres = _centres(arrangement, seed)
    dx, dy = (np.abs(centres[:, None, k] - centres[None, :, k]) for k in (0, 1))
    reach = SMALL_WINDOW + 2 * (
        arrangement.radii[1] + HALO
    )  # two glands nearer than this on both axes can share a window
    share = (np.maximum(dx, dy) < reach) & (dx + dy > 0)
    # Glands that share a window are of one row: nearly on one line along the rows' direction.
    across = np.minimum(dx, dy)[share]
    assert across.max() < 40


@pytest.mark.parametrize("seed", range(3))
def test_small_windows_hold_as_many_glands_in_both_classes(seed: int) -> None:
    counts = []
    for arrangement in (EVEN, GROUPED):
        centres = _centres(arrangement, seed)
        bins = np.arange(0, SIDE + 1, SMALL_WINDOW)
        grid, _, _ = np.histogram2d(centres[:, 0], centres[:, 1], bins=(bins, bins))
        counts.append(np.bincount(grid.astype(int).ravel(), minlength=6)[:6] / grid.size)
    assert np.abs(counts[0] - counts[1]).max() < 0.03


def test_wide_windows_tell_the_classes_apart() -> None:
    """576 px: even rows leave no such window empty, grouped rows leave many."""
    places = np.random.default_rng(0).integers(0, SIDE - 576, (1000, 2))
    empty = []
    for arrangement in (EVEN, GROUPED):
        centres = _centres(arrangement, 0)
        inside = [((centres >= place) & (centres < place + 576)).all(1).any() for place in places]
        empty.append(1 - np.mean(inside))
    assert empty[0] == 0
    assert empty[1] > 0.08
