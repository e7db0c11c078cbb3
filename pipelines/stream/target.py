"""What a tile is to be recognised as: one class, or a class per pixel.

Takes the row that was read, its open slide and region; writes the target into the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipelines.slides.geometry import Region
from pipelines.slides.tile_box import TileBox

if TYPE_CHECKING:
    from pipelines.catalog.handles import SlidePool
    from pipelines.labels.annotations import SlideAnnotations
    from pipelines.slides.slide import Slide

Targets = NDArray[np.int64] | NDArray[np.uint8]
"""int64 (n,) class per tile, or uint8 (n, h, w) class per pixel with 255 for "ignore"."""


def shaped(stored: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return what is stored of one tile in its own shape: the first numbers of a line that the largest tile fills."""
    return stored if stored.shape == shape else stored[: math.prod(shape)].reshape(shape)


class Target(Protocol):
    """Fills one tile's target."""

    @property
    def dtype(self) -> type[np.generic]: ...

    def shape(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one target, for a tile of ``size``: height and width in px, or px in a line."""
        ...

    def fill(
        self, row: int, slide_id: str, slide: Slide, region: Region, out: NDArray[Any], box: TileBox | None = None
    ) -> None:
        """Write the target of ``row``, of pixels that of ``box`` of the region alone, into ``out``.

        Raises:
            TileReadError: the annotation is damaged here.
        """
        ...

    def fill_alone(
        self, row: int, slide_id: str, pool: SlidePool, region: Region, out: NDArray[Any], box: TileBox | None = None
    ) -> None:
        """Write the target as ``fill`` does, without pixels: opens the slide only if the target is drawn on it."""
        ...

    def check(self, slide_id: str, slide: Slide) -> None:
        """Raise the SlideError that ``fill`` would raise for every tile of the slide."""
        ...

    def fingerprint(self) -> str:
        """Says whether two targets are the same."""
        ...


@dataclass(frozen=True, eq=False)
class Labels:
    """One class per tile.

    Attributes:
        by_row: int64 (n,), class of every row of the table; -1 for unknown.
    """

    by_row: NDArray[np.int64]
    dtype: type[np.generic] = np.int64

    def shape(self, size: tuple[int, ...]) -> tuple[int, ...]:
        return ()

    def fill(
        self, row: int, slide_id: str, slide: Slide, region: Region, out: NDArray[Any], box: TileBox | None = None
    ) -> None:
        out[...] = self.by_row[row]

    def fill_alone(
        self, row: int, slide_id: str, pool: SlidePool, region: Region, out: NDArray[Any], box: TileBox | None = None
    ) -> None:
        out[...] = self.by_row[row]

    def check(self, slide_id: str, slide: Slide) -> None:
        """Raise nothing: a class is always there."""

    def fingerprint(self) -> str:
        return "labels " + blake2b(np.ascontiguousarray(self.by_row).data, digest_size=16).hexdigest()


@dataclass(frozen=True, eq=False)
class Masks:
    """One class per pixel, drawn from annotations."""

    annotations: SlideAnnotations
    dtype: type[np.generic] = np.uint8

    def shape(self, size: tuple[int, ...]) -> tuple[int, ...]:
        return size

    def fill(
        self, row: int, slide_id: str, slide: Slide, region: Region, out: NDArray[Any], box: TileBox | None = None
    ) -> None:
        if box is None:
            self.annotations.read_mask(slide_id, slide, region, shaped(out, (region.height, region.width)))
        else:
            self.annotations.read_mask(slide_id, slide, region, shaped(out, (box.height, box.width)), box)

    def fill_alone(
        self, row: int, slide_id: str, pool: SlidePool, region: Region, out: NDArray[Any], box: TileBox | None = None
    ) -> None:
        with pool.lease(slide_id) as slide:
            self.fill(row, slide_id, slide, region, out, box)

    def check(self, slide_id: str, slide: Slide) -> None:
        self.annotations.read_mask(slide_id, slide, Region(0, 0, 1, 1, slide.mpp), np.empty((1, 1), np.uint8))

    def fingerprint(self) -> str:
        return "masks of " + ", ".join(self.annotations.classes)
