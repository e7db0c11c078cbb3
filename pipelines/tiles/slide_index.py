"""Tiles of one slide: opened, searched for tissue, cut into tiles, checked for damage, drawn.

Gives ``SlideTiles``, or a ``SlideFault`` with the step at which it failed and why. Runs in a process of its own
(``processes``) and writes nothing. Damage of the level that training reads is found in the file's table of compressed
tiles, and by decoding a piece of a few tiles.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.backends.tiff_levels import find_levels
from pipelines.backends.tiff_page import Tag
from pipelines.backends.tiff_tags import read_tiff
from pipelines.catalog.catalog import PICTURE_SUFFIXES, SlideSpec
from pipelines.catalog.handles import SlideState
from pipelines.catalog.processes import Limits
from pipelines.slides.geometry import Level, Region, best_level, l0_from_l, l0_step, l_from_l0
from pipelines.slides.slide import Slide, SlideError, TileReadError
from pipelines.tiles.overlay import draw_overlay, read_thumbnail
from pipelines.tiles.tile_table import IndexedSlide, SlideFault
from pipelines.tiles.tiling import (
    WHOLE_SLIDE_MULTIPLE,
    IndexSettings,
    TileGrid,
    tile_grid,
    tissue_box,
    tissue_fractions,
)
from pipelines.tiles.tissue import TissueMask, find_tissue, read_overview

LOOKED_AT = 8
"""Tiles of a slide that are decoded in part."""

PIECE_PX = 256
"""Side of the piece, at the tile's resolution: about one compressed tile."""

MOST_DAMAGED = 0.5
"""A slide of which more tiles are damaged is not worth training on; as ``tissue.MOST_UNREADABLE``."""


def find_unreadable_tiles(
    slide: Slide, grid: TileGrid, rows: NDArray[np.intp], columns: NDArray[np.intp], mpp: float, scene: int | None
) -> tuple[NDArray[np.bool_], str]:
    """Return which tiles cannot be read, bool (n,), and the first fault; empty where all can.

    Args:
        rows, columns: (n,), place of each tile in ``grid``.
        mpp: resolution to read them at, um/px.
        scene: of several images of the file, the one that was opened.

    Raises:
        TileReadError: more than ``MOST_DAMAGED`` of the tiles, or of those looked at.
    """
    level = best_level(slide.levels, mpp)
    l0_x, l0_y = grid.l0_x[columns], grid.l0_y[rows]
    damaged = np.zeros(len(l0_x), np.bool_)
    fault = ""
    if slide.backend == "tiled":
        damaged = _in_table(slide.path, level, l0_x, l0_y, grid.l0_size, scene)
        if damaged.any():
            fault = f"{slide.path}: level {level.index}: compressed tiles without data, or past the end of the file"
    looked_at = np.flatnonzero(~damaged)
    if len(looked_at) > LOOKED_AT:
        random = np.random.default_rng(zlib.crc32(slide.path.name.encode("utf-8", "replace")))
        looked_at = np.sort(random.choice(looked_at, LOOKED_AT, replace=False))
    piece = [min(PIECE_PX, side) for side in grid.size]
    insets = [(l0 - round(l0 * px / side)) // 2 for l0, px, side in zip(grid.l0_size, piece, grid.size, strict=True)]
    failed = 0
    for i in looked_at:
        try:
            slide.read(Region(int(l0_x[i]) + insets[0], int(l0_y[i]) + insets[1], piece[0], piece[1], mpp))
        except TileReadError as error:
            damaged[i] = True
            failed += 1
            fault = fault or str(error)
    if damaged.mean() > MOST_DAMAGED or failed > MOST_DAMAGED * len(looked_at):
        raise TileReadError(f"most tiles cannot be read, though the slide's overview can: {fault}")
    return damaged, fault


def _in_table(
    path: Path,
    level: Level,
    l0_x: NDArray[np.int64],
    l0_y: NDArray[np.int64],
    l0_size: tuple[int, int],
    scene: int | None,
) -> NDArray[np.bool_]:
    """Tiles that meet a compressed tile which the file cannot hold, bool (n,)."""
    tiff = read_tiff(path)
    page = find_levels(tiff, scene)[1][level.index]
    columns, rows = page.grid
    offsets, sizes = (page.array(tag)[: rows * columns] for tag in (Tag.TILE_OFFSETS, Tag.TILE_BYTES))
    outside = (sizes < 1) | (offsets < 8) | (sizes > tiff.size_bytes - offsets)
    outside &= (offsets != 0) | (sizes != 0)  # both 0 (never written) are no damage
    bad = np.ascontiguousarray(outside.reshape(rows, columns))
    if not bad.any():
        return np.zeros(len(l0_x), np.bool_)
    counts = cv2.integral(bad.view(np.uint8))

    def cells(
        l0_starts: NDArray[np.int64], l0_side: int, tag: Tag, most: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First compressed tile that each tile meets, and one past the last."""
        px = page.number(tag, 1)
        first = np.array([l_from_l0(float(x), level.downsample) // px for x in l0_starts], np.int64)
        past = np.array([(l_from_l0(float(x + l0_side), level.downsample) - 1) // px + 1 for x in l0_starts], np.int64)
        return first.clip(0, most), past.clip(0, most)

    left, right = cells(l0_x, l0_size[0], Tag.TILE_WIDTH, bad.shape[1])
    top, bottom = cells(l0_y, l0_size[1], Tag.TILE_HEIGHT, bad.shape[0])
    met: NDArray[np.bool_] = counts[bottom, right] - counts[top, right] - counts[bottom, left] + counts[top, left] > 0
    return met


SLIDE_SECONDS = 900.0
"""As long may one slide take: ten times what 100,000 x 100,000 px of a single level take on one core."""

SLIDE_BYTES, THREAD_BYTES = 4 << 30, 256 << 20
"""Private memory that one slide may take, and each thread that reads it: four times what an overview needs."""


@dataclass(frozen=True, eq=False)
class SlideTiles:
    """The kept tiles of one slide.

    Attributes:
        l0_x, l0_y: int64 (n,), top left in level-0 px, row by row.
        tissue: float32 (n,), the part of each that is tissue.
        size: width and height of each in px.
        unreadable_share: the part of the slide that is damaged; tiles there are left out.
        damaged: tiles of tissue left out because the level they are read from is damaged there, and the first fault.
    """

    source: IndexedSlide
    l0_x: NDArray[np.int64]
    l0_y: NDArray[np.int64]
    tissue: NDArray[np.float32]
    size: tuple[int, int]
    seconds: float
    unreadable_share: float = 0.0
    damaged: tuple[int, str] = (0, "")


@dataclass(frozen=True, eq=False)
class SlideResult:
    """Outcome of a slide, and its overlay picture (PNG) if it came that far."""

    found: SlideTiles | SlideFault
    overlay_png: bytes | None


def file_bytes(path: Path) -> int:
    """Size of a slide's file; 0 for a folder, or when it cannot be had."""
    try:
        return 0 if path.is_dir() else path.stat().st_size
    except OSError:
        return 0


@dataclass
class _Progress:
    """Progress of a slide: the step under way, and its overlay picture."""

    step: str = "open"
    overlay_png: bytes | None = None


def slide_limits(threads: int) -> Limits:
    """Return what one slide may take that ``threads`` threads read."""
    return Limits(SLIDE_SECONDS, SLIDE_BYTES + threads * THREAD_BYTES)


def index_slide(spec: SlideSpec, settings: IndexSettings, threads: int) -> SlideResult:
    """Find the tiles of one slide. Returns every fault of the slide instead of raising it."""
    size = file_bytes(spec.path)
    progress = _Progress()
    try:
        return SlideResult(find_tiles(spec, settings, threads, progress), progress.overlay_png)
    except Exception as fault:  # slide libraries raise anything; the other slides continue
        error = error_text(fault)
        if isinstance(fault, MemoryError) or "Insufficient memory" in error:  # the latter is OpenCV's
            error = f"it needs more memory than a slide may take, {slide_limits(threads)}: {error}"
        return SlideResult(
            SlideFault(spec.slide_id, size, spec.mpp, progress.step, error, spec.scene), progress.overlay_png
        )


def error_text(fault: Exception) -> str:
    """Return the message of an error that is expected of slides; of others with the name of its class."""
    expected = isinstance(fault, SlideError | ValueError | OSError) and str(fault)
    return str(fault) if expected else f"{type(fault).__name__}: {fault}"


def find_tiles(spec: SlideSpec, settings: IndexSettings, threads: int, progress: _Progress | None = None) -> SlideTiles:
    """Return the tiles of one slide; tells ``progress`` how far it has come.

    Raises:
        SlideError: the slide cannot be used, or none of its tiles.
        ValueError: the settings do not fit it.
    """
    progress = progress or _Progress()
    started_s = time.perf_counter()
    cv2.setNumThreads(threads)
    with spec.open() as slide:
        state = SlideState.of(spec.path)  # before anything is read: what changes meanwhile is another slide
        progress.step = "tiles"
        if settings.whole_pictures:
            return _whole_picture(spec, slide, state, settings.side, started_s)
        grid: TileGrid | None = None
        if settings.tile != "slide":
            stride = settings.stride or settings.tile
            grid = tile_grid(slide.levels, slide.bounds, settings.tile, settings.mpp, stride)
        progress.step = "tissue"
        overview = read_overview(slide, settings.tissue_mpp, threads)
        tissue = find_tissue(overview)
        progress.step = "tiles"
        if grid is None:
            grid = _whole(slide, tissue, settings)
        fractions = tissue_fractions(tissue, grid)
        damage = replace(tissue, mask=overview.unreadable)
        intact = tissue_fractions(damage, grid) == 0
        least = settings.min_tissue
        enough = fractions >= least if settings.tile != "slide" or not least else fractions > 0
        rows, columns = np.nonzero(enough & intact)
        l0_x, l0_y, kept = grid.l0_x[columns], grid.l0_y[rows], fractions[rows, columns]
        progress.step = "overlay"
        width, height = grid.size
        cut = (
            f"its tissue as one tile of {width} x {height} px at {settings.mpp:g} um/px"
            if settings.tile == "slide"
            else f"{len(kept)} of {fractions.size} tiles of {settings.tile} px at {settings.mpp:g} um/px with "
            f"{least:.0%} tissue or more"
        )
        caption = f"{spec.slide_id}: {cut}; {tissue.share:.0%} of the slide is tissue"
        thumbnail = read_thumbnail(slide, overview, threads)
        progress.overlay_png = draw_overlay(thumbnail, tissue, l0_x, l0_y, kept, grid.l0_size, caption)
        progress.step = "tiles"
        if not len(kept):
            most = float(fractions.max())
            raise SlideError(_why_none(tissue, damage.share if (enough & ~intact).any() else 0.0, most, settings))
        bad, fault = find_unreadable_tiles(slide, grid, rows, columns, settings.mpp, spec.scene)
        l0_x, l0_y, kept = l0_x[~bad], l0_y[~bad], kept[~bad]
        source = replace(_source(spec, slide, state), tissue_share=tissue.share)
    seconds = time.perf_counter() - started_s
    return SlideTiles(source, l0_x, l0_y, kept, grid.size, seconds, damage.share, (int(bad.sum()), fault))


def _source(spec: SlideSpec, slide: Slide, state: SlideState) -> IndexedSlide:
    level = slide.levels[0]
    return IndexedSlide(
        *(spec.slide_id, state.file_bytes, spec.mpp, slide.mpp, level.width, level.height, slide.backend),
        state.modified_ns,
        state.digest,
        scene=spec.scene,
    )


def _whole_picture(spec: SlideSpec, slide: Slide, state: SlideState, side: int, started_s: float) -> SlideTiles:
    """One tile, which the picture is resized to when it is read."""
    if spec.path.suffix.lower() not in PICTURE_SUFFIXES:
        raise SlideError(
            f"{spec.path}: --pictures resize takes {', '.join(sorted(PICTURE_SUFFIXES))} files; this is a slide "
            f"(read by {slide.backend}): leave out --pictures to cut it into tiles"
        )
    slide.read(Region(0, 0, 1, 1, slide.mpp))  # decodes all of it
    origin, all_of_it = np.zeros(1, np.int64), np.ones(1, np.float32)
    seconds = time.perf_counter() - started_s
    return SlideTiles(_source(spec, slide, state), origin, origin, all_of_it, (side, side), seconds)


def _whole(slide: Slide, tissue: TissueMask, settings: IndexSettings) -> TileGrid:
    """One tile, around all tissue."""
    box = tissue_box(slide.levels, tissue, settings.mpp, settings.stride or WHOLE_SLIDE_MULTIPLE)
    sides = box.width, box.height
    l0_width, l0_height = (l0_from_l(side, l0_step(slide.levels, side, box.mpp)) for side in sides)
    return TileGrid(np.array([box.l0_x]), np.array([box.l0_y]), (l0_width, l0_height), sides)


def default_threads(workers: int) -> int:
    """Threads of each of ``workers`` processes that share this machine."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


def _why_none(tissue: TissueMask, damaged: float, most: float, settings: IndexSettings) -> str:
    """Return why no tile is left; ``damaged``: the part of the slide that is, where it touches all that have tissue."""
    if damaged and (settings.tile != "slide" or tissue.mask.any()):
        touched = "every tile of tissue touches it" if settings.tile != "slide" else "its tissue is not whole"
        return f"no tile is left: {damaged:.1%} of the slide is damaged and {touched}"
    if not tissue.mask.any():
        return (
            f"no tissue found: {tissue.found}. If its picture in tissue/ shows tissue all the same, --min-tissue 0 "
            "keeps every tile; a blank slide can stay where it is: it is left out"
        )
    return (
        f"no tile has {settings.min_tissue:.2%} tissue: the fullest has {most:.2%}, the slide {tissue.share:.2%} "
        f"({tissue.found}); --min-tissue {math.floor(most * 1e4) / 1e4:g} keeps that tile, as may a smaller --tile"
    )
