"""Which of the images in a slide file is the slide: the largest that is not a label, macro or thumbnail.

Takes images with a name and a size. If several have a similar size, they are scenes, of which the user chooses one with
``--scene N``, counted from 0 in the order of the file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

from pipelines.slides.slide import SlideError

SIMILAR: Final = 1 / 16
"""An image with at least this part of the largest one's area is another scene; labels and macros are smaller."""

_AUXILIARY: Final = re.compile(r"(?<![a-z])(label|macro|thumbnail|thumb|overview|preview)(?![a-z])", re.IGNORECASE)
_LISTED: Final = 16


class Pictured(Protocol):
    """An image of a file: a name, which may be empty, and a size in px."""

    @property
    def name(self) -> str: ...
    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...


Image = TypeVar("Image", bound=Pictured)


def find_scenes(images: Sequence[Image]) -> list[Image]:
    """Return the largest image that is not named as a label, macro or thumbnail, and those of similar size."""
    scenes = [image for image in images if not _AUXILIARY.search(image.name)] or list(images)
    scenes.sort(key=_area, reverse=True)
    return [image for image in scenes if _area(image) >= SIMILAR * _area(scenes[0])]


def choose_scene(where: str, scenes: Sequence[Image], scene: int | None) -> Image:
    """Return the scene with the number ``scene``; if there is only one, that one, whatever the number.

    Raises:
        SlideError: there are several, and ``scene`` is none of their numbers.
    """
    if len(scenes) == 1:
        return scenes[0]
    if scene is None or scene >= len(scenes):
        listed = ", ".join(f"{number}: {describe(image)}" for number, image in enumerate(scenes[:_LISTED]))
        request = "choose one" if scene is None else f"there is no scene {scene}; choose another"
        raise SlideError(
            f"{where}: the file has {len(scenes)} images of similar size ({listed}); {request} with --scene N, or save "
            "them as files of their own"
        )
    return scenes[scene]


def _area(image: Pictured) -> int:
    """Return px; 0 if a side is damaged."""
    return max(0, image.width) * max(0, image.height)


def describe(image: Pictured) -> str:
    """Return name and size of an image."""
    return f"{image.name!r} {image.width} x {image.height} px" if image.name else f"{image.width} x {image.height} px"
