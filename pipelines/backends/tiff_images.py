"""The images of a TIFF file, and which of them is the slide.

Takes the pages of ``tiff_tags``; gives the largest image that is not a label, macro or thumbnail, and the others. An
image begins with each page that is not marked as a reduced one; an OME-TIFF lists its images in XML, where several
pages of one image are its focal planes or times. Images of similar size are scenes, of which the user chooses one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pipelines.backends.scenes import Pictured, choose_scene, find_scenes
from pipelines.backends.tiff_page import Page, Tag
from pipelines.backends.tiff_tags import Tiff
from pipelines.slides.slide import SlideError

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
        tiff: not of a vendor whose pages mean something else.
        scene: which image to take if several have a similar size, counted from 0; None: there is one such image.

    Raises:
        SlideError: several images have a similar size and ``scene`` names none of them, or pages hold one channel each.
    """
    images = _ome_images(tiff) or _plain_images(tiff)
    scenes = find_scenes(images)
    if images[0].pixels is None:
        scenes = [scenes[0], *(other for other in scenes[1:] if not _is_copy(scenes[0], other))]
    refuse_planes(tiff, scenes[0].page)
    chosen = choose_scene(str(tiff.path), sorted(scenes, key=images.index), scene)
    for page in tiff.pages:
        if page.is_tiled and is_reduced(page) and _area(page) > _area(chosen.page):
            raise SlideError(
                f"{tiff.path}: damaged TIFF: page {page.index} ({page.width} x {page.height} px) is marked as reduced "
                f"and is larger than the image itself ({chosen.width} x {chosen.height} px)"
            )
    return chosen, [image for image in images if image is not chosen]


def coarser_pages(tiff: Tiff, image: TiffImage, others: Sequence[TiffImage]) -> list[Page]:
    """Return the pages of ``image`` that are marked as reduced: SubIFDs, or pages up to the next scene."""
    if image.page.sub_pages:
        return list(image.page.sub_pages)
    scenes = {other.page.index for other in find_scenes([image, *others]) if other is not image}
    end = min((index for index in scenes if index > image.page.index), default=len(tiff.pages))
    return [page for page in tiff.pages[image.page.index + 1 : end] if is_reduced(page)]


def is_reduced(page: Page) -> bool:
    return page.number(Tag.SUBFILE, 0) & (REDUCED | MASK) == REDUCED


def is_ome(page: Page) -> bool:
    return bool(re.search(r"<(?:\w+:)?OME\b", page.text(Tag.DESCRIPTION)[:4096]))


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
    if not is_ome(tiff.pages[0]):
        return []
    listed: dict[int, tuple[str, str]] = {}
    for text in re.split(r"<(?:\w+:)?Image\b", tiff.pages[0].text(Tag.DESCRIPTION))[1:]:
        name = re.search(r'\bName="([^"]*)"', text.partition(">")[0])
        pixels = re.search(r"<(?:\w+:)?Pixels\b[^<>]*>", text)
        first = re.search(r'<(?:\w+:)?TiffData\b[^<>]*\bIFD="(\d{1,9})"', text)
        index = int(first[1]) if first else 0
        if pixels and index < len(tiff.pages):
            listed.setdefault(index, (short_name(name[1]) if name else "", pixels[0]))
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
    """Whether ``small`` has the sides of ``large`` divided by a whole number above 1: a level without its mark."""
    factor = round(large.width / max(1, small.width))
    sides = ((large.width, small.width), (large.height, small.height))
    return factor > 1 and all(abs(side - of / factor) <= 1 for of, side in sides)
