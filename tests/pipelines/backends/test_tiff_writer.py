"""The streaming TIFF writer: OpenSlide, tifffile and our reader find what it writes, and faults leave nothing."""

import numpy as np
import openslide
import pytest
import tifffile

from pipelines.backends.registry import open_slide
from pipelines.backends.tiff_writer import JPEG, TILE, PyramidWriter, halved
from pipelines.slides.geometry import Region, Size

SIZE = Size(700, 530)


def drawn(size):
    """Picture of ``size``, uint8 (height, width, 3), in squares of 32 px."""
    coarse = np.random.default_rng(0).integers(0, 256, (-(-size.height // 32), -(-size.width // 32), 3), np.uint8)
    return coarse.repeat(32, 0).repeat(32, 1)[: size.height, : size.width]


def test_three_readers_see_the_same_pyramid(tmp_path):
    path, picture = tmp_path / "s.tif", drawn(SIZE)
    with PyramidWriter(path, SIZE, 0.25, "Tumör, a test", JPEG, longest=350) as writer:
        for top in range(0, SIZE.height, 97):
            writer.add(picture[top : top + 97])
    with tifffile.TiffFile(path) as pages:
        arrays = [page.asarray() for page in pages.pages]
        assert pages.pages[0].description == "Tumör, a test"
    with openslide.OpenSlide(path) as slide:
        assert slide.level_dimensions == ((700, 530), (350, 265))
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.25)
        for level, array in enumerate(arrays):
            seen = np.asarray(slide.read_region((0, 0), level, slide.level_dimensions[level]))[..., :3]
            np.testing.assert_array_equal(seen, array)
    with open_slide(path) as ours:
        assert ours.mpp == pytest.approx(0.25)
        np.testing.assert_array_equal(ours.read(Region(0, 0, 700, 530, 0.25)), arrays[0])
    assert np.abs(arrays[0].astype(int) - picture).mean() < 6


def test_a_mask_is_read_as_it_was_written(tmp_path):
    rows = np.zeros((TILE, 64 * TILE), np.uint8)
    rows[:, 7 * TILE : 8 * TILE] = 1
    with PyramidWriter(tmp_path / "m.tif", Size(64 * TILE, TILE), 1.0, "", longest=64 * TILE) as writer:
        writer.add(rows)
    mask = tifffile.imread(tmp_path / "m.tif")
    assert mask.sum() == TILE * TILE
    assert mask[:, 7 * TILE : 8 * TILE].all()


def test_nothing_is_left_of_a_file_that_fails(tmp_path):
    path = tmp_path / "s.tif"
    with pytest.raises(RuntimeError, match="drawing failed"), PyramidWriter(path, SIZE, 1.0, "", JPEG):
        raise RuntimeError("drawing failed")
    with pytest.raises(AssertionError, match="never written"), PyramidWriter(path, SIZE, 1.0, "", JPEG):
        pass
    with pytest.raises(ValueError, match="9 px wide; got 8"), PyramidWriter(path, Size(9, 9), 1.0, "") as writer:
        writer.add(np.zeros((9, 8), np.uint8))
    assert list(tmp_path.iterdir()) == []


def test_the_name_appears_only_when_the_file_is_whole(tmp_path):
    path = tmp_path / "s.tif"
    path.write_bytes(b"an older file")
    with PyramidWriter(path, Size(10, 10), 1.0, "", JPEG) as writer:
        writer.add(drawn(Size(10, 10)))
        assert path.read_bytes() == b"an older file"
    assert [entry.name for entry in tmp_path.iterdir()] == ["s.tif"]
    assert tifffile.imread(path).shape == (10, 10, 3)


def test_a_pyramid_of_bands_is_opened_by_both_libraries(tmp_path):
    path = tmp_path / "map.tif"
    values = np.random.default_rng(0).integers(0, 256, (601, 1030), np.uint8)
    with PyramidWriter(path, Size(1030, 601), 2.5, "probability of 'tumour'") as writer:
        for start in range(0, 601, 97):
            writer.add(values[start : start + 97])
    with openslide.OpenSlide(path) as slide:
        assert slide.level_dimensions == ((1030, 601), (515, 301), (258, 151), (129, 76))
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(2.5)
        region = np.asarray(slide.read_region((200, 300), 0, (50, 40)))[..., 0]
        np.testing.assert_array_equal(region, values[300:340, 200:250])
    with tifffile.TiffFile(path) as file:
        np.testing.assert_array_equal(file.pages[0].asarray(), values)
        np.testing.assert_array_equal(file.pages[1].asarray(), halved(values))
        assert file.pages.first.is_tiled
        assert file.pages.first.description == "probability of 'tumour'"
    np.testing.assert_array_equal(halved(np.array([[0, 1, 7], [1, 1, 8]], np.uint8)), [[1, 8]])
    np.testing.assert_array_equal(halved(np.array([[5]], np.uint8)), [[5]])
