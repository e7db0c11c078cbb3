"""Which pages of a TIFF file are the levels of a slide, and how many um its pixels measure.

Takes the pages of ``tiff_tags``; gives the levels, finest first, and um/px per axis. Knows generic pyramids (reduced
pages), Aperio SVS (tiled pages; label, macro and thumbnail are in strips) and OME-TIFF (SubIFDs). Formats whose tiles
lie elsewhere than in a plain grid (Leica, Ventana, Philips, Trestle) are refused, for OpenSlide to read.
"""

from __future__ import annotations

import re
from typing import Final

from pipelines.backends.resolution import Recorded
from pipelines.backends.tiff_page import UNREADABLE, Page, Tag
from pipelines.backends.tiff_tags import Tiff
from pipelines.slides.slide import NotThisFormat, SlideError

_REDUCED, _MASK = 1, 4
"""Bits of the SubfileType tag."""
_UM_PER_UNIT: Final = {2: 25_400.0, 3: 10_000.0}
"""um per ResolutionUnit: inch, centimetre. Without a unit, resolutions are only an aspect ratio."""
_UM_PER_OME_UNIT: Final = {"µm": 1.0, "μm": 1.0, "um": 1.0, "nm": 1e-3, "mm": 1e3, "cm": 1e4}
YCBCR: Final = 6
_JPEG: Final = (6, 7)
_COLOURS: Final = {1: (0, 1, 3), 3: (2, YCBCR)}
"""PhotometricInterpretation by samples per px: grey either way round and palette; RGB and YCbCr."""
_PRINT_UM: Final = 20.0
"""Coarser than this, the tag is a writer's default (72, 96, 300 or 1200 dots per inch), not a scanner's resolution."""


def level_pages(tiff: Tiff) -> list[Page]:
    """Return the pages that are levels, finest first.

    Raises:
        NotThisFormat: not tiled, or a format whose tiles are not one plain grid per level.
        SlideError: samples that are not 8-bit whole numbers, channels in pages of their own, or sizes that contradict
            each other.
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
    refuse_planes(tiff, first)
    finest, *coarser = sorted((p for p in candidates if p.is_tiled), key=lambda p: (p.width, p.height), reverse=True)
    levels = [finest, *(level for level in coarser if _is_reduction(finest, level))]
    if finest is not candidates[0] or (coarser and len(levels) == 1):
        sizes = ", ".join(f"{p.width} x {p.height}" for p in candidates)
        raise SlideError(f"{tiff.path}: damaged TIFF: the pages ({sizes} px) are not one image made smaller")
    for level in levels:
        refuse_samples(tiff, level)
    return levels


def refuse_samples(tiff: Tiff, page: Page) -> None:
    """Refuse samples that libraries read as something else without a word.

    Raises:
        SlideError: they are not unsigned numbers of 8 bits, or the tags about their colours contradict each other.
    """
    bits, kinds = set(page.array(Tag.BITS).tolist()) or {1}, set(page.array(Tag.SAMPLE_FORMAT).tolist()) or {1}
    if max(bits) > 8 or min(bits) < 1 or kinds != {1}:
        kind = {2: "signed", 3: "floating-point"}.get(max(kinds), "")
        raise SlideError(
            f"{tiff.path}: a slide has unsigned samples of 8 bits; page {page.index} has {kind} samples "
            f"of {sorted(bits)} bits (SampleFormat {sorted(kinds)}); convert it to 8-bit RGB"
        )
    samples, colours = page.number(Tag.SAMPLES, 1), page.number(Tag.PHOTOMETRIC, UNREADABLE)
    compression = page.number(Tag.COMPRESSION, 1)
    if (samples in (1, 3) and colours not in _COLOURS[samples]) or (colours == YCBCR and compression not in _JPEG):
        raise SlideError(
            f"{tiff.path}: damaged TIFF: page {page.index} has {samples} samples per px, compression {compression} and "
            f"colours of kind {colours} (PhotometricInterpretation), which do not go together"
        )


def refuse_planes(tiff: Tiff, page: Page) -> None:
    """Refuse channels in pages of their own, of which a reader would show the first.

    Raises:
        SlideError: other pages hold a single channel of the size of ``page``.
    """
    planes = [
        other
        for other in tiff.pages
        if (other.width, other.height) == (page.width, page.height)
        and other.number(Tag.SAMPLES, 1) == page.number(Tag.SAMPLES, 1) == 1
        and not other.number(Tag.SUBFILE, 0) & (_REDUCED | _MASK)
    ]
    if len(planes) > 1:
        raise SlideError(
            f"{tiff.path}: {len(planes)} pages of {page.width} x {page.height} px hold one channel or plane each; "
            "a slide is one RGB or grey image; merge the channels to 8-bit RGB, or save one of them alone"
        )


def recorded_mpp(page: Page) -> tuple[Recorded, Recorded]:
    """um/px in x and y that the file records for ``page``, level 0; None where it is silent."""
    description = page.text(Tag.DESCRIPTION)
    if description.startswith("Aperio"):
        match = re.search(r"\|\s*MPP\s*=\s*([^\s|]+)", description)
        mpp = _number(match[1]) if match else None
        return mpp, mpp
    if _is_ome(page):
        pixels = re.search(r"<(?:\w+:)?Pixels\b[^<>]*>", description)
        if pixels:
            return _ome_mpp(pixels[0], "X"), _ome_mpp(pixels[0], "Y")
    return resolution_mpp(page)


def resolution_mpp(page: Page) -> tuple[Recorded, Recorded]:
    """um/px by the resolution tags; a text without a unit, or when it is a screen's or printer's resolution."""
    unit = page.number(Tag.RESOLUTION_UNIT, UNREADABLE)
    um = _UM_PER_UNIT.get(unit)  # the inch of the standard is a guess
    mpps: list[Recorded] = []
    for tag in (Tag.X_RESOLUTION, Tag.Y_RESOLUTION):
        fraction = page.array(tag)
        per_unit = fraction[0] / fraction[1] if len(fraction) == 2 and fraction.min() > 0 else 0.0
        if not per_unit or (um is None and per_unit == 1):  # 1 without a unit is what writers fill in
            mpps.append(None)
        elif um is None:
            mpps.append(
                f"records {per_unit:g} px in a unit that is not read (ResolutionUnit {max(unit, 0) or 'missing'})"
            )
        elif um / per_unit < _PRINT_UM:
            mpps.append(float(um / per_unit))
        else:
            mpps.append(f"records {um / per_unit:.2f} um/px, the resolution of a screen or a printer")
    return mpps[0], mpps[1]


def _ome_mpp(pixels: str, axis: str) -> Recorded:
    size = re.search(rf'\bPhysicalSize{axis}="([^"]*)"', pixels)
    unit = re.search(rf'\bPhysicalSize{axis}Unit="([^"]*)"', pixels)
    number, um = _number(size[1]) if size else None, _UM_PER_OME_UNIT.get(unit[1] if unit else "µm")
    if unit and um is None and number is not None:
        return f"records PhysicalSize{axis} {number} in {unit[1]!r}, a unit that is not read"
    return number * um if isinstance(number, float) and um else number


def _number(text: str) -> Recorded:
    try:
        return float(text)
    except ValueError:
        return f"records {text[:40]!r} um/px, which is no number"


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
