"""Tissue: the mask is where glands are drawn, blocks do not depend on each other; rows of the benchmark."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.tile_size.row_slides import EVEN, GROUPED, SMALL_WINDOW
from pipelines.slides.geometry import Size
from pipelines.synthetic.tissue import BLOCK, HALO, Arrangement, DrawnBlock, Scene, SceneSpec

CROWDED = Arrangement(0.9)
TILE = 256
SIDE = 12_288


def _scene(arrangement: Arrangement, seed: int = 1, side: int = 4096) -> Scene:
    return Scene(SceneSpec(0, seed, Size(side, side), arrangement))


def test_a_block_is_the_same_whenever_it_is_drawn() -> None:
    first, second = _scene(CROWDED), _scene(CROWDED)
    alone = first.draw(2, 1)
    for column, row in ((0, 0), (3, 3), (1, 1)):
        second.draw(column, row)
    later = second.draw(2, 1)
    assert np.array_equal(alone.pixels, later.pixels)
    assert np.array_equal(alone.mask, later.mask)


def test_glands_go_on_across_the_border_of_blocks() -> None:
    scene = _scene(CROWDED)
    left, right = scene.draw(3, 3), scene.draw(4, 3)
    seam = np.abs(left.pixels[:, -1].astype(int) - right.pixels[:, 0]).mean()
    inside = np.abs(left.pixels[:, -2].astype(int) - left.pixels[:, -1]).mean()
    assert seam < 1.5 * inside
    assert (left.mask[:, -1] == right.mask[:, 0]).mean() > 0.97


def test_the_mask_agrees_with_the_glands_drawn() -> None:
    scene = _scene(CROWDED)
    block = scene.draw(3, 3)
    for gland in scene.glands(3 * BLOCK, 3 * BLOCK, BLOCK):
        x, y = gland.l0_x - 3 * BLOCK, gland.l0_y - 3 * BLOCK
        if 0 <= x < BLOCK and 0 <= y < BLOCK:
            assert block.mask[y, x] == 1
    gland_px, other = block.pixels[block.mask == 1], block.pixels[block.mask == 0]
    assert gland_px.mean() < other.mean() - 10  # epithelium is darker than stroma
    centres = {(gland.l0_x, gland.l0_y) for gland in scene.glands(3 * BLOCK, 3 * BLOCK, BLOCK)}
    far = [np.array(centre) - 3 * BLOCK for centre in centres]
    ys, xs = np.nonzero(block.mask)
    nearest = np.min([np.hypot(xs - x, ys - y) for x, y in far], axis=0)
    assert nearest.max() <= scene.spec.arrangement.radii[1] + 1


def test_glass_lies_around_the_tissue_and_is_even() -> None:
    scene = _scene(EVEN, side=8192)
    glass = [
        (x, y)
        for x in range(scene.columns)
        for y in range(0, scene.rows, 3)
        if (scene.draw(x, y).pixels == scene.glass).all()
    ]
    assert all(x in (0, scene.columns - 1) or y in (0, scene.rows - 1) for x, y in glass)
    assert (scene.draw(0, 0).pixels[:8, :8] == scene.glass).all()


def _blocks(arrangement: Arrangement, seeds: range) -> list[DrawnBlock]:
    scenes = [_scene(arrangement, seed) for seed in seeds]
    return [scene.draw(column, row) for scene in scenes for column in (3, 4) for row in (3, 4)]


@pytest.mark.long
def test_tiles_of_256_px_have_the_same_colours_in_both_classes() -> None:
    """Window statistics by class differ by no more than two halves of one class do."""
    statistics = []
    for arrangement, seeds in ((EVEN, range(8)), (GROUPED, range(8)), (EVEN, range(8, 16))):
        tiles = [
            block.pixels[y : y + TILE, x : x + TILE]
            for block in _blocks(arrangement, seeds)
            for x in range(0, BLOCK, TILE)
            for y in range(0, BLOCK, TILE)
        ]
        histogram = np.mean([np.bincount(tile[..., 1].ravel() // 16, minlength=16) / TILE**2 for tile in tiles], axis=0)
        darkness = np.percentile([(tile[..., 0] < 140).mean() for tile in tiles], (10, 25, 50, 75, 90))
        statistics.append((histogram, darkness))
    (even, even_dark), (grouped, grouped_dark), (others, others_dark) = statistics
    noise, dark_noise = np.abs(even - others).max(), np.abs(even_dark - others_dark).max()
    assert np.abs(even - grouped).max() < 2 * noise + 0.005
    assert np.abs(even_dark - grouped_dark).max() < 2 * dark_noise + 0.01


@pytest.mark.parametrize("arrangement", [EVEN, GROUPED])
def test_patterns_fill_the_slide(arrangement: Arrangement) -> None:
    assert len(_scene(arrangement).glands(0, 0, 4096)) > 100


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
