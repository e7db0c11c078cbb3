"""MRXS through OpenSlide: a scan that begins away from the corner, its levels, and what is drawn on it in QuPath."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipelines.catalog.catalog import SlideSpec
from pipelines.labels.annotation_files import AnnotationFiles
from pipelines.labels.annotations import read_annotations
from pipelines.slides.geometry import Bounds, Region
from pipelines.slides.slide import Pixels, SlideError
from tests.helpers.mrxs_file import write_mrxs

BOUNDS = Bounds(256 + 20, 12, 256, 256)
BOX = (48, 64, 112, 96)
"""Left, top, width and height of a red box, from the corner of the scan; along the blocks of the JPEG tiles."""


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> tuple[SlideSpec, list[Pixels]]:
    pixels = np.full((512, 768, 3), 230, np.uint8)
    left, top = BOUNDS.l0_x + BOX[0], BOUNDS.l0_y + BOX[1]
    pixels[top : top + BOX[3], left : left + BOX[2]] = (200, 30, 30)
    path = tmp_path_factory.mktemp("mrxs") / "case.mrxs"
    return SlideSpec("case", path), write_mrxs(path, pixels, BOUNDS)


def test_levels_bounds_and_white_where_nothing_was_scanned(slide: tuple[SlideSpec, list[Pixels]]) -> None:
    spec, written = slide
    with spec.open() as opened:
        assert (opened.backend, opened.mpp, opened.bounds) == ("openslide", 0.25, BOUNDS)
        assert len(opened.levels) == len(written) == 3
        for level, pixels in zip(opened.levels, written, strict=True):
            got = opened.read(Region(-8, -4, level.width + 9, level.height + 6, level.mpp))
            l_x, l_y = (round(px / level.downsample) for px in (8, 4))
            np.testing.assert_array_equal(got[l_y : l_y + level.height, l_x : l_x + level.width], pixels)
            assert (got[:l_y] == 255).all()
            assert (got[:, :l_x] == 255).all()
        assert (written[0][: BOUNDS.l0_y] == 255).all()
        assert not (written[0][BOUNDS.l0_y] == 255).all()


def test_data_of_zeros_are_refused(tmp_path: Path) -> None:
    """OpenSlide finds no camera position in them, and draws an empty slide."""
    write_mrxs(tmp_path / "case.mrxs", np.full((512, 768, 3), 230, np.uint8), BOUNDS)
    data = tmp_path / "case" / "Data0000.dat"
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(SlideError, match="no scanned area"):
        SlideSpec("case", tmp_path / "case.mrxs").open()


def test_what_qupath_drew_lies_on_what_it_was_drawn_on(slide: tuple[SlideSpec, list[Pixels]], tmp_path: Path) -> None:
    """QuPath counts from the corner of the scan, not of level 0."""
    spec, _ = slide
    x, y, width, height = BOX
    ring = [[x, y], [x + width, y], [x + width, y + height], [x, y + height], [x, y]]
    feature = {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [ring]},
        "properties": {"objectType": "annotation", "classification": {"name": "red"}},
    }
    drawn = tmp_path / "case.geojson"
    drawn.write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))
    truth = read_annotations(AnnotationFiles({"case": drawn}, (), drawn.name), (spec,), {"case": "case"})
    with spec.open() as opened:
        for mpp, side in ((0.25, 300), (0.5, 150)):
            region = Region(BOUNDS.l0_x - 8, BOUNDS.l0_y + 4, side, side, mpp)
            mask = np.empty((side, side), np.uint8)
            truth.read_mask("case", opened, region, mask)
            pixels = opened.read(region).astype(np.int16)
            red = pixels[..., 0] - pixels[..., 1] > 85
            assert red.any()
            np.testing.assert_array_equal(mask > 0, red)
