"""Every backend against the slide contract."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr
from openslide import OpenSlide
from PIL import Image

from pipelines.backends.level_reader import memory_slide
from pipelines.backends.registry import open_slide
from pipelines.slides.slide import Pixels
from tests.contracts.slide_contract import SlideContract
from tests.helpers.real import DICOM, NDPI, OME_TIFF, PYRAMID_TIFF, SVS


@functools.cache
def openslide_pixels(path: Path, level: int = 0) -> Pixels:
    """The whole level as OpenSlide's own Python reader gives it."""
    with OpenSlide(path) as slide:
        return np.asarray(slide.read_region((0, 0), level, slide.level_dimensions[level]))[..., :3].copy()


@functools.cache
def pyramid() -> tuple[Pixels, ...]:
    """Four levels with odd sizes, cut from the shipped slide."""
    level_0 = openslide_pixels(SVS)[500:1107, 300:1121]
    return tuple(np.ascontiguousarray(level_0[::step, ::step]) for step in (1, 2, 4, 8))


def made(pixels: tuple[Pixels, ...]) -> dict[int, Pixels]:
    return dict(enumerate(pixels))


class TestTiledSvs(SlideContract):
    backend, mpp = "tiled", 0.499
    open_it = staticmethod(lambda: open_slide(SVS))
    level_pixels = staticmethod(lambda: {0: openslide_pixels(SVS)})


class TestTiledPyramid(SlideContract):
    backend, mpp = "tiled", 0.499
    open_it = staticmethod(lambda: open_slide(PYRAMID_TIFF))

    @staticmethod
    def level_pixels() -> dict[int, Pixels]:
        with tifffile.TiffFile(PYRAMID_TIFF) as tiff:
            levels = tiff.series[0].levels
            return {0: openslide_pixels(PYRAMID_TIFF), len(levels) - 1: levels[-1].asarray()}


class TestTiledOmeTiff(SlideContract):
    backend, mpp = "tiled", 0.499
    open_it = staticmethod(lambda: open_slide(OME_TIFF))

    @staticmethod
    def level_pixels() -> dict[int, Pixels]:
        with tifffile.TiffFile(OME_TIFF) as tiff:
            levels = tiff.series[0].levels
            return {0: openslide_pixels(OME_TIFF), len(levels) - 1: levels[-1].asarray()}


class TestNdpi(SlideContract):
    """The four levels in the file; OpenSlide makes up three more by decoding the last one smaller."""

    backend, mpp = "ndpi", 0.228175
    open_it = staticmethod(lambda: open_slide(NDPI))
    level_pixels = staticmethod(lambda: {level: openslide_pixels(NDPI, level) for level in (0, 1, 3)})


class TestOpenSlideSvs(SlideContract):
    backend, mpp = "openslide", 0.499
    open_it = staticmethod(lambda: open_slide(SVS, backend="openslide"))
    level_pixels = staticmethod(lambda: {0: openslide_pixels(SVS)})


class TestOpenSlideNdpi(SlideContract):
    """Its levels divide evenly, so that all of them are exact."""

    backend, mpp = "openslide", 0.228175
    open_it = staticmethod(lambda: open_slide(NDPI, backend="openslide"))
    level_pixels = staticmethod(lambda: {level: openslide_pixels(NDPI, level) for level in range(7)})


class TestOpenSlideDicom(SlideContract):
    backend, mpp = "openslide", 0.499
    open_it = staticmethod(lambda: open_slide(DICOM))
    level_pixels = staticmethod(lambda: {0: openslide_pixels(DICOM)})


class TestMemory(SlideContract):
    backend, mpp = "memory", 0.25
    open_it = staticmethod(lambda: memory_slide(pyramid(), 0.25))
    level_pixels = staticmethod(lambda: made(pyramid()))


class TestImage(SlideContract):
    backend, mpp = "image", 0.5

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _folder(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        path = tmp_path_factory.mktemp("image") / "picture.png"
        Image.fromarray(pyramid()[0]).save(path)
        cls.open_it = staticmethod(lambda: open_slide(path, mpp=0.5))

    level_pixels = staticmethod(lambda: {0: pyramid()[0]})


def write_ome_zarr(path: Path, *, version: str, axes: str, unit: str | None = "micrometer", mpp: float = 0.25) -> Path:
    """An OME-Zarr image of ``pyramid()``; chunks smaller than the image and not dividing it."""
    zarr_format = 3 if version == "0.5" else 2
    group = zarr.create_group(path, zarr_format=zarr_format)
    datasets: list[dict[str, Any]] = []
    kept = [axis for axis in axes if axis in "yxc"]
    for i, pixels in enumerate(pyramid()):
        data = pixels.transpose(["yxc".index(axis) for axis in kept])
        data = data.reshape([data.shape[kept.index(axis)] if axis in kept else 1 for axis in axes])
        chunks = tuple({"y": 97, "x": 113}.get(axis, size) for axis, size in zip(axes, data.shape, strict=True))
        group.create_array(str(i), data=data, chunks=chunks)
        um = mpp * 2**i * (1000 if unit == "nanometer" else 1)
        scale = [um if axis in "yx" else 1.0 for axis in axes]
        datasets.append({"path": str(i), "coordinateTransformations": [{"type": "scale", "scale": scale}]})
    kinds = {"t": "time", "c": "channel"}
    described = [
        {"name": a, "type": kinds.get(a, "space")} | ({"unit": unit} if a in "yx" and unit else {}) for a in axes
    ]
    multiscales = [{"version": version, "axes": described, "datasets": datasets}]
    image = {"multiscales": multiscales}
    group.attrs.update({"ome": {"version": "0.5"} | image} if zarr_format == 3 else image)
    return path


class ZarrContract(SlideContract):
    backend, mpp = "zarr", 0.25
    version: str
    axes: str
    unit = "micrometer"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _folder(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = tmp_path_factory.mktemp("zarr") / "slide.ome.zarr"
        path = write_ome_zarr(folder, version=cls.version, axes=cls.axes, unit=cls.unit)
        cls.open_it = staticmethod(lambda: open_slide(path))

    level_pixels = staticmethod(lambda: made(pyramid()))


class TestOmeZarr04(ZarrContract):
    version, axes = "0.4", "cyx"


class TestOmeZarr05(ZarrContract):
    version, axes = "0.5", "tczyx"


class TestOmeZarr05ChannelsLast(ZarrContract):
    version, axes, unit = "0.5", "yxc", "nanometer"
