"""Which pages of a TIFF file are the levels of a slide, and how many um its pixels measure.

Takes the pages of ``tiff_tags``; gives the levels, finest first, and um/px per axis. Knows generic pyramids (reduced
pages), Aperio SVS (tiled pages; label, macro and thumbnail are in strips) and OME-TIFF (SubIFDs). Formats whose tiles
lie elsewhere than in a plain grid (Leica, Ventana, Philips, Trestle) are refused, for OpenSlide to read.
"""

from __future__ import annotations

import re
from typing import Final

from pipelines.backends.tiff_page import Page, Tag
from pipelines.backends.tiff_tags import Tiff
from pipelines.slide import NotThisFormat

_REDUCED, _MASK = 1, 4
"""Bits of the SubfileType tag."""
_UM_PER_UNIT: Final = {2: 25_400.0, 3: 10_000.0}
"""um per ResolutionUnit: inch, centimetre. Without a unit, resolutions are only an aspect ratio."""
_UM_PER_OME_UNIT: Final = {"µm": 1.0, "μm": 1.0, "um": 1.0, "nm": 1e-3, "mm": 1e3, "cm": 1e4}
_PRINT_UM: Final = 20.0
"""Coarser than this, the tag is a writer's default (72, 96, 300 or 1200 dots per inch), not a scanner's resolution."""


def level_pages(tiff: Tiff) -> list[Page]:
    """The pages that are levels, finest first.

    Raises:
        NotThisFormat: not tiled, or a format whose tiles are not one plain grid per level.
    """
    first = tiff.pages[0]
    _refuse_other_vendors(tiff)
    if first.text(Tag.DESCRIPTION).startswith("Aperio"):
        candidates = [page for page in tiff.pages if page.is_tiled]
    elif _is_ome(first):
        first = next((page for page in tiff.pages if page.is_tiled), first)
        candidates = [first, *first.sub_pages] if first.sub_pages else [first, *_reduced(tiff)]
    else:
        candidates = [first, *_reduced(tiff)]
    if not first.is_tiled:
        raise NotThisFormat(f"{tiff.path}: not a tiled TIFF: its first image lies in strips")
    levels = sorted((p for p in candidates if p.is_tiled), key=lambda p: (p.width, p.height), reverse=True)
    return [levels[0], *(level for level in levels[1:] if _is_reduction(levels[0], level))]


def recorded_mpp(page: Page) -> tuple[float | None, float | None]:
    """um/px in x and y that the file records for ``page``, level 0; None where it is silent."""
    description = page.text(Tag.DESCRIPTION)
    if description.startswith("Aperio"):
        found = re.search(r"\|\s*MPP\s*=\s*([^\s|]+)", description)
        mpp = _number(found[1]) if found else None
        return mpp, mpp
    if _is_ome(page):
        pixels = re.search(r"<(?:\w+:)?Pixels\b[^>]*>", description)
        if pixels:
            return _ome_mpp(pixels[0], "X"), _ome_mpp(pixels[0], "Y")
    return resolution_mpp(page)


def resolution_mpp(page: Page) -> tuple[float | None, float | None]:
    """um/px by the resolution tags; None without a unit, or when it is a screen's or printer's resolution."""
    um = _UM_PER_UNIT.get(page.number(Tag.RESOLUTION_UNIT, 2))
    mpps: list[float | None] = []
    for tag in (Tag.X_RESOLUTION, Tag.Y_RESOLUTION):
        fraction = page.array(tag)
        per_unit = fraction[0] / fraction[1] if len(fraction) == 2 and fraction.min() > 0 else 0.0
        mpps.append(um / per_unit if um and per_unit and um / per_unit < _PRINT_UM else None)
    return mpps[0], mpps[1]


def _ome_mpp(pixels: str, axis: str) -> float | None:
    size = re.search(rf'\bPhysicalSize{axis}="([^"]*)"', pixels)
    unit = re.search(rf'\bPhysicalSize{axis}Unit="([^"]*)"', pixels)
    number, um = _number(size[1]) if size else None, _UM_PER_OME_UNIT.get(unit[1] if unit else "µm")
    return None if number is None or um is None else number * um


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_ome(page: Page) -> bool:
    return bool(re.search(r"<(?:\w+:)?OME\b", page.text(Tag.DESCRIPTION)[:4096]))


def _reduced(tiff: Tiff) -> list[Page]:
    def is_level(page: Page) -> bool:
        return page.is_tiled and page.number(Tag.SUBFILE, 0) & (_REDUCED | _MASK) == _REDUCED

    return [page for page in tiff.pages[1:] if is_level(page)]


def _is_reduction(base: Page, page: Page) -> bool:
    """True when ``page`` has the shape of ``base`` made smaller, rounding of both sides allowed."""
    if not (0 < page.width < base.width and page.height > 0):
        return False
    return abs(page.height - page.width * base.height / base.width) <= 2 + 0.01 * page.height


def _refuse_other_vendors(tiff: Tiff) -> None:
    first = tiff.pages[0]
    description, software = first.text(Tag.DESCRIPTION), first.text(Tag.SOFTWARE)
    vendors = {
        "Hamamatsu NDPI": tiff.is_ndpi,
        "Leica SCN": "leica-microsystems.com/scn" in description[:4096],
        "Ventana": any(b"<iScan" in (page.blob(Tag.XMP) or b"") for page in tiff.pages),
        "Philips": software.startswith("Philips") or "PIM_DP_" in description[:65536],
        "Trestle": software.startswith("MedScan"),
    }
    for vendor, is_it in vendors.items():
        if is_it:
            raise NotThisFormat(f"{tiff.path}: not a plain tiled TIFF but {vendor}")
