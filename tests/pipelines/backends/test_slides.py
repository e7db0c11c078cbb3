"""Every backend against the slide contract, and hundreds of rounds of opening and reading in bounded memory."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import numpy as np
import pytest
import tifffile
from openslide import OpenSlide
from PIL import Image

from pipelines.backends.registry import open_slide
from tests.contracts.slide_contract import SlideContract
from tests.helpers.format_files import write_ome_zarr
from tests.helpers.memory_slide import memory_slide
from tests.helpers.real import DICOM, NDPI, OME_TIFF, PYRAMID_TIFF, SVS


@functools.cache
def openslide_pixels(path, level=0):
    """The whole level as OpenSlide's own Python reader gives it."""
    with OpenSlide(path) as slide:
        return np.asarray(slide.read_region((0, 0), level, slide.level_dimensions[level]))[..., :3].copy()


def openslide_levels(path, count):
    return {level: openslide_pixels(path, level) for level in range(count)}


@functools.cache
def pyramid():
    """Four levels with odd sizes, cut from the shipped slide."""
    level_0 = openslide_pixels(SVS)[500:1107, 300:1121]
    return tuple(np.ascontiguousarray(level_0[::step, ::step]) for step in (1, 2, 4, 8))


class TestTiledSvs(SlideContract):
    """A slide whose label, macro image and thumbnail are no levels."""

    backend, mpp = "tiled", 0.499
    open_it = staticmethod(lambda: open_slide(SVS))
    level_pixels = staticmethod(lambda: openslide_levels(SVS, 1))


class TestTiledPyramid(SlideContract):
    backend, mpp = "tiled", 0.499
    open_it = staticmethod(lambda: open_slide(PYRAMID_TIFF))

    @staticmethod
    def level_pixels():
        with OpenSlide(PYRAMID_TIFF) as slide:
            return openslide_levels(PYRAMID_TIFF, slide.level_count)


class TestTiledOmeTiff(SlideContract):
    """A slide whose levels lie in sub-IFDs, where OpenSlide sees one."""

    backend, mpp = "tiled", 0.499
    open_it = staticmethod(lambda: open_slide(OME_TIFF))

    @staticmethod
    def level_pixels():
        with tifffile.TiffFile(OME_TIFF) as tiff:
            return dict(enumerate(level.asarray() for level in tiff.series[0].levels)) | openslide_levels(OME_TIFF, 1)


class TestNdpi(SlideContract):
    """The four levels in the file; OpenSlide makes up three more by decoding the last one smaller."""

    backend, mpp = "ndpi", 0.228175
    open_it = staticmethod(lambda: open_slide(NDPI))
    level_pixels = staticmethod(lambda: openslide_levels(NDPI, 4))


class TestOpenSlideSvs(SlideContract):
    backend, mpp = "openslide", 0.499
    open_it = staticmethod(lambda: open_slide(SVS, backend="openslide"))
    level_pixels = staticmethod(lambda: openslide_levels(SVS, 1))


class TestOpenSlideNdpi(SlideContract):
    """A slide whose levels divide evenly, so that all of them are exact."""

    backend, mpp = "openslide", 0.228175
    open_it = staticmethod(lambda: open_slide(NDPI, backend="openslide"))
    level_pixels = staticmethod(lambda: openslide_levels(NDPI, 7))


class TestOpenSlideDicom(SlideContract):
    backend, mpp = "openslide", 0.499
    open_it = staticmethod(lambda: open_slide(DICOM))
    level_pixels = staticmethod(lambda: openslide_levels(DICOM, 1))


class TestMemory(SlideContract):
    backend, mpp = "memory", 0.25
    open_it = staticmethod(lambda: memory_slide(pyramid(), 0.25))
    level_pixels = staticmethod(lambda: dict(enumerate(pyramid())))


class TestImage(SlideContract):
    backend, mpp = "image", 0.5
    level_pixels = staticmethod(lambda: {0: pyramid()[0]})

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _folder(cls, tmp_path_factory):
        path = tmp_path_factory.mktemp("image") / "picture.png"
        Image.fromarray(pyramid()[0]).save(path)
        cls.open_it = staticmethod(lambda: open_slide(path, mpp=0.5))


def write_pyramid_zarr(path, **options):
    return write_ome_zarr(path, pyramid(), **options)


class ZarrContract(SlideContract):
    backend, mpp = "zarr", 0.25
    version, axes, unit = "0.4", "cyx", "micrometer"
    level_pixels = staticmethod(lambda: dict(enumerate(pyramid())))

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _folder(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("zarr") / "slide.ome.zarr"
        path = write_pyramid_zarr(folder, version=cls.version, axes=cls.axes, unit=cls.unit)
        cls.open_it = staticmethod(lambda: open_slide(path))


class TestOmeZarr04(ZarrContract):
    pass


class TestOmeZarr05(ZarrContract):
    version, axes = "0.5", "tczyx"


class TestOmeZarr05ChannelsLast(ZarrContract):
    version, axes, unit = "0.5", "yxc", "nanometer"


ROUNDS = """
import gc, json, sys
import psutil
from pathlib import Path
from pipelines.slides.geometry import Region
from pipelines.backends.registry import open_slide

process, found = psutil.Process(), {}
for name, path in json.loads(sys.argv[1]).items():
    for i in range(400):
        if i == 100:  # warm: libraries loaded, buffers and caches at their size
            gc.collect()
            before = process.memory_info().rss
        with open_slide(Path(path), mpp=0.5, backend=name.split()[0]) as slide:
            slide.read(Region(40 * (i % 10), 30 * (i % 7), 64, 64, 0.5 if i % 2 else 1.3))
    gc.collect()
    found[name] = process.memory_info().rss - before, process.num_fds()
print(json.dumps(found))
"""


@pytest.mark.process
@pytest.mark.timeout(1200)
def test_hundreds_of_rounds_leave_memory_and_open_files_where_they_were(tmp_path):
    """A process of its own reads it, where nothing else allocates."""
    Image.fromarray(np.full((300, 400, 3), 90, np.uint8)).save(tmp_path / "image.png")
    files = {"tiled": SVS, "tiled pyramid": PYRAMID_TIFF, "ndpi": NDPI, "openslide": SVS, "openslide dicom": DICOM}
    files |= {"zarr": write_pyramid_zarr(tmp_path / "slide.zarr"), "image": tmp_path / "image.png"}
    command = [sys.executable, "-c", ROUNDS, json.dumps({name: str(path) for name, path in files.items()})]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found.keys() == files.keys()
    assert all(growth_bytes < 3 << 20 and open_files < 40 for growth_bytes, open_files in found.values()), found
