"""The windows of one slide that a trained model looks at: a grid with overlap, as far as there is tissue.

Takes a ``SlideSpec`` and ``WindowSettings``; gives ``SlideWindows``. Runs in a process of its own (``processes``), as
a damaged slide may end the process that reads it. Windows lie on a canvas of cells: px at the asked mpp for a model
that scores pixels, larger squares for one that scores tiles. The last row and column of windows is shifted inwards
(Isensee et al., Nature Methods 18, 2021).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.handles import SlideState
from pipelines.catalog.processes import map_isolated
from pipelines.slides.geometry import Bounds, Region, l0_from_l, l0_step
from pipelines.slides.slide import Slide, SlideError
from pipelines.tiles.overlay import read_thumbnail
from pipelines.tiles.slide_index import default_threads, error_text, find_unreadable_tiles, slide_limits
from pipelines.tiles.stain import Method, NoStainFit, StainFit, fit_slide
from pipelines.tiles.tiling import MOST_TILES, TileGrid, tissue_fractions
from pipelines.tiles.tissue import Overview, find_tissue, read_overview


@dataclass(frozen=True)
class WindowSettings:
    """Which windows are looked at.

    Attributes:
        side: of a window in px at ``mpp``; a multiple of ``cell``.
        cell: px at ``mpp`` of the side of a cell of the canvas.
        stride: from window to window, in cells.
        least_tissue: part of a window that is tissue at least, 0 to 1; 0 keeps every window.
        tissue_mpp: resolution at which tissue is looked for.
        stain: how the stains of a slide are measured; None: they are not.
    """

    side: int
    mpp: float
    cell: int
    stride: int
    least_tissue: float
    tissue_mpp: float
    stain: Method | None = None


@dataclass(frozen=True, eq=False)
class SlideWindows:
    """The windows of one slide and the canvas that they are put on.

    Attributes:
        x, y: int64 (n,), top left of each window in cells, row by row.
        tissue: float32 (n,), the part of each that is tissue.
        width, height: of the canvas in cells: all that is scanned of the slide.
        l0_cell: level-0 px of a cell's side.
        l0_size: width and height of level 0.
        bounds: where the canvas lies; its last cells may reach beyond.
        slide_mpp: um/px of level 0.
        thumbnail: the slide, small.
        state: what the file was.
        damaged: windows of tissue left out because the file is damaged there, and the first fault.
        stain: of the slide, or why it has none; None: it was not asked for.
    """

    settings: WindowSettings
    x: NDArray[np.int64]
    y: NDArray[np.int64]
    tissue: NDArray[np.float32]
    width: int
    height: int
    l0_cell: float
    l0_size: tuple[int, int]
    bounds: Bounds
    slide_mpp: float
    thumbnail: Overview
    state: SlideState
    damaged: tuple[int, str]
    stain: StainFit | str | None = None

    def __len__(self) -> int:
        return len(self.x)

    @property
    def cells(self) -> int:
        """Side of a window in cells."""
        return self.settings.side // self.settings.cell

    @property
    def canvas_mpp(self) -> float:
        """um of a cell's side."""
        return self.slide_mpp * self.l0_cell

    def region(self, i: int) -> Region:
        """Return what to read for window ``i``."""
        l0_x = self.bounds.l0_x + l0_from_l(float(self.x[i]), self.l0_cell)
        l0_y = self.bounds.l0_y + l0_from_l(float(self.y[i]), self.l0_cell)
        return Region(l0_x, l0_y, self.settings.side, self.settings.side, self.settings.mpp)


def windows_of(spec: SlideSpec, settings: WindowSettings) -> SlideWindows:
    """Return the windows of one slide, found in a process of its own.

    Raises:
        SlideError: the slide cannot be used, has no tissue, or ended the process.
    """
    threads = default_threads(1)
    task = functools.partial(_windows_or_fault, settings=settings, threads=threads)
    ((_, found),) = map_isolated(task, [spec], 1, slide_limits(threads))
    if isinstance(found, SlideWindows):
        return found
    raise SlideError(f"windows: {found}" if isinstance(found, str) else f"{spec.path}: {found}")


def _windows_or_fault(spec: SlideSpec, settings: WindowSettings, threads: int) -> SlideWindows | str:
    try:
        return find_windows(spec, settings, threads)
    except Exception as fault:  # slide libraries raise anything; the other slides continue
        return error_text(fault)


def find_windows(spec: SlideSpec, settings: WindowSettings, threads: int) -> SlideWindows:
    """Return the windows of one slide, in this process.

    Raises:
        SlideError: the slide cannot be used, or has no tissue.
        ValueError: no level is fine enough.
    """
    cv2.setNumThreads(threads)
    with spec.open() as slide:
        state = SlideState.of(spec.path)
        l0_cell = l0_step(slide.levels, settings.side, settings.mpp) * settings.cell
        width, height = (_cells(side, l0_cell) for side in (slide.bounds.width, slide.bounds.height))
        cells = settings.side // settings.cell
        if -(-width // settings.stride) * -(-height // settings.stride) > MOST_TILES:
            raise SlideError(
                f"{spec.path}: a slide has at most {MOST_TILES:,} windows; every {settings.stride * settings.cell} px "
                f"there would be more on {width} x {height} cells; is its size true? ask for less --overlap"
            )
        columns, rows = _origins(width, cells, settings.stride), _origins(height, cells, settings.stride)
        overview = read_overview(slide, settings.tissue_mpp, threads)
        tissue = find_tissue(overview)
        l0_side = round(settings.side / settings.cell * l0_cell)
        grid = TileGrid(
            slide.bounds.l0_x + np.array([l0_from_l(float(x), l0_cell) for x in columns], np.int64),
            slide.bounds.l0_y + np.array([l0_from_l(float(y), l0_cell) for y in rows], np.int64),
            (l0_side, l0_side),
            (settings.side, settings.side),
        )
        fractions = tissue_fractions(tissue, grid)
        row, column = np.nonzero(fractions >= settings.least_tissue)
        if not len(row):
            least, decides = "any", ""  # of a segmenter
            if settings.least_tissue >= 1e-4:
                least = f"{settings.least_tissue:.2%}"
                decides = ". --min-tissue of the run that made the checkpoint decides which windows count"
            raise SlideError(
                f"{spec.path}: no window has {least} tissue ({tissue.share:.2%} of the slide is tissue; "
                f"{tissue.found}): a blank slide, or one whose tissue was not found{decides}"
            )
        bad, fault = find_unreadable_tiles(slide, grid, row, column, settings.mpp, spec.scene)
        row, column = row[~bad], column[~bad]
        thumbnail = read_thumbnail(slide, overview, threads)
        return SlideWindows(
            settings,
            columns[column],
            rows[row],
            fractions[row, column],
            width,
            height,
            l0_cell,
            (slide.levels[0].width, slide.levels[0].height),
            slide.bounds,
            slide.mpp,
            thumbnail,
            state,
            (int(bad.sum()), fault),
            None if settings.stain is None else _stain(slide, overview, settings.stain),
        )


def _stain(slide: Slide, overview: Overview, method: Method) -> StainFit | str:
    """Stain of the slide, or why it cannot be measured."""
    try:
        return fit_slide(slide, overview, method)
    except NoStainFit as fault:
        return str(fault)


def _cells(l0_side: int, l0_cell: float) -> int:
    """Fewest cells that cover ``l0_side``; what is less than a hundredth of a cell is a rounded resolution."""
    return max(1, int(np.ceil(l0_side / l0_cell - 0.01)))


def _origins(length: int, cells: int, stride: int) -> NDArray[np.int64]:
    """First cell of each window along an axis of ``length`` cells; a single one where the axis is shorter."""
    last = max(0, length - cells)
    return np.array([*range(0, last, stride), last], np.int64)
