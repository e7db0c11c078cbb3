"""Zarr stores that are not textbook OME-Zarr, and damaged ones."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from pipelines.backends import zarr as zarr_backend
from pipelines.backends.registry import open_slide
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError, TileReadError
from tests.pipelines.backends.test_slides import pyramid, write_ome_zarr


def read_all(path: Path, mpp: float | None = None) -> np.ndarray:
    with open_slide(path, mpp=mpp) as slide:
        assert slide.backend == "zarr"
        return slide.read(Region(0, 0, slide.levels[0].width, slide.levels[0].height, slide.mpp))


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("channels_first", [False, True])
def test_a_bare_array(tmp_path: Path, zarr_format: Any, channels_first: bool) -> None:
    pixels = pyramid()[1]
    data = pixels.transpose(2, 0, 1) if channels_first else pixels
    zarr.create_array(tmp_path / "a.zarr", data=data, chunks=(64,) * 3, zarr_format=zarr_format)
    np.testing.assert_array_equal(read_all(tmp_path / "a.zarr", mpp=0.5), pixels)
    with pytest.raises(SlideError, match="does not record its um/px"):
        open_slide(tmp_path / "a.zarr")


def test_a_grey_array_with_dimension_names(tmp_path: Path) -> None:
    grey = pyramid()[1][..., 0]
    zarr.create_array(tmp_path / "a.zarr", data=grey.T, chunks=(50, 50), dimension_names=["x", "y"])
    np.testing.assert_array_equal(read_all(tmp_path / "a.zarr", mpp=0.5), np.stack([grey] * 3, axis=-1))


@pytest.mark.parametrize(("dtype", "channels"), [(np.uint16, 3), (np.uint8, 5)])
def test_pixels_that_are_no_8_bit_rgb(tmp_path: Path, dtype: Any, channels: int) -> None:
    path = tmp_path / "a.zarr"
    zarr.create_array(path, data=np.zeros((channels, 64, 64), dtype), chunks=(1, 64, 64), dimension_names=list("cyx"))
    with pytest.raises(
        SlideError, match=f"uint8 with 1 or 3 channels; .* is {np.dtype(dtype)} with {channels} channels"
    ):
        open_slide(path, mpp=0.5)


def test_an_array_of_unknown_axes(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", data=np.zeros((4, 64, 64), np.uint8), chunks=(1, 64, 64))
    with pytest.raises(SlideError, match=r"must be \(height, width, 3\)"):
        open_slide(tmp_path / "a.zarr", mpp=0.5)


def test_a_group_that_is_no_image_says_what_it_holds(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "a.zarr")
    group.create_array("lungs", data=np.zeros((4, 4), np.uint8))
    with pytest.raises(SlideError, match=r"no `multiscales`.* it holds lungs"):
        open_slide(tmp_path / "a.zarr")


def test_the_first_image_of_a_collection(tmp_path: Path) -> None:
    root = zarr.create_group(tmp_path / "a.zarr", zarr_format=2)
    root.attrs["bioformats2raw.layout"] = 3
    write_ome_zarr(tmp_path / "a.zarr" / "0", version="0.4", axes="cyx")
    np.testing.assert_array_equal(read_all(tmp_path / "a.zarr"), pyramid()[0])


def test_a_scale_without_a_unit_is_no_mpp(tmp_path: Path) -> None:
    path = write_ome_zarr(tmp_path / "a.zarr", version="0.4", axes="cyx", unit=None)
    with pytest.raises(SlideError, match=r"does not record its um/px.*--slide-mpp"):
        open_slide(path)
    np.testing.assert_array_equal(read_all(path, mpp=0.5), pyramid()[0])


def test_scales_of_the_dataset_and_of_the_image_multiply(tmp_path: Path) -> None:
    path = write_ome_zarr(tmp_path / "a.zarr", version="0.4", axes="cyx", mpp=0.5)
    attributes = json.loads((path / ".zattrs").read_text())
    attributes["multiscales"][0]["coordinateTransformations"] = [{"type": "scale", "scale": [1, 0.5, 0.5]}]
    (path / ".zattrs").write_text(json.dumps(attributes))
    with open_slide(path) as slide:
        assert slide.mpp == pytest.approx(0.25)


@pytest.mark.parametrize("zattrs", ["{", '{"multiscales": [{}]}', '{"multiscales": 5}', "[]"])
def test_broken_metadata(tmp_path: Path, zattrs: str) -> None:
    path = write_ome_zarr(tmp_path / "a.zarr", version="0.4", axes="cyx")
    (path / ".zattrs").write_text(zattrs)
    with pytest.raises(SlideError, match=r"a\.zarr: "):
        open_slide(path)


def test_a_missing_level(tmp_path: Path) -> None:
    path = write_ome_zarr(tmp_path / "a.zarr", version="0.4", axes="cyx")
    (path / "2" / ".zarray").unlink()
    with pytest.raises(SlideError, match="Zarr metadata cannot be used"):
        open_slide(path)


def test_a_damaged_chunk_fails_alone(tmp_path: Path) -> None:
    path = write_ome_zarr(tmp_path / "a.zarr", version="0.4", axes="cyx")
    chunks = sorted(p for p in (path / "0").rglob("*") if p.is_file() and p.name.startswith("0.1.1"))
    assert len(chunks) == 1
    chunks[0].write_bytes(b"\0" * 100)
    with open_slide(path) as slide:
        with pytest.raises(TileReadError, match=r"level 0, x 113, y 97, .*the chunk is damaged"):
            slide.read(Region(113, 97, 10, 10, slide.mpp))
        np.testing.assert_array_equal(slide.read(Region(0, 0, 110, 90, slide.mpp)), pyramid()[0][:90, :110])


def test_only_the_chunks_of_a_region_are_read(tmp_path: Path) -> None:
    path = write_ome_zarr(tmp_path / "a.zarr", version="0.4", axes="cyx")
    for chunk in (path / "0").glob("0.*"):
        if chunk.name not in ("0.1.1", "0.1.2"):
            chunk.write_bytes(b"damaged")
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.read(Region(200, 100, 100, 90, slide.mpp)), pyramid()[0][100:190, 200:300])


def test_bands_end_where_chunks_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_ome_zarr(tmp_path / "a.zarr", version="0.5", axes="yxc")
    monkeypatch.setattr(zarr_backend, "BAND_BYTES", 1)
    np.testing.assert_array_equal(read_all(path), pyramid()[0])
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.read(Region(5, 90, 50, 300, slide.mpp)), pyramid()[0][90:390, 5:55])


def test_a_folder_without_zarr_metadata(tmp_path: Path) -> None:
    for backend in ("auto", "zarr", "openslide"):
        with pytest.raises(SlideError, match="this folder is no Zarr slide"):
            open_slide(tmp_path, backend=backend)


def _sum_in_child(path: Path, results: multiprocessing.SimpleQueue[int]) -> None:
    results.put(int(read_all(path).sum()))


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_can_read_after_its_parent_has(tmp_path: Path) -> None:
    """Zarr runs an event loop in a thread, which a fork does not carry over."""
    path = write_ome_zarr(tmp_path / "a.zarr", version="0.4", axes="cyx")
    expected = int(read_all(path).sum())
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_sum_in_child, args=(path, results))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert results.get() == expected
