"""Whole levels of a slide as others decode them: OpenSlide, and the format's own library.

Takes a slide's path; gives uint8 (height, width, 3) of a level, or None where that reader does not read the file.
Levels are decoded whole, from the corner: OpenSlide takes places in level-0 px, and elsewhere it would draw levels that
do not divide evenly between their pixels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openslide
import pydicom
import pydicom.pixels
import tifffile
import zarr
from numpy.typing import NDArray
from PIL import Image

from pipelines.backends.tiff_tags import check_tiff
from pipelines.slides.geometry import Level
from pipelines.slides.slide import Pixels

MAX_PX = 200_000_000
"""Of a level: held whole, three times."""


def openslide_level(path: Path, level: Level) -> Pixels | None:
    """The level as OpenSlide draws it onto white; None where it has none of that size."""
    if path.is_dir() or check_tiff(path):  # damaged tables would bring the process down
        return None
    try:
        with openslide.OpenSlide(path) as slide:
            sizes = list(slide.level_dimensions)
            if (level.width, level.height) not in sizes:
                return None
            i = sizes.index((level.width, level.height))
            rgba = np.asarray(slide.read_region((0, 0), i, sizes[i]))
    except openslide.OpenSlideError:
        return None
    return np.where(rgba[..., 3:] == 0, np.uint8(255), rgba[..., :3])


def own_library(path: Path, level: Level) -> tuple[str, Pixels] | None:
    """Name of the format's own library and the level as it decodes it; None where there is none, or it cannot."""
    if path.suffix == ".zarr":
        return "zarr", _zarr_level(path, level)
    if path.suffix == ".dcm":
        pixels = dicom_level(path, level)
        return None if pixels is None else ("pydicom", pixels)
    if path.suffix.lower() in (".png", ".jpg", ".jpeg"):
        return "Pillow", np.asarray(Image.open(path, formats=("PNG", "JPEG")).convert("RGB"))
    try:
        pixels = _tiff_level(path, level)
    except tifffile.TiffFileError:
        return None
    return None if pixels is None else ("tifffile", pixels)


def _tiff_level(path: Path, level: Level) -> Pixels | None:
    with tifffile.TiffFile(path) as file:
        pages = [page for page in file.pages if isinstance(page, tifffile.TiffPage)]
        pages += [sub for page in pages for sub in page.pages or () if isinstance(sub, tifffile.TiffPage)]
        for page in pages:
            if page.shape[:2] == (level.height, level.width):
                pixels: NDArray[np.uint8] = page.asarray()
                # tifffile leaves YCbCr of Aperio's JPEG 2000 as it is
                return None if int(page.compression) == 33003 else _rgb(pixels)
    return None


def _zarr_level(path: Path, level: Level) -> Pixels:
    group = zarr.open_group(path, mode="r")
    about = dict(group.attrs)
    multiscale = dict(about.get("ome", about))["multiscales"][0]
    axes = [axis["name"] for axis in multiscale["axes"]]
    pixels = np.asarray(group[multiscale["datasets"][level.index]["path"]][...])
    kept = [i for i, axis in enumerate(axes) if axis in "yxc"]
    pixels = pixels[tuple(slice(None) if i in kept else 0 for i in range(len(axes)))]
    return _rgb(pixels.transpose([[axes[i] for i in kept].index(axis) for axis in "yxc" if axis in axes]))


def dicom_level(path: Path, level: Level) -> Pixels | None:
    """The file of the series that has the level's size, its frames laid side by side (TILED_FULL)."""
    series = pydicom.dcmread(path, stop_before_pixels=True).SeriesInstanceUID
    for file in sorted(path.parent.glob("*.dcm")):
        about = pydicom.dcmread(file)
        size = (about.TotalPixelMatrixColumns, about.TotalPixelMatrixRows)
        if about.SeriesInstanceUID != series or size != (level.width, level.height) or "VOLUME" not in about.ImageType:
            continue
        frames = pydicom.pixels.pixel_array(about)  # type: ignore[attr-defined]
        frames = frames if frames.ndim == 4 else frames[None]
        columns, rows = -(-level.width // about.Columns), -(-level.height // about.Rows)
        grid = frames.reshape(rows, columns, about.Rows, about.Columns, 3).transpose(0, 2, 1, 3, 4)
        return np.ascontiguousarray(grid.reshape(rows * about.Rows, -1, 3)[: level.height, : level.width])
    return None


def _rgb(pixels: NDArray[np.uint8]) -> Pixels:
    grey = pixels.ndim == 2 or pixels.shape[-1] == 1
    return np.repeat(pixels.reshape(*pixels.shape[:2], 1), 3, axis=2) if grey else pixels
