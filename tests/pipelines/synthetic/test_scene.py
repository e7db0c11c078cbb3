"""Scenes: the mask is where glands are drawn, blocks do not depend on each other, colour does not tell the class."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.slides.geometry import Size
from pipelines.synthetic.arrangement import CROWDED, EVEN, GROUPED, Arrangement
from pipelines.synthetic.scene import BLOCK, DrawnSquare, Scene, SceneSpec

TILE = 256


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
    left, right = scene.draw(1, 1), scene.draw(2, 1)
    seam = np.abs(left.pixels[:, -1].astype(int) - right.pixels[:, 0]).mean()
    inside = np.abs(left.pixels[:, -2].astype(int) - left.pixels[:, -1]).mean()
    assert seam < 1.5 * inside
    assert (left.mask[:, -1] == right.mask[:, 0]).mean() > 0.97


def test_the_mask_agrees_with_the_glands_drawn() -> None:
    scene = _scene(CROWDED)
    block = scene.draw(1, 1)
    for gland in scene.glands(BLOCK, BLOCK, BLOCK):
        x, y = gland.l0_x - BLOCK, gland.l0_y - BLOCK
        if 0 <= x < BLOCK and 0 <= y < BLOCK:
            assert block.mask[y, x] == 1
    gland_px, other = block.pixels[block.mask == 1], block.pixels[block.mask == 0]
    assert gland_px.mean() < other.mean() - 10  # epithelium is darker than stroma
    centres = {(gland.l0_x, gland.l0_y) for gland in scene.glands(BLOCK, BLOCK, BLOCK)}
    far = [np.array(centre) - BLOCK for centre in centres]
    ys, xs = np.nonzero(block.mask)
    nearest = np.min([np.hypot(xs - x, ys - y) for x, y in far], axis=0)
    assert nearest.max() <= scene.spec.arrangement.radii[1] + 1


def test_glass_lies_around_the_tissue_and_is_even() -> None:
    scene = _scene(EVEN, side=8192)
    glass = [(x, y) for x in range(scene.columns) for y in range(scene.rows) if scene.is_glass(x, y)]
    assert all(0 in place or scene.columns - 1 in place for place in glass)
    corner = scene.draw(0, 0).pixels
    assert (corner[:8, :8] == scene.stain.glass).all()


def _blocks(arrangement: Arrangement, seeds: range) -> list[DrawnSquare]:
    scenes = [_scene(arrangement, seed) for seed in seeds]
    return [scene.draw(column, row) for scene in scenes for column in (1, 2) for row in (1, 2)]


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
