"""Compare what the project read of a damaged file with other readers: OpenSlide, tifffile, OpenCV, pydicom.

Takes the file and what was read; gives True when one of them agrees. A file that was changed into another whole file
is then no fault of its reader. Runs in a process of its own: these readers die of such files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import openslide
import simplejpeg
import tifffile
from numpy.typing import NDArray

from benchmarks.formats.references import dicom_level
from benchmarks.fuzz.subject import Report
from pipelines.slides.geometry import Level

ALIKE = 2.0
"""Mean difference in grey levels that two JPEG decoders may make."""
MPP_ALIKE = 1e-3


def others_agree(path: Path, report: Report, mpp_recorded: bool) -> bool:
    """True when another reader gives the same levels, um/px and pixels."""
    return any(
        _agrees(reader, path, report, mpp_recorded) for reader in (_by_openslide, _by_tifffile, _by_opencv, _by_pydicom)
    )


def strict_accepts(path: Path) -> bool:
    """True when libjpeg-turbo decodes a JPEG picture without an error or a warning."""
    try:
        simplejpeg.decode_jpeg(path.read_bytes(), "RGB", strict=True)
    except (OSError, ValueError):
        return False
    return True


def _agrees(reader: object, path: Path, report: Report, mpp_recorded: bool) -> bool:
    try:
        return bool(reader(path, report, mpp_recorded))  # type: ignore[operator]
    except Exception:  # it refuses the file
        return False


def _same(report: Report, box: object) -> bool:
    """``box(size, x, y, height, width)`` gives the pixels of every read, whose level has that size."""
    for name, pixels in report.reads.items():
        if pixels is None or ":" not in name:
            continue
        level, place = name.split(":")
        wide, high = map(int, level.split("x"))
        x, y = map(int, place.split(","))
        other: NDArray[np.uint8] = box((wide, high), x, y, *pixels.shape[:2])  # type: ignore[operator]
        if other.shape != pixels.shape or np.abs(other.astype(int) - pixels).mean() > ALIKE:
            return False
    return True


def _by_openslide(path: Path, report: Report, mpp_recorded: bool) -> bool:
    if report.backend == "openslide":
        return False  # itself
    with openslide.OpenSlide(path) as slide:
        if slide.dimensions != report.facts[3]:
            return False
        if mpp_recorded and abs(float(slide.properties["openslide.mpp-x"]) / report.facts[1] - 1) > MPP_ALIKE:  # type: ignore[operator]
            return False

        def box(size: tuple[int, int], x: int, y: int, height: int, width: int) -> NDArray[np.uint8]:
            level = slide.level_dimensions.index(size)
            scale = slide.level_downsamples[level]
            picture = slide.read_region((round(x * scale), round(y * scale)), level, (width, height))
            rgba = np.asarray(picture)
            return np.where(rgba[..., 3:] == 0, 255, rgba[..., :3]).astype(np.uint8)

        return _same(report, box)


def _by_tifffile(path: Path, report: Report, mpp_recorded: bool) -> bool:
    with tifffile.TiffFile(path) as file:
        pages = {page.shape[1::-1]: page for page in _readable_pages(file)}
        if mpp_recorded and report.backend == "openslide":
            return False
        if mpp_recorded:
            first = file.pages.first
            text = first.description
            tag = first.tags.get("XResolution")
            unit = {2: 25_400.0, 3: 10_000.0}[int(first.tags["ResolutionUnit"].value)] if tag else 0.0
            said = [float(text.split("MPP = ")[1].split("|")[0])] if "MPP = " in text else []
            said += [unit * tag.value[1] / tag.value[0]] if tag else []
            if "PhysicalSizeX=" in text:
                said = [float(text.split('PhysicalSizeX="')[1].split('"')[0])]
            if not any(abs(mpp / report.facts[1] - 1) <= MPP_ALIKE for mpp in said):  # type: ignore[operator]
                return False
        if max(pages) != report.facts[3]:
            return False
        decoded = {size: np.atleast_3d(page.asarray()) for size, page in pages.items()}

        def box(size: tuple[int, int], x: int, y: int, height: int, width: int) -> NDArray[np.uint8]:
            part = decoded[size][y : y + height, x : x + width]
            return np.repeat(part, 3, 2) if part.shape[2] == 1 else part[..., :3]

        return _same(report, box)


def _readable_pages(file: tifffile.TiffFile) -> Iterator[tifffile.TiffPage]:
    """The pages up to the first that tifffile refuses."""
    with contextlib.suppress(Exception):
        for page in file.pages:
            yield page
            yield from page.pages or ()


def _by_opencv(path: Path, report: Report, mpp_recorded: bool) -> bool:
    if mpp_recorded:
        return False
    picture = cv2.imread(str(path), cv2.IMREAD_COLOR)
    return picture is not None and _same(report, lambda size, x, y, h, w: picture[y : y + h, x : x + w, ::-1])


def _by_pydicom(path: Path, report: Report, mpp_recorded: bool) -> bool:
    def box(size: tuple[int, int], x: int, y: int, height: int, width: int) -> NDArray[np.uint8]:
        pixels = dicom_level(path, Level(0, *size, 1.0, 1.0))
        assert pixels is not None, "no level of this size"
        return pixels[y : y + height, x : x + width]

    return not mpp_recorded and _same(report, box)
