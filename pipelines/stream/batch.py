"""Batches of tiles and targets, and the buffers they live in.

Arrays of a ``Batch`` belong to a ``BufferPool`` that never allocates more than its budget in bytes; ``Batch.release``
gives them back. A ``Target`` fills the class of a tile or of its pixels.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.slides.geometry import Region, TileBox, turns_that_fit
from pipelines.slides.slide import Pixels
from pipelines.stream.augment import AugmentSettings, draw
from pipelines.stream.order import Rows

if TYPE_CHECKING:
    from pipelines.labels.annotations import SlideAnnotations
    from pipelines.slides.slide import Slide

Allocate = Callable[[tuple[int, ...], type[np.generic]], NDArray[Any]]
"""(shape, dtype) -> array; ``pipelines.stream.device.allocate_pinned`` is another one than numpy's."""

SizeOf = Callable[[int], tuple[int, int]]
"""Row of the table -> width and height of its tile in px."""

Targets = NDArray[np.int64] | NDArray[np.uint8]
"""int64 (n,) class per tile, or uint8 (n, h, w) class per pixel with 255 for "ignore"."""


@dataclass(frozen=True)
class TileParts:
    """The boxes that one rank of several reads of every tile. A changed colour needs no neighbours.

    Attributes:
        images, targets: boxes of a tile and of its mask, in px of the tile as the model is given it.
        height, width: of whole tiles.
        augment: what is varied in them, by seed and sample.
        seed: of the run.

    Raises:
        ValueError: a box is not inside the tile.
    """

    images: TileBox
    targets: TileBox
    height: int
    width: int
    augment: AugmentSettings
    seed: int

    def __post_init__(self) -> None:
        whole = TileBox.full(self.height, self.width)
        for name, box in (("pixels", self.images), ("masks", self.targets)):
            if not whole.holds(box):
                raise ValueError(f"a part of {name} lies inside the tile, {whole}; got {box}")

    def stored(self, box: TileBox, sample: int) -> TileBox:
        """Return where ``box`` lies in the tile of ``sample`` as a batch holds it, before a device turns that."""
        if self.augment.augment != "device" or not self.augment.flip:
            return box
        drawn = draw(self.augment, self.seed, np.array([sample]))
        turns = turns_that_fit(int(drawn.quarter_turns[0]), self.height, self.width)
        return box.before_turning(turns, bool(drawn.flip[0]), self.height, self.width)

    def cut(self, image: NDArray[Any] | None, target: NDArray[Any] | None, fill: Callable[..., int]) -> int:
        """Call ``fill``, (image, target) -> row used, on whole tiles, and write their parts.

        Args:
            image: a line of the bytes of a part; None: none is wanted.
            target: a line of the bytes of a part of a mask, or a class; None: none is wanted.
        """
        whole = None if image is None else np.empty((self.height, self.width, 3), np.uint8)
        is_mask = target is not None and target.ndim == 1
        mask = np.empty((self.height, self.width), np.uint8) if is_mask else target
        used = fill(whole, mask)
        if image is not None and whole is not None:
            image.reshape(self.images.height, self.images.width, 3)[...] = self.images.crop(whole)
        if is_mask and target is not None and mask is not None:
            target.reshape(self.targets.height, self.targets.width)[...] = self.targets.crop(mask)
        return used


@dataclass(frozen=True, eq=False)
class Batch:
    """This rank's part of one global batch; n may be less than its share at the end of a finite stream, even 0.

    Attributes:
        images: uint8 (a, h, w, 3), RGB: those of the tiles whose pixels are read here, in order; usually all n. Of
            tiles that differ in size: uint8 (a, bytes of the largest), each a line that is ``shaped``. Of parts of
            tiles: uint8 (a, bytes of one), each a line, too, since turned ones lie where others stand.
        targets: int64 (b,), or uint8 (b, h, w) with 255 for "ignore": those that are read here, in order; masks of
            tiles that differ in size, and parts of masks, are lines, too.
        rows: int64 (n,), rows of the ``TileTable`` that were read, replacements included, ``UNREAD`` where there is
            none; where no pixels are read here, the rows that were to be read.
        samples: int64 (n,), global sample numbers; all randomness of a sample follows from its number.
        first_sample: the first sample number of the **global** batch.
        release: gives the arrays back; call it once their contents are no longer needed, more calls do nothing.
        has_image, has_target: bool (n,), which tiles have a place in ``images`` and ``targets``.
        wanted: int64 (n,), rows of the table that were to be read.
        size_of: of the tiles, where they differ in size.
        parts: what is read of each tile; None: all.
    """

    images: Pixels
    targets: Targets
    rows: Rows
    samples: Rows
    first_sample: int
    release: Callable[[], None]
    has_image: NDArray[np.bool_]
    has_target: NDArray[np.bool_]
    wanted: Rows
    size_of: SizeOf | None = None
    parts: TileParts | None = None

    @property
    def replaced(self) -> int:
        """Tiles whose pixels were read here, and are another tile's: their own cannot be read."""
        return int(np.count_nonzero(self.has_image & (self.rows != self.wanted)))

    @property
    def known_rows(self) -> Rows:
        """Rows of the table, int64 (n,): those that were read, and where there is none, those that were to be."""
        return np.where(self.rows >= 0, self.rows, self.wanted)

    def sides(self, position: int) -> tuple[int, int]:
        """Return height and width of tile ``position``, of the one that was read in its place if it was replaced; of
        the whole tile, also where a part of it is read."""
        if self.parts is not None:
            return self.parts.height, self.parts.width
        if self.size_of is None:
            height, width = self.images.shape[1:3]
            return height, width
        width, height = self.size_of(int(self.known_rows[position]))
        return height, width

    def image(self, position: int) -> Pixels:
        """Return where the pixels of tile ``position`` are written."""
        pixels: Pixels = self.images[np.count_nonzero(self.has_image[:position])]
        return pixels

    def target(self, position: int) -> NDArray[Any]:
        """Return where the target of tile ``position`` is written."""
        k = int(np.count_nonzero(self.has_target[:position]))
        return self.targets[k : k + 1].reshape(self.targets.shape[1:])

    def __len__(self) -> int:
        return len(self.samples)


Buffer = tuple[Pixels, NDArray[Any]]
"""Images and targets of one batch of full size."""


@dataclass(eq=False)
class BufferPool:
    """Buffers of one shape, made when needed and reused. Thread-safe.

    Attributes:
        image_shape, target_shape, target_dtype: of one buffer.
        max_bytes: of all buffers together; one buffer is always allowed.
        size_of, parts: as in ``Batch``.
        made: buffers so far.
    """

    image_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    target_dtype: type[np.generic]
    max_bytes: int
    allocate: Allocate
    size_of: SizeOf | None = None
    parts: TileParts | None = None
    made: int = 0
    _free: list[Buffer] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one buffer."""
        image = int(np.prod(self.image_shape, dtype=np.int64))
        return image + int(np.prod(self.target_shape, dtype=np.int64)) * np.dtype(self.target_dtype).itemsize

    def take(self) -> Buffer | None:
        """Return a buffer, or None when the budget is spent on those already out."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self.made and (self.made + 1) * self.buffer_bytes > self.max_bytes:
                return None
            buffer = (self.allocate(self.image_shape, np.uint8), self.allocate(self.target_shape, self.target_dtype))
            self.made += 1
            return buffer

    def give(self, buffer: Buffer) -> None:
        with self._lock:
            self._free.append(buffer)


def shaped(stored: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return what is stored of one tile in its own shape: the first numbers of a line that the largest tile fills."""
    return stored if stored.shape == shape else stored[: math.prod(shape)].reshape(shape)


@dataclass(frozen=True, eq=False)
class Labels:
    """One class per tile.

    Attributes:
        by_row: int64 (n,), class of every row of the table; -1 for unknown.
    """

    by_row: NDArray[np.int64]
    dtype: type[np.generic] = np.int64
    is_drawn = False
    """Whether ``fill`` needs the slide open."""

    def shape(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one target, for a tile of ``size``: height and width in px, or px in a line."""
        return ()

    def fill(
        self, row: int, slide_id: str, slide: Slide | None, region: Region, out: NDArray[Any], box: TileBox | None
    ) -> None:
        """Write the target of ``row`` into ``out``; of masks, with ``box``, that of this part of the region alone."""
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
    is_drawn = True

    def shape(self, size: tuple[int, ...]) -> tuple[int, ...]:
        return size

    def fill(
        self, row: int, slide_id: str, slide: Slide | None, region: Region, out: NDArray[Any], box: TileBox | None
    ) -> None:
        assert slide is not None, "masks are drawn on an open slide"
        area = box or region
        self.annotations.read_mask(slide_id, slide, region, shaped(out, (area.height, area.width)), box)

    def check(self, slide_id: str, slide: Slide) -> None:
        """Raise the SlideError that ``fill`` would raise for every tile of the slide."""
        self.annotations.read_mask(slide_id, slide, Region(0, 0, 1, 1, slide.mpp), np.empty((1, 1), np.uint8))

    def fingerprint(self) -> str:
        return "masks of " + ", ".join(self.annotations.classes)


Target = Labels | Masks
