"""How far each backend's pixels are from OpenSlide's own, on every slide of a folder.

Takes a folder of slides; prints a row per slide and backend: the largest difference over random regions of level 0,
some of them over its border. Where OpenSlide cannot open a slide the row only says whether the backend reads it.

    python -m benchmarks.tile_reading.exactness DIR [--regions 200] [--largest 700]
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import openslide
from numpy.typing import NDArray

from benchmarks.results import parser_of
from pipelines.backends.registry import BACKENDS, open_slide
from pipelines.backends.tiff_tags import check_tiff
from pipelines.slides.geometry import Region
from pipelines.slides.slide import Slide, SlideError

SUFFIXES = {".svs", ".tif", ".tiff", ".ndpi", ".dcm", ".mrxs", ".scn", ".bif", ".vms", ".zarr", ".png", ".jpg"}
MPP_WHERE_MISSING = 0.5
"""Given to slides that do not record their um/px: it changes no pixel of level 0."""


def find(folder: Path) -> list[Path]:
    """Files and Zarr folders under ``folder`` that may be slides, sorted."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    return sorted(p for p in found if not any(parent.suffix == ".zarr" for parent in p.parents))


def reference(path: Path) -> openslide.OpenSlide | None:
    """OpenSlide's own handle; none for what it cannot open, or what would bring the process down."""
    if path.is_file() and check_tiff(path):
        return None
    try:
        return openslide.OpenSlide(path)
    except openslide.OpenSlideError:
        return None


def opened(path: Path, backend: str) -> Slide:
    try:
        return open_slide(path, backend=backend)
    except SlideError as error:
        if "--slide-mpp" not in str(error):
            raise
        return open_slide(path, mpp=MPP_WHERE_MISSING, backend=backend)


def theirs(slide: openslide.OpenSlide, l0_x: int, l0_y: int, width: int, height: int) -> NDArray[np.int16]:
    rgba = np.asarray(slide.read_region((l0_x, l0_y), 0, (width, height)))
    return np.where(rgba[..., 3:] == 0, 255, rgba[..., :3]).astype(np.int16)


def compare(slide: Slide, against: openslide.OpenSlide | None, regions: int, largest: int) -> str:
    """Largest difference over random regions, and how many regions could not be read, by whom."""
    places, level = random.Random(0), slide.levels[0]
    difference, failed_ours, failed_theirs, compared = 0, 0, 0, 0
    for _ in range(regions):
        width, height = places.randint(1, largest), places.randint(1, largest)
        l0_x, l0_y = (places.randint(-largest // 3, max(1, n - largest // 3)) for n in (level.width, level.height))
        try:
            ours = slide.read(Region(l0_x, l0_y, width, height, slide.mpp))
        except SlideError:
            failed_ours += 1
            continue
        if against is None:
            continue
        try:
            expected = theirs(against, l0_x, l0_y, width, height)
        except openslide.OpenSlideError:
            failed_theirs += 1
            continue
        compared += 1
        difference = max(difference, int(np.abs(ours - expected).max()))
    read = f"{regions - failed_ours} of {regions} regions read"
    if not compared:
        return f"{read}; nothing to compare with"
    return f"{read}; largest difference {difference} over {compared} regions" + (
        f"; OpenSlide failed on {failed_theirs}" if failed_theirs else ""
    )


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--regions", type=int, default=200, help="random regions per slide and backend")
    parser.add_argument("--largest", type=int, default=700, help="largest width and height of a region, px")
    given = parser.parse_args(argv)
    for path in find(given.folder):
        for backend in BACKENDS:
            try:
                slide = opened(path, backend)
            except SlideError as error:
                reason = str(error).splitlines()[-1].strip().replace(f"{path}: ", "")
                print(f"{path.name:44} {backend:10} - {reason[:150]}")
                continue
            with slide:
                print(f"{path.name:44} {backend:10} {compare(slide, reference(path), given.regions, given.largest)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
