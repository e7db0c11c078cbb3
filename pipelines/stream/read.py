"""Tiles from slides, straight into the batch; an unreadable tile is replaced by another, or left blank.

The replacement is the next tile of the same slide in table order, then the next slide's: a function of the row and of
the files, so that all ranks agree. ``--pictures resize`` cuts whole pictures to tiles as ImageNet trainers do.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipelines.slides.geometry import Region, TileBox
from pipelines.slides.slide import Pixels, SlideError, TileReadError
from pipelines.stream.augment import CROP, CpuAugment, sample_rng
from pipelines.stream.batch import Target, TileParts, shaped
from pipelines.stream.order import Rows, by_slide

if TYPE_CHECKING:
    from pipelines.catalog.handles import SlidePool
    from pipelines.slides.slide import Slide
    from pipelines.tiles.tile_table import TileTable

MAX_FAULTS = 100
"""Tiles tried for one sample before it is given up: more than that is a broken disk, not a broken tile."""

MAX_FAULTS_PER_SLIDE = 10
"""Tiles tried of one slide: the rest of a truncated file is bad, so the next slide comes long before its last tile."""

UNREAD = -1
"""In place of a row: it could not be read and nothing was read in its place. Where a rank has only the target, whether
it is replaced is for the rank to say that has the pixels."""

OnFault = Callable[[str, Region | None, Exception], None]
"""Called with (slide_id, region, error) by reading threads, each time a tile cannot be read; region is None for a slide
that does not open."""


@dataclass(frozen=True, eq=False)
class SampleReader:
    """Reads and augments samples, rows of a table, through a pool of open slides. Knows nothing of the iterator: the
    reading threads must not keep it alive.

    Attributes:
        report: called each time a tile cannot be read.
        replaces: read another tile in place of one that cannot be read; otherwise it is blank, and its row ``UNREAD``.
        crop: cuts each slide, which is a picture, to the tile; None: tiles are read as they are.
        augment: varies whole tiles; their parts are cut after that.
        parts: what is wanted of each tile; None: all.
    """

    tiles: TileTable
    pool: SlidePool
    target: Target
    report: OnFault
    replaces: bool = True
    crop: PictureCrop | None = None
    augment: CpuAugment | None = None
    parts: TileParts | None = None

    def fill(self, sample: int, row: int, image: Pixels | None, out: NDArray[Any] | None) -> int:
        """Write the pixels of ``row``, or of its replacement, into ``image`` and its target into ``out``; return the
        row that was used, or ``UNREAD``. A target without its pixels may stay ``UNREAD``: the rank with the pixels
        finds out whether it is replaced.

        Args:
            sample: its number, which says how it is varied, and where in the tile a part of it lies.
            out: None where another rank has the target; a slide whose targets cannot be read is replaced all the same.

        Raises:
            SlideError: ``MAX_FAULTS`` tiles cannot be read; names them.
        """
        if self.parts is not None and self.augment is not None:
            return self.parts.cut(image, out, partial(self._whole.fill, sample, row))
        if image is None:
            assert out is not None
            try:
                return self.fill_target(sample, row, out)
            except (SlideError, OSError) as error:
                if not self.replaces:
                    self.report(self.tiles.slide_id(row), self.tiles.region(row), error)
                out[...] = 0
                return UNREAD
        with self._naming(sample, row):
            used = self._fill_or_replace(sample, row, image, out)
            if self.augment is not None:
                self.augment.apply(sample, image, out)
        return used

    def fill_target(self, sample: int, row: int, out: NDArray[Any]) -> int:
        """Write the target of exactly ``row``, varied as its pixels are, and return ``row``.

        Raises:
            SlideError, OSError: the slide does not open, or its annotation is damaged.
        """
        if self.parts is not None and self.augment is not None:
            return self.parts.cut(None, out, lambda _, mask: self._whole.fill_target(sample, row, mask))
        with self._naming(sample, row):
            slide_id, box = self.tiles.slide_id(row), self._boxes(sample)[1]
            with self.pool.lease(slide_id) if self.target.is_drawn else contextlib.nullcontext() as slide:
                self.target.fill(row, slide_id, slide, self.tiles.region(row), out, box)
            if self.augment is not None:
                self.augment.apply(sample, None, out)
        return row

    @cached_property
    def _whole(self) -> SampleReader:
        """The reader of whole tiles."""
        return replace(self, parts=None)

    def _fill_or_replace(self, sample: int, row: int, image: Pixels, out: NDArray[Any] | None) -> int:
        faults: list[str] = []
        box, target_box = self._boxes(sample)
        for rows in self._slides_from(row):
            for used in islice(rows, MAX_FAULTS_PER_SLIDE):
                slide_id, region, opened = self.tiles.slide_id(used), self.tiles.region(used), False
                sides = (region.height, region.width) if box is None else (box.height, box.width)
                pixels = shaped(image, (*sides, 3))
                try:
                    with self.pool.lease(slide_id) as slide:
                        opened = True
                        self._read(sample, slide, region, box, pixels)
                        if out is None:
                            self.target.check(slide_id, slide)
                        else:
                            self.target.fill(used, slide_id, slide, region, out, target_box)
                    return used
                except (SlideError, OSError) as error:
                    # OSError: the network share under an open slide went away; to training that is the same fault.
                    self.pool.discard(slide_id)
                    self.report(slide_id, region if opened else None, error)
                    if not self.replaces:
                        pixels[...] = 0
                        if out is not None:
                            out[...] = 0  # a class that there is: it is counted out, not looked up
                        return UNREAD
                    faults.append(f"{slide_id}, {region if opened else 'does not open'}: {error}")
                    if len(faults) == MAX_FAULTS:
                        raise self._given_up(row, faults) from error
                    if not isinstance(error, TileReadError):
                        break  # the slide is lost, not the tile
        raise self._given_up(row, faults)

    def _boxes(self, sample: int) -> tuple[TileBox | None, TileBox | None]:
        """Parts that are read of the tile of ``sample`` and of its mask; None: all."""
        parts = self.parts
        if parts is None:
            return None, None
        return parts.stored(parts.images, sample), parts.stored(parts.targets, sample)

    def _read(self, sample: int, slide: Slide, region: Region, box: TileBox | None, out: Pixels) -> None:
        if self.crop is None:
            if box is None:
                slide.read(region, out=out)
            else:
                slide.read_box(region, box, out)
            return
        whole = slide.levels[0]
        tile = out if box is None else np.empty((self.crop.side, self.crop.side, 3), np.uint8)
        self.crop.fill(sample, slide.read(Region(0, 0, whole.width, whole.height, whole.mpp)), tile)
        if box is not None:
            out[...] = box.crop(tile)

    def _slides_from(self, row: int) -> Iterator[Iterator[int]]:
        """Rows to try, slide by slide: first those of the slide of ``row``, from ``row`` on and around."""
        yield self._of_own_slide(row)
        slides, own = self._rows_by_slide, self._place_of_slide(row)
        for rows in (*slides[own + 1 :], *slides[:own]):
            yield iter(rows.tolist())

    def _of_own_slide(self, row: int) -> Iterator[int]:
        yield row  # before anything is sorted: all other lines here run for faults only
        here = self._rows_by_slide[self._place_of_slide(row)]
        yield from np.roll(here, -int(np.searchsorted(here, row)))[1:].tolist()

    def _place_of_slide(self, row: int) -> int:
        return [int(self.tiles.slide[rows[0]]) for rows in self._rows_by_slide].index(int(self.tiles.slide[row]))

    @cached_property
    def _rows_by_slide(self) -> list[Rows]:
        return by_slide(np.arange(len(self.tiles)), self.tiles.slide)

    def _given_up(self, row: int, faults: list[str]) -> SlideError:
        listed = "\n  ".join(faults)
        return SlideError(
            f"no tile could be read in place of row {row} of the tile table ({self.tiles.slide_id(row)}, "
            f"{self.tiles.region(row)}); {len(faults)} tried. Check the disk, or take these slides out:\n  {listed}"
        )

    @contextlib.contextmanager
    def _naming(self, sample: int, row: int) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            slide_id, region = self.tiles.slide_id(row), self.tiles.region(row)
            error.add_note(f"while reading sample {sample}: slide {slide_id}, {region}")
            raise


AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Part of the picture, and width over height, of what is cut out of it in training."""

TRIES = 10
"""Crops drawn until one fits into the picture; the largest in its middle, if none does."""

SHORTER_SIDE = 256 / 224
"""The shorter side of a picture that is not varied, in tiles."""


@dataclass(frozen=True)
class PictureCrop:
    """Cuts pictures to tiles.

    Attributes:
        side: of a tile in px.
        varied: cut at random and, with ``flip``, flipped half of the time; otherwise the middle.
    """

    side: int
    seed: int
    varied: bool
    flip: bool = True

    def fill(self, sample: int, picture: Pixels, out: Pixels) -> None:
        """Write what is cut of ``picture``, uint8 (h, w, 3), into ``out``, uint8 (side, side, 3)."""
        if not self.varied:
            out[...] = centre(picture, self.side)
            return
        numbers = sample_rng(self.seed, sample, CROP)
        left, top, width, height = random_box(picture.shape[1], picture.shape[0], numbers)
        cut = _resized(picture[top : top + height, left : left + width], self.side, self.side)
        out[...] = cut[:, ::-1] if self.flip and numbers.random() < 0.5 else cut


def centre(picture: Pixels, side: int) -> Pixels:
    """Return the middle of ``picture``, uint8 (side, side, 3), once its shorter side is ``SHORTER_SIDE`` tiles."""
    height, width = picture.shape[:2]
    shorter = round(SHORTER_SIDE * side)
    if width <= height:
        resized = _resized(picture, shorter, int(shorter * height / width))
    else:
        resized = _resized(picture, int(shorter * width / height), shorter)
    top, left = (round((length - side) / 2) for length in resized.shape[:2])
    return resized[top : top + side, left : left + side]


def random_box(width: int, height: int, numbers: np.random.Generator) -> tuple[int, int, int, int]:
    """Return left, top, width and height of what is cut out of a picture of ``width`` x ``height`` px."""
    for _ in range(TRIES):
        area = width * height * numbers.uniform(*AREA)
        ratio = math.exp(numbers.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, top = (int(numbers.integers(0, room + 1)) for room in (width - box_width, height - box_height))
            return left, top, box_width, box_height
    box_width = min(width, max(1, round(height * RATIO[1])))
    box_height = min(height, max(1, round(width / RATIO[0])))
    return (width - box_width) // 2, (height - box_height) // 2, box_width, box_height


def _resized(pixels: Pixels, width: int, height: int) -> Pixels:
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
