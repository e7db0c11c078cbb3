"""Grids of tiles, their share of tissue, boxes of whole slides, and overlays that show them."""

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.table import FailedSlides
from pipelines.slides.geometry import Bounds, l0_step, levels_from_sizes
from pipelines.tiles import tiling as module
from pipelines.tiles.index import build_index
from pipelines.tiles.overlay import CAPTION_PX, LONGER_SIDE_PX, draw_overlay, read_thumbnail
from pipelines.tiles.tile_table import TileTable, three_sizes
from pipelines.tiles.tiling import IndexSettings, tile_grid, tissue_box, tissue_fractions
from pipelines.tiles.tissue import Overview, TissueMask


@st.composite
def grids(draw):
    """A slide, and tiles that fit it."""
    l0_mpp = draw(st.floats(0.1, 2.0))
    ratio = draw(st.one_of(st.just(1.0), st.just(1.005), st.floats(1.0, 9.0)))
    bounds = Bounds(
        draw(st.integers(0, 5000)),
        draw(st.integers(0, 5000)),
        draw(st.integers(300, 6000)),
        draw(st.integers(300, 6000)),
    )
    largest = int(min(bounds.width, bounds.height) / ratio) - 1
    tile = draw(st.integers(8, largest))
    stride = draw(st.integers(max(2, tile // 7), tile))
    size = (bounds.l0_x + bounds.width, bounds.l0_y + bounds.height)
    return levels_from_sizes([size], l0_mpp), bounds, tile, l0_mpp * ratio, stride


@settings(deadline=None)  # the machine may be busy
@given(grids())
def test_tiles_lie_within_the_bounds_at_whole_strides_and_cover_them(case):
    levels, bounds, tile, mpp, stride = case
    grid = tile_grid(levels, bounds, tile, mpp, stride)
    for origins, start, length in ((grid.l0_x, bounds.l0_x, bounds.width), (grid.l0_y, bounds.l0_y, bounds.height)):
        assert origins.dtype == np.int64
        assert origins[0] == start
        assert origins[-1] + grid.l0_size[0] == start + length
        assert (np.diff(origins) > 0).all()
        assert (np.diff(origins) <= grid.l0_size[0] + 1).all(), "a rounded stride leaves a gap of more than a px"
    expected = np.arange(len(grid.l0_x) - 1) * stride * l0_step(levels, tile, mpp) + bounds.l0_x
    np.testing.assert_allclose(grid.l0_x[:-1], expected, atol=0.5 + 1e-6)


@settings(deadline=None)  # the machine may be busy
@given(grids(), st.floats(2.0, 60.0), st.integers(0, 2**32 - 1))
def test_fraction_equals_brute_force(case, downsample, seed):
    levels, bounds, tile, mpp, stride = case
    grid = tile_grid(levels, bounds, tile, mpp, stride)
    shape = (max(1, round(bounds.height / downsample)), max(1, round(bounds.width / downsample)))
    mask = np.random.default_rng(seed).random(shape) < 0.4
    fractions = tissue_fractions(TissueMask(mask, bounds.l0_x, bounds.l0_y, downsample, 8.0), grid)
    assert fractions.shape == (len(grid.l0_y), len(grid.l0_x))
    rng = np.random.default_rng(seed)
    for _ in range(5):
        row, column = rng.integers(len(grid.l0_y)), rng.integers(len(grid.l0_x))
        edges = []
        for origin, px in ((grid.l0_y[row] - bounds.l0_y, shape[0]), (grid.l0_x[column] - bounds.l0_x, shape[1])):
            first = min(int(np.floor(origin / downsample + 0.5)), px - 1)
            edges += [first, max(first + 1, min(int(np.floor((origin + grid.l0_size[0]) / downsample + 0.5)), px))]
        assert fractions[row, column] == pytest.approx(mask[edges[0] : edges[1], edges[2] : edges[3]].mean(), abs=1e-6)


def grid_of(width, height, mpp, tile, at_mpp=0.5):
    return tile_grid(levels_from_sizes([(width, height)], mpp), Bounds(0, 0, width, height), tile, at_mpp, tile)


def test_one_tile_and_a_last_column_that_is_shifted_inwards():
    grid = grid_of(1024, 1024, 0.5, 1024)
    assert (grid.l0_x.tolist(), grid.l0_y.tolist(), grid.l0_size[0]) == ([0], [0], 1024)
    assert grid_of(2500, 1024, 0.5, 1024).l0_x.tolist() == [0, 1024, 2500 - 1024]
    assert grid_of(3000, 2001, 0.25, 1000).l0_size == (2000, 2000)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((536_870_962, 50, 0.5, 32), r"at most 10,000,000 tiles; every 32 px .* would be 33,554,436 on this one"),
        ((3000, 2001, 0.25, 2048), r"2048 px at 0.5 um/px .*\(3000 x 2001 px at 0.25 .* --tile 1000 at --mpp 0.5"),
        ((3000, 2000, 0.5, 512, 0.25), r"mpp 0.25 cannot be had: the finest level of this slide has 0.5 um/px"),
    ],
)
def test_grids_that_cannot_be_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        grid_of(*arguments)


@given(
    box=st.tuples(st.integers(0, 39), st.integers(0, 29), st.integers(1, 40), st.integers(1, 30)),
    mpp=st.sampled_from([0.5, 0.504, 1.0, 1.7, 8.0]),
    multiple=st.sampled_from([1, 14, 32]),
    downsample=st.sampled_from([16.0, 15.9]),
)
def test_it_is_the_smallest_that_covers_all_tissue(box, mpp, multiple, downsample):
    left, top, right, bottom = box[0], box[1], min(40, box[0] + box[2]), min(30, box[1] + box[3])
    mask = np.zeros((30, 40), np.bool_)
    mask[top, left] = mask[bottom - 1, right - 1] = True
    levels = levels_from_sizes([(640, 480)], 0.5)
    region = tissue_box(levels, TissueMask(mask, 100, 200, downsample, 8.0), mpp, multiple)
    assert (region.width % multiple, region.height % multiple) == (0, 0)
    for l0_start, side, first, last, l0_origin in (
        (region.l0_x, region.width, left, right, 100),
        (region.l0_y, region.height, top, bottom, 200),
    ):
        l0_first, l0_last = (l0_origin + int(px * downsample + 0.5) for px in (first, last))
        assert l0_start == l0_first
        assert l0_start + side * l0_step(levels, side, mpp) >= l0_last
        less = side - multiple
        assert not less or l0_start + less * l0_step(levels, less, mpp) < l0_last


@pytest.mark.parametrize("l0_mpp", [0.2487, 0.2513])
def test_tiles_leave_no_gap_and_end_at_the_border(l0_mpp):
    """They are read as if level 0 had half their um/px."""
    levels = levels_from_sizes([(20_000, 20_000)], l0_mpp)
    grid = tile_grid(levels, Bounds(0, 0, 20_000, 20_000), 1024, 0.5, 1024)
    assert grid.l0_size == (2048, 2048)
    assert (np.diff(grid.l0_x)[:-1] == 2048).all()
    assert grid.l0_x[-1] + 2048 == 20_000


def test_absurd_slides_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MOST_PIXELS", 1000)
    with pytest.raises(ValueError, match=r"at most 1,000 px; .* is 32 x 64 px at 0.5 um/px; .* coarser --mpp"):
        tissue_box(levels_from_sizes([(64, 64)], 0.5), TissueMask(np.ones((4, 2), bool), 0, 0, 16.0, 8.0), 0.5, 32)


def picture(path, width, height, tissue):
    """Glass with a rectangle (left, top, right, bottom) of stain on it."""
    pixels = np.full((height, width, 3), 240, np.uint8)
    if tissue:
        left, top, right, bottom = tissue
        pixels[top:bottom, left:right] = (200, 130, 220)
    cv2.imwrite(str(path), pixels)
    return SlideSpec(path.stem, path, mpp=0.5)


def test_whole_slides_are_indexed_with_their_own_sizes(tmp_path):
    specs = [
        picture(tmp_path / "small.png", 1400, 1000, (100, 100, 600, 600)),
        picture(tmp_path / "wide.png", 1600, 900, (200, 300, 1400, 700)),
        picture(tmp_path / "blank.png", 640, 640, None),
    ]
    settings, out = IndexSettings(tile="slide", mpp=1.0), tmp_path / "out"
    table = build_index(specs, settings, out, workers=1)
    assert table.slides == ("small", "wide")
    ((slide, step, error),) = FailedSlides(out / "failed_slides.csv").rows()
    assert (slide, step) == ("blank", "tiles")
    assert "no tissue" in error
    regions = [table.region(k) for k in range(2)]
    for region, (left, top, right, bottom) in zip(regions, [(100, 100, 600, 600), (200, 300, 1400, 700)], strict=True):
        assert (region.width % 32, region.height % 32, region.mpp) == (0, 0, 1.0)
        # The mask of tissue has px of 16, and smooth edges.
        assert max(abs(region.l0_x - left), abs(region.l0_y - top)) <= 20
        assert -20 <= region.l0_x + 2 * region.width - right < 100
        assert -20 <= region.l0_y + 2 * region.height - bottom < 100
    kept = TileTable.load(out / "tiles.parquet")
    assert [kept.region(k) for k in range(2)] == regions
    assert three_sizes(kept) == [kept.size(0), kept.size(1), kept.size(1)]
    assert kept.largest == kept.size(1)
    assert kept.pixels.tolist() == [region.width * region.height for region in regions]
    overlay = cv2.imread(str(out / "tissue" / "small.png"))
    assert np.abs(overlay[350, 350].astype(int) - overlay[20, 20]).max() > 30

    again = build_index(specs, IndexSettings(tile="slide", mpp=1.0, stride=14, min_tissue=0), tmp_path / "all")
    assert again.slides == ("small", "wide", "blank")
    assert again.size(2) == (322, 322)


def draw(width, height, tiles, fractions, l0_tile, background=255):
    pixels = np.full((height, width, 3), background, np.uint8)
    l0_x, l0_y = np.array(tiles, np.int64).reshape(-1, 2).T
    thumbnail = Overview(pixels, 100, 200, 10.0, 5.0, np.zeros(pixels.shape[:2], np.bool_))
    if width > LONGER_SIDE_PX:
        thumbnail = read_thumbnail(None, thumbnail, 1)  # large enough, so that the slide is not read
    mask = TissueMask(np.zeros((height // 4, width // 4), bool), 100, 200, 40.0, 20.0)
    shares = np.array(fractions, np.float32)
    png = draw_overlay(thumbnail, mask, l0_x, l0_y, shares, (l0_tile, l0_tile), "a caption")
    return cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]


def test_fuller_tiles_are_tinted_more_and_the_rest_not_at_all():
    picture = draw(400, 300, [(100, 200), (2100, 1200)], [1.0, 0.5], 1000)
    full, half, none = picture[50, 50], picture[150, 250], picture[250, 50]
    assert none.tolist() == [255, 255, 255]
    np.testing.assert_allclose(full, [178, 211, 255], atol=1)
    np.testing.assert_allclose(half, [217, 233, 255], atol=1)
    assert picture[100, 250].tolist() == picture[199, 250].tolist() == [0, 110, 255], "outlines lie on the border px"


def test_large_slides_are_drawn_small_and_small_ones_and_black_ones_too():
    assert draw(4000, 1000, [], [], 100).shape == (LONGER_SIDE_PX // 4 + CAPTION_PX, LONGER_SIDE_PX, 3)
    assert draw(8, 8, [(100, 200)], [0.5], 40).shape == (8 + CAPTION_PX, 8, 3)
    assert draw(400, 300, [(100, 200)], [1.0], 1000, background=0)[0, 50].tolist() == [255, 190, 0]


def test_tiles_smaller_than_an_outline_are_only_tinted():
    tiles = [(100 + 30 * x, 200 + 30 * y) for x in range(20) for y in range(20)]
    picture = draw(400, 300, tiles, [1.0] * 400, 30)
    assert (picture[:60, :60] == picture[0, 0]).all()
    np.testing.assert_allclose(picture[0, 0], [178, 211, 255], atol=1)


def test_caption_and_scale_bar_are_there():
    strip = draw(800, 300, [], [], 10)[-CAPTION_PX:]
    dark = strip.max(axis=2) < 80
    assert dark[27:30, 12:200].all(), "1 mm at 5 um/px are 200 px"
    assert not dark[27:30, 215:225].any()
    assert dark[:, 230:400].any()
