"""One slide's share of the tile index: opened, searched for tissue, cut into tiles, drawn.

Takes a ``SlideSpec`` and the settings; gives ``SlideTiles``, or a ``SlideFault`` that says at which step it failed and
why. Runs in a process of its own (``processes``) and writes nothing: what it found is sent back.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.catalog.catalog import PICTURE_SUFFIXES, SlideSpec
from pipelines.catalog.level_check import damaged_tiles
from pipelines.catalog.processes import Limits
from pipelines.catalog.slide_state import SlideState
from pipelines.slides.geometry import Region, l0_from_t
from pipelines.slides.slide import Slide, SlideError
from pipelines.tiles.index_settings import WHOLE_SLIDE_MULTIPLE, IndexSettings
from pipelines.tiles.overlay import draw_overlay, read_thumbnail
from pipelines.tiles.tile_table import IndexedSlide, SlideFault
from pipelines.tiles.tiling import TileGrid, tile_grid, tissue_box, tissue_fractions
from pipelines.tiles.tissue import TissueMask, find_tissue, read_overview

SLIDE_SECONDS = 900.0
"""As long may one slide take: ten times what 100,000 x 100,000 px of a single level take on one core."""

SLIDE_BYTES, THREAD_BYTES = 4 << 30, 256 << 20
"""Private memory that one slide may take, and each thread that reads it: four times what an overview needs."""


@dataclass(frozen=True, eq=False)
class SlideTiles:
    """The kept tiles of one slide.

    Attributes:
        source: the slide.
        l0_x, l0_y: int64 (n,), top left in level-0 px, row by row.
        tissue: float32 (n,), the part of each that is tissue.
        size: width and height of each in px.
        tissue_share: the part of the slide that is tissue.
        seconds: that it took.
        unreadable_share: the part of the slide that is damaged; tiles there are left out.
        damaged: tiles of tissue left out because the level they are read from is damaged there, and the first fault.
    """

    source: IndexedSlide
    l0_x: NDArray[np.int64]
    l0_y: NDArray[np.int64]
    tissue: NDArray[np.float32]
    size: tuple[int, int]
    tissue_share: float
    seconds: float
    unreadable_share: float
    damaged: tuple[int, str] = (0, "")


@dataclass(frozen=True, eq=False)
class SlideResult:
    """What became of a slide, and its overlay picture (PNG) if it came that far."""

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
    """How far a slide has come: the step under way, and its overlay picture."""

    step: str = "open"
    overlay_png: bytes | None = None


def slide_limits(threads: int) -> Limits:
    """Return what one slide may take that ``threads`` threads read."""
    return Limits(SLIDE_SECONDS, SLIDE_BYTES + threads * THREAD_BYTES)


def index_slide(spec: SlideSpec, settings: IndexSettings, threads: int) -> SlideResult:
    """Find the tiles of one slide. Returns every fault of the slide instead of raising it.

    Args:
        spec: the slide.
        settings: which tiles to cut.
        threads: that read the overview.
    """
    size = file_bytes(spec.path)
    progress = _Progress()
    try:
        return SlideResult(find_tiles(spec, settings, threads, progress), progress.overlay_png)
    except Exception as fault:  # slide libraries raise anything; the other slides go on
        expected = isinstance(fault, SlideError | ValueError | OSError) and str(fault)
        error = str(fault) if expected else f"{type(fault).__name__}: {fault}"
        if isinstance(fault, MemoryError) or "Insufficient memory" in error:  # the latter is OpenCV's
            error = f"it needs more memory than a slide may take, {slide_limits(threads)}: {error}"
        return SlideResult(
            SlideFault(spec.slide_id, size, spec.mpp, progress.step, error, spec.scene), progress.overlay_png
        )


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
        grid = None if settings.tile == "slide" else _grid(slide, settings.tile, settings)
        progress.step = "tissue"
        overview = read_overview(slide, settings.tissue_mpp, threads)
        tissue = find_tissue(overview)
        progress.step = "tiles"
        if grid is None:
            grid = _whole(slide, tissue, settings)
        fractions = tissue_fractions(tissue, grid)
        damage = TissueMask(overview.unreadable, tissue.l0_x, tissue.l0_y, tissue.downsample, tissue.mpp)
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
            raise SlideError(_why_none(tissue, damage, float(fractions.max()), settings))
        bad, fault = damaged_tiles(slide, l0_x, l0_y, grid.size, settings.mpp, grid.l0_size, spec.scene)
        l0_x, l0_y, kept = l0_x[~bad], l0_y[~bad], kept[~bad]
        source = replace(_source(spec, slide, state), tissue_share=tissue.share)
    seconds = time.perf_counter() - started_s
    return SlideTiles(source, l0_x, l0_y, kept, grid.size, tissue.share, seconds, damage.share, (int(bad.sum()), fault))


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
    return SlideTiles(_source(spec, slide, state), origin, origin, all_of_it, (side, side), 1.0, seconds, 0.0)


def _grid(slide: Slide, tile: int, settings: IndexSettings) -> TileGrid:
    """Tiles of ``tile`` px everywhere."""
    return tile_grid(slide.levels, slide.bounds, tile, settings.mpp, settings.stride or tile)


def _whole(slide: Slide, tissue: TissueMask, settings: IndexSettings) -> TileGrid:
    """One tile, around all tissue."""
    box = tissue_box(slide.levels, tissue, settings.mpp, settings.stride or WHOLE_SLIDE_MULTIPLE)
    l0_size = tuple(l0_from_t(side, box.mpp, slide.mpp) for side in (box.width, box.height))
    return TileGrid(np.array([box.l0_x]), np.array([box.l0_y]), (l0_size[0], l0_size[1]), (box.width, box.height))


def default_threads(workers: int) -> int:
    """Threads of each of ``workers`` processes that share this machine."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


def _why_none(tissue: TissueMask, damage: TissueMask, most: float, settings: IndexSettings) -> str:
    if damage.mask.any() and (settings.tile != "slide" or tissue.mask.any()):
        touched = "every tile of tissue touches it" if settings.tile != "slide" else "its tissue is not whole"
        return f"no tile is left: {damage.share:.1%} of the slide is damaged and {touched}"
    if not tissue.mask.any():
        return (
            f"no tissue found: {tissue.found}. If its picture in tissue/ shows tissue all the same, --min-tissue 0 "
            "keeps every tile; a blank slide can stay where it is: it is left out"
        )
    return (
        f"no tile has {settings.min_tissue:.0%} tissue: the fullest has {most:.2%}, the slide {tissue.share:.2%} "
        f"({tissue.found}); --min-tissue {math.floor(most * 1e4) / 1e4:g} keeps that tile, as may a smaller --tile"
    )
