"""The rectangle around a slide's tissue, and the index of whole slides."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.failures import FailedSlides
from pipelines.slides.geometry import l0_from_t, levels_from_sizes
from pipelines.tiles import tiling as module
from pipelines.tiles.index import TileTable, build_index
from pipelines.tiles.index_settings import IndexSettings
from pipelines.tiles.tile_table import three_sizes
from pipelines.tiles.tiling import tissue_box
from pipelines.tiles.tissue import TissueMask


@given(
    box=st.tuples(st.integers(0, 39), st.integers(0, 29), st.integers(1, 40), st.integers(1, 30)),
    mpp=st.sampled_from([0.5, 0.504, 1.0, 1.7, 8.0]),
    multiple=st.sampled_from([1, 14, 32]),
    downsample=st.sampled_from([16.0, 15.9]),
)
def test_it_is_the_smallest_that_covers_all_tissue(
    box: tuple[int, int, int, int], mpp: float, multiple: int, downsample: float
) -> None:
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
        assert l0_start + l0_from_t(side, mpp, 0.5) >= l0_last
        assert side == multiple or l0_start + l0_from_t(side - multiple, mpp, 0.5) < l0_last


def test_absurd_slides_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PIXELS", 1000)
    with pytest.raises(ValueError, match=r"at most 1,000 px; .* is 32 x 64 px at 0.5 um/px; .* coarser --mpp"):
        tissue_box(levels_from_sizes([(64, 64)], 0.5), TissueMask(np.ones((4, 2), bool), 0, 0, 16.0, 8.0), 0.5, 32)


def picture(path: Path, width: int, height: int, tissue: tuple[int, int, int, int] | None) -> SlideSpec:
    """Glass with a rectangle (left, top, right, bottom) of stain on it."""
    pixels = np.full((height, width, 3), 240, np.uint8)
    if tissue:
        left, top, right, bottom = tissue
        pixels[top:bottom, left:right] = (200, 130, 220)
    cv2.imwrite(str(path), pixels)
    return SlideSpec(path.stem, path, mpp=0.5)


def test_whole_slides_are_indexed_with_their_own_sizes(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (IndexSettings(tile="slide", stride=0), "--stride is at least 1 px with --tile slide; got 0"),
        (IndexSettings(tile=0), "--tile is at least 1 px, or slide; got 0"),
    ],
)
def test_faults_of_settings(settings: IndexSettings, fault: str) -> None:
    assert settings.validate() == [fault]
