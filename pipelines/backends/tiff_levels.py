"""Images of a TIFF file, the levels of the one that is the slide, and their um/px.

Takes the pages of ``tiff_tags``; gives the levels, finest first, and um/px per axis. Knows generic pyramids (reduced
pages), Aperio SVS (tiled pages; label, macro and thumbnail are in strips) and OME-TIFF (SubIFDs). Formats whose tiles
lie elsewhere than in a plain grid (Leica, Ventana, Philips, Trestle) are refused, for OpenSlide to read.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipelines.backends.level_reader import Pictured, Recorded, choose_scene, describe, find_scenes
from pipelines.backends.tiff_page import UNREADABLE, Page, Tag
from pipelines.backends.tiff_tags import Tiff, read_tiff
from pipelines.slides.slide import NotThisFormat, SlideError

REDUCED: Final = 1
MASK: Final = 4
"""Bits of the SubfileType tag."""

_NAME_CHARACTERS: Final = 64


@dataclass(frozen=True, eq=False)
class TiffImage:
    """One image of a file.

    Attributes:
        page: its finest page.
        name: of the OME-XML, or the first line of a short description; empty if there is none.
        pixels: its Pixels element in the OME-XML; None outside OME-TIFF.
        planes: pages of the size of ``page`` that belong to it.
    """

    page: Page
    name: str
    pixels: str | None = None
    planes: int = 1

    @property
    def width(self) -> int:
        return self.page.width

    @property
    def height(self) -> int:
        return self.page.height


def choose_image(tiff: Tiff, scene: int | None = None) -> tuple[TiffImage, list[TiffImage]]:
    """Return the image that is the slide, and the others.

    Args:
        scene: which image to take if several have a similar size, counted from 0; None: there is one such image.

    Raises:
        SlideError: several images have a similar size and ``scene`` names none of them, or pages hold one channel each.
    """
    images = _ome_images(tiff) or _plain_images(tiff)
    scenes = find_scenes(images)
    largest = scenes[0]
    if images[0].pixels is None:
        scenes = [largest, *(other for other in scenes[1:] if not _is_copy(largest, other))]
    refuse_planes(tiff, largest.page)
    chosen = choose_scene(str(tiff.path), sorted(scenes, key=images.index), scene)
    for page in tiff.pages:
        if page.is_tiled and is_reduced(page) and _area(page) > _area(largest.page):
            raise SlideError(
                f"{tiff.path}: damaged TIFF: page {page.index} ({page.width} x {page.height} px) is marked as reduced "
                f"and is larger than the image itself ({largest.width} x {largest.height} px)"
            )
    return chosen, [image for image in images if image is not chosen]


def _coarser_pages(tiff: Tiff, image: TiffImage, others: Sequence[TiffImage]) -> list[Page]:
    """Return the pages of ``image`` that are marked as reduced: SubIFDs, or pages up to the next scene."""
    if image.page.sub_pages:
        return list(image.page.sub_pages)
    scenes = {other.page.index for other in find_scenes([image, *others]) if other is not image}
    end = min((index for index in scenes if index > image.page.index), default=len(tiff.pages))
    return [page for page in tiff.pages[image.page.index + 1 : end] if is_reduced(page)]


def is_reduced(page: Page) -> bool:
    return page.number(Tag.SUBFILE, 0) & (REDUCED | MASK) == REDUCED


def refuse_planes(tiff: Tiff, page: Page) -> None:
    """Raise SlideError where channels of the size of ``page`` are pages of their own: a reader would show the first."""
    planes = [
        other
        for other in tiff.pages
        if (other.width, other.height) == (page.width, page.height)
        and other.number(Tag.SAMPLES, 1) == page.number(Tag.SAMPLES, 1) == 1
        and not other.number(Tag.SUBFILE, 0) & (REDUCED | MASK)
    ]
    if len(planes) > 1:
        raise SlideError(
            f"{tiff.path}: {len(planes)} pages of {page.width} x {page.height} px hold one channel or plane each; "
            "a slide is one RGB or grey image; merge the channels to 8-bit RGB, or save one of them alone"
        )


def _plain_images(tiff: Tiff) -> list[TiffImage]:
    starts = [page for page in tiff.pages if not page.number(Tag.SUBFILE, 0) & (REDUCED | MASK)] or [tiff.pages[0]]
    return [TiffImage(page, short_name(page.text(Tag.DESCRIPTION))) for page in starts]


def _ome_images(tiff: Tiff) -> list[TiffImage]:
    """Images that the OME-XML lists, and unmarked pages of other sizes; none if it is no OME-TIFF."""
    description = tiff.pages[0].text(Tag.DESCRIPTION)
    if not re.search(r"<(?:\w+:)?OME\b", description[:4096]):
        return []
    listed: dict[int, tuple[str, str]] = {}
    for text in re.split(r"<(?:\w+:)?Image\b", description)[1:]:
        name = re.search(r'\bName="([^"]*)"', text.partition(">")[0])
        pixels = re.search(r"<(?:\w+:)?Pixels\b[^<>]*>", text)
        first = re.search(r'<(?:\w+:)?TiffData\b[^<>]*\bIFD="(\d{1,9})"', text)
        index = int(first[1]) if first else 0
        if pixels and index < len(tiff.pages):
            listed.setdefault(index, (short_name(html.unescape(name[1])) if name else "", pixels[0]))
    images: list[TiffImage] = []
    for image in _plain_images(tiff) if listed else ():
        page, last = image.page, images[-1] if images else None
        if page.index in listed:
            images.append(TiffImage(page, *listed[page.index]))
        elif last and (page.width, page.height) == (last.width, last.height):
            images[-1] = TiffImage(last.page, last.name, last.pixels, last.planes + 1)
        else:
            images.append(TiffImage(page, "", ""))
    return images


def short_name(text: str) -> str:
    """The first line of a description that is a name, without what cannot be printed."""
    line = text.strip().partition("\n")[0].strip()
    return "".join(c for c in line if c.isprintable()) if len(line) <= _NAME_CHARACTERS and line[:1] != "<" else ""


def _area(page: Page) -> int:
    return max(0, page.width) * max(0, page.height)


def _is_copy(large: Pictured, small: Pictured) -> bool:
    """Return whether the sides of ``small`` are those of ``large`` divided by a whole number: an unmarked level."""
    factor = round(large.width / max(1, small.width))
    sides = ((large.width, small.width), (large.height, small.height))
    return factor > 1 and all(abs(side - of / factor) <= 1 for of, side in sides)


_UM_PER_UNIT: Final = {2: 25_400.0, 3: 10_000.0}
"""um per ResolutionUnit: inch, centimetre. Without a unit, resolutions are only an aspect ratio."""
_UM_PER_OME_UNIT: Final = {"µm": 1.0, "μm": 1.0, "um": 1.0, "nm": 1e-3, "mm": 1e3, "cm": 1e4}
YCBCR: Final = 6
_JPEG: Final = (6, 7)
_CHANNELS: Final = {0: 1, 1: 1, 3: 1, 2: 3, YCBCR: 3, 5: 4}
"""Channels by PhotometricInterpretation: grey either way round and palette; RGB and YCbCr; CMYK."""
_ALPHA: Final = (1, 2)
"""ExtraSamples of a channel that is opacity; 0 is a channel of any kind, which libraries take for opacity, too."""
PRINT_UM: Final = 20.0
"""Coarser than this, the tag is a writer's default (72, 96, 300 or 1200 dots per inch), not a scanner's resolution."""


def find_levels(tiff: Tiff, scene: int | None = None) -> tuple[TiffImage, list[Page]]:
    """Return the image that is the slide, and the pages that are its levels, finest first.

    Raises:
        NotThisFormat: not tiled, or a format whose tiles are not one plain grid per level.
        SlideError: samples that are not 8-bit whole numbers, channels in pages of their own, several images of similar
            size, or sizes that contradict each other.
    """
    refuse_other_vendors(tiff)
    if is_aperio(tiff):
        candidates = [page for page in tiff.pages if page.is_tiled]
        image = TiffImage((candidates or tiff.pages)[0], "")
    else:
        image, others = choose_image(tiff, scene)
        candidates = [image.page, *_coarser_pages(tiff, image, others)]
    if not image.page.is_tiled:
        raise NotThisFormat(f"{tiff.path}: not a tiled TIFF: its image lies in strips")
    finest, *coarser = sorted((p for p in candidates if p.is_tiled), key=lambda p: (p.width, p.height), reverse=True)
    size = (finest.width, finest.height)
    levels = [finest, *(level for level in coarser if is_reduction(size, (level.width, level.height)))]
    # Every tiled image of an SVS is a level. Only other proportions give away another slide: the size that begins a
    # description is that of the slide or, from a GT450, of the page itself.
    other_sizes = {(p.width, p.height) for p in candidates} - {(p.width, p.height) for p in levels}
    if finest is not candidates[0] or (coarser and len(levels) == 1) or (is_aperio(tiff) and other_sizes):
        sizes = ", ".join(f"{p.width} x {p.height}" for p in candidates)
        raise SlideError(f"{tiff.path}: damaged TIFF: the pages ({sizes} px) are not one image made smaller")
    for level in levels:
        refuse_samples(tiff, level)
    return image, levels


def other_tiff_images(path: Path, scene: int | None) -> list[str]:
    """Return name and size of the images of a TIFF file that are not the slide, its further planes included; raises
    SlideError as ``find_levels`` does."""
    try:
        tiff = read_tiff(path)
        refuse_other_vendors(tiff)
    except NotThisFormat:
        return []
    if is_aperio(tiff):
        # The first word of the description's second line is label or macro; the thumbnail has none.
        strips = [page for page in tiff.pages if not page.is_tiled]
        words = [next(iter(page.text(Tag.DESCRIPTION).partition("\n")[2].split()), "") for page in strips]
        names = [word if word.isalpha() else "thumbnail" for word in words]
        return [describe(TiffImage(page, name)) for page, name in zip(strips, names, strict=True)]
    chosen, others = choose_image(tiff, scene)
    planes = [f"{chosen.planes - 1} more focal planes or times"] if chosen.planes > 1 else []
    return [*planes, *map(describe, others)]


def is_aperio(tiff: Tiff) -> bool:
    return tiff.pages[0].text(Tag.DESCRIPTION).startswith("Aperio")


def refuse_samples(tiff: Tiff, page: Page) -> None:
    """Refuse samples that libraries read as something else without a word.

    Raises:
        SlideError: they are not unsigned numbers of 8 bits, there are further channels, or the tags about colours
            contradict each other.
    """
    bits, kinds = set(page.array(Tag.BITS).tolist()) or {1}, set(page.array(Tag.SAMPLE_FORMAT).tolist()) or {1}
    if max(bits) > 8 or min(bits) < 1 or kinds != {1}:
        kind = {1: "unsigned", 2: "signed", 3: "floating-point"}.get(max(kinds), "other")
        raise SlideError(
            f"{tiff.path}: a slide has unsigned samples of 8 bits; page {page.index} has {kind} samples "
            f"of {', '.join(map(str, sorted(bits)))} bits (SampleFormat {max(kinds)}); convert it to 8-bit RGB"
        )
    samples, colours = page.number(Tag.SAMPLES, 1), page.number(Tag.PHOTOMETRIC, UNREADABLE)
    compression, extra = page.number(Tag.COMPRESSION, 1), page.number(Tag.EXTRA_SAMPLES, 0)
    is_image = colours in _CHANNELS and samples - _CHANNELS[colours] in (0, int(extra in _ALPHA))
    if not is_image or (colours == YCBCR and compression not in _JPEG):
        raise SlideError(
            f"{tiff.path}: page {page.index} has {samples} samples per px, compression {compression}, colours of kind "
            f"{colours} (PhotometricInterpretation) and ExtraSamples {extra}. A slide is one RGB or grey image, with "
            "one alpha channel at most. Merge several channels to 8-bit RGB, or save one; else the file is damaged"
        )


def recorded_mpp(image: TiffImage) -> tuple[Recorded, Recorded]:
    """um/px in x and y that the file records for ``image``; None where it is silent."""
    description = image.page.text(Tag.DESCRIPTION)
    if description.startswith("Aperio"):
        match = re.search(r"\|\s*MPP\s*=\s*([^\s|]+)", description)
        mpp = _number(match[1]) if match else None
        return mpp, mpp
    if image.pixels:
        return _ome_mpp(image.pixels, "X"), _ome_mpp(image.pixels, "Y")
    return resolution_mpp(image.page)


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
        elif um / per_unit < PRINT_UM:
            mpps.append(float(um / per_unit))
        else:
            mpps.append(f"records {um / per_unit:.2f} um/px, the resolution of a screen or a printer")
    return mpps[0], mpps[1]


def _ome_mpp(pixels: str, axis: str) -> Recorded:
    size = re.search(rf'\bPhysicalSize{axis}="([^"]*)"', pixels)
    unit = re.search(rf'\bPhysicalSize{axis}Unit="([^"]*)"', pixels)
    name = html.unescape(unit[1]) if unit else "µm"
    number, um = _number(size[1]) if size else None, _UM_PER_OME_UNIT.get(name)
    if um is None and number is not None:
        return f"records PhysicalSize{axis} {number} in {name!r}, a unit that is not read"
    return number * um if isinstance(number, float) and um else number


def _number(text: str) -> Recorded:
    try:
        return float(text)
    except ValueError:
        return f"records {text[:40]!r} um/px, which is no number"


def is_reduction(base: tuple[int, int], level: tuple[int, int]) -> bool:
    """True when ``level`` (width, height) has the shape of ``base`` made smaller, rounding of both sides allowed."""
    width, height = level
    return 0 < width < base[0] and height > 0 and abs(height - width * base[1] / base[0]) <= 2 + 0.01 * height


def refuse_other_vendors(tiff: Tiff) -> None:
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
