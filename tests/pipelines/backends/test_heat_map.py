"""A heat map is a TIFF that OpenSlide and tifffile open, with its size, resolution and values."""

from __future__ import annotations

import numpy as np
import openslide
import pytest
import tifffile

from pipelines.backends.tiff_writer import PyramidWriter, halved
from pipelines.slides.geometry import Size


def test_both_libraries_open_it(tmp_path):
    path = tmp_path / "map.tif"
    values = np.random.default_rng(0).integers(0, 256, (601, 1030), np.uint8)
    with PyramidWriter(path, Size(1030, 601), 2.5, "probability of 'tumour'") as writer:
        for start in range(0, 601, 97):
            writer.add(values[start : start + 97])
    with openslide.OpenSlide(path) as slide:
        assert slide.dimensions == (1030, 601)
        assert slide.level_dimensions == ((1030, 601), (515, 301), (258, 151), (129, 76))
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(2.5)
        region = np.asarray(slide.read_region((200, 300), 0, (50, 40)))[..., 0]
        np.testing.assert_array_equal(region, values[300:340, 200:250])
    with tifffile.TiffFile(path) as file:
        pages = [page.asarray() for page in file.pages]
        np.testing.assert_array_equal(pages[0], values)
        np.testing.assert_array_equal(pages[1], halved(values))
        assert file.pages.first.is_tiled
        assert file.pages.first.description == "probability of 'tumour'"


def test_what_fails_leaves_nothing(tmp_path):
    with (
        pytest.raises(ValueError, match="9 px wide; got 8"),
        PyramidWriter(tmp_path / "a.tif", Size(9, 9), 1.0, "") as writer,
    ):
        writer.add(np.zeros((9, 8), np.uint8))
    assert not list(tmp_path.iterdir())


def test_halves_are_rounded_means():
    np.testing.assert_array_equal(halved(np.array([[0, 1, 7], [1, 1, 8]], np.uint8)), [[1, 8]])
    np.testing.assert_array_equal(halved(np.array([[5]], np.uint8)), [[5]])
