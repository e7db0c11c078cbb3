"""One slide predicted: windows read ahead, asked of the model, blended, and written as they are finished.

Takes a slide, a trained model and a folder; leaves there heat maps, an overlay picture, GeoJSON and a table of tiles,
and returns the slide's row. Memory holds the rows of one window, and a map of the whole slide that is reduced until it
is small enough for areas to be drawn around.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.launch.place import rank_cores
from app.pages.pictures import as_png, tinted
from app.prediction.blending import Blender, Floats, chunks, gaussian_window
from app.prediction.computation import rank_faults
from app.prediction.prediction_folder import PredictionFolder, file_names
from app.prediction.slide_files import SlidePrediction, bag_scores, slide_row, write_areas, write_tiles
from app.prediction.trained_model import TrainedModel
from app.training.metrics import slide_scores
from app.training.run_slides import opening
from pipelines.backends.tiff_writer import PyramidWriter
from pipelines.catalog.catalog import SlideSpec
from pipelines.slides.geometry import Size
from pipelines.slides.slide import Pixels, Slide, SlideError, TileReadError
from pipelines.stream.device import allocate_pinned
from pipelines.tiles.overlay import caption_strip
from pipelines.tiles.stain import StainFit
from pipelines.tiles.windows import SlideWindows, WindowSettings, windows_of

AREA_VALUES = 1 << 26
"""Most values (px times classes) of the map that areas are drawn around; a larger one is halved until it has fewer."""
CHUNK_ROWS = 256
"""Rows that are finished together, a power of 2: also the most that the map of areas is reduced by."""
_Begun = tuple[range, list[str], Callable[[], NDArray[np.float32]] | None]
"""Numbers of the windows of a batch; why each cannot be read, or ""; a wait for the probabilities that are had here."""
MOST_UNREADABLE = 0.5
"""A slide of whose windows more cannot be read is given up."""


def predict_slide(
    spec: SlideSpec, model: TrainedModel, settings: WindowSettings, batch: int, folder: PredictionFolder
) -> dict[str, Any] | None:
    """Predict one slide; return its row of ``slides.csv``, on the rank of its group that has the model's outputs.

    Raises:
        SlideError: the slide cannot be used; on every rank of the group.
        RunError: one of several ranks of the group has failed.
        OSError: the folder cannot be written.
    """
    with ExitStack() as opened:
        with model.computation.fail_together():
            windows = windows_of(spec, settings)
            slide = opened.enter_context(spec.open())
        pool = ThreadPoolExecutor(rank_cores())
        opened.callback(pool.shutdown, cancel_futures=True)  # before the slide closes, which its threads read
        tiles = _tiles(slide, windows, pool, batch + rank_cores())
        answers = _answers(tiles, windows, model, batch)
        with rank_faults(spec.slide_id, model.computation):
            if not model.computation.writes:
                deque(answers, 0)
                return None
            scored = _scored(answers, windows, model, folder, spec.slide_id)
    readable = ~np.isnan(scored.scores[:, 0])
    unread = int(np.count_nonzero(~readable)) + windows.damaged[0]
    if unread:
        what = f"{unread} windows with tissue cannot be read and are left out: {windows.damaged[1] or scored.fault}"
        folder.failed.add(spec.slide_id, "windows", what)
    if isinstance(windows.stain, str):
        folder.failed.add(spec.slide_id, "stain", f"its colours are left as they are: {windows.stain}")
    areas = write_areas(model, windows, scored, folder, spec.slide_id)
    l0_side = round(windows.cells * windows.l0_cell)
    places = ((region.l0_x, region.l0_y, l0_side, l0_side) for region in map(windows.region, range(len(windows))))
    outputs = windows.tissue, scored.scores, scored.certainty, scored.attention
    write_tiles(folder.file("tiles", spec.slide_id), model.classes, places, *outputs)
    caption = f"{spec.slide_id}: {', '.join(model.shown.values())} at {windows.canvas_mpp:.3g} um/px"
    height, width = scored.areas_map.shape[1:]
    bounds, l0_px, thumbnail = windows.bounds, windows.l0_cell * scored.factor, windows.thumbnail.pixels
    covered = (
        max(thumbnail.shape[1], round(thumbnail.shape[1] * width * l0_px / bounds.width)),
        max(thumbnail.shape[0], round(thumbnail.shape[0] * height * l0_px / bounds.height)),
    )
    picture = tinted(thumbnail, scored.areas_map[list(model.shown)], covered)
    picture = np.concatenate([picture, caption_strip(picture.shape[1], caption, windows.thumbnail.mpp)])
    folder.file("overlays", spec.slide_id).write_bytes(as_png(picture))
    how = model.config.score
    of_readable = scored.scores[readable], np.zeros(int(readable.sum()), np.int64)
    if scored.attention is None:
        _, (of_slide,) = slide_scores(*of_readable, how.slide_score, how.top_k, model.positive)
    else:
        of_slide = bag_scores(of_readable[0], scored.attention[readable])
    row = slide_row(model, spec.slide_id, windows.state, int(readable.sum()), unread, of_slide)
    row |= {f"area_um2_{name}": areas[name] for name in model.shown.values()}
    canvas = {
        "path": str(spec.path),
        "mpp": windows.slide_mpp,
        "l0_size": list(windows.l0_size),
        "l0_bounds": [bounds.l0_x, bounds.l0_y, bounds.width, bounds.height],
        "l0_px": l0_px,
        "width": width,
        "height": height,
    }
    folder.finish(row, windows.state, canvas, opening(spec))
    return row


def _scored(
    answers: Iterator[tuple[int, Floats | str]],
    windows: SlideWindows,
    model: TrainedModel,
    folder: PredictionFolder,
    slide_id: str,
) -> SlidePrediction:
    """Take the answers for all windows and write the heat maps."""
    classes, cells = len(model.classes), windows.cells
    weights = gaussian_window(cells) if model.task == "segment" else np.ones((cells, cells), np.float32)
    scores, certainty = np.full((len(windows), classes), np.nan), np.full(len(windows), np.nan)
    attention = np.full(len(windows), np.nan) if model.in_bags else None
    faults: list[str] = []

    def probabilities() -> Iterator[tuple[int, Floats]]:
        for i, values in answers:
            if isinstance(values, str):
                faults.append(values)
                continue
            if attention is not None:
                attention[i] = values[-1]
            values = values[:classes].reshape(classes, *(values.shape[1:] or (1, 1)))
            scores[i] = values.mean((1, 2), dtype=np.float64)
            certainty[i] = values.max(0).mean(dtype=np.float64)
            yield i, values

    factor = 1
    while classes * -(-windows.width // factor) * -(-windows.height // factor) > AREA_VALUES and factor < CHUNK_ROWS:
        factor *= 2
    parts = file_names(list(model.shown.values()))
    maps = {
        c: (folder.heat_map(slide_id, parts[name]), f"probability of {name!r} by {model.name}, 255 is 1")
        for c, name in model.shown.items()
    }
    blended = _blended(probabilities(), classes, windows, weights, maps, folder)
    reduced = [_reduced(chunk, factor) for chunk in blended]
    if attention is not None:
        attention = np.exp(attention - np.nanmax(attention))
        attention /= np.nanmean(attention)  # weights: 1 on average
        _write_attention(attention, windows, folder, slide_id)
    fault = faults[0] if faults else ""
    return SlidePrediction(scores, certainty, np.concatenate(reduced, axis=1), factor, fault, attention)


def _blended(
    values: Iterator[tuple[int, Floats]],
    count: int,
    windows: SlideWindows,
    weights: Floats,
    maps: Mapping[int, tuple[Path, str]],
    folder: PredictionFolder,
) -> Iterator[NDArray[np.uint8]]:
    """Yield the ``count`` blended maps, uint8 (count, CHUNK_ROWS, width); write those of ``maps``: path and caption."""
    size = Size(windows.width, windows.height)
    with ExitStack() as opened:
        blender = opened.enter_context(closing(Blender(count, size.width, size.height, weights, folder.path)))
        writers = {
            number: opened.enter_context(PyramidWriter(path, size, windows.canvas_mpp, what))
            for number, (path, what) in maps.items()
        }

        def finished() -> Iterator[Floats]:
            row = 0
            for i, of_window in values:
                if windows.y[i] > row:
                    row = int(windows.y[i])
                    yield from blender.rows_above(row)
                blender.add(int(windows.x[i]), row, of_window)
            yield from blender.rows_above(windows.height)

        for chunk in chunks((np.rint(rows * 255).astype(np.uint8) for rows in finished()), CHUNK_ROWS):
            for number, writer in writers.items():
                writer.add(chunk[number])
            yield chunk


def _write_attention(
    attention: NDArray[np.float64], windows: SlideWindows, folder: PredictionFolder, slide_id: str
) -> None:
    """Write the map of the attention weights, relative to the largest."""
    largest = np.nanmax(attention)
    what = f"attention weights, 255 is {largest:.3g} times the average"
    readable = np.flatnonzero(~np.isnan(attention))
    values = ((int(i), np.full((1, 1, 1), attention[i] / largest, np.float32)) for i in readable)
    maps = {0: (folder.heat_map(slide_id, "attention_weights"), what)}
    deque(_blended(values, 1, windows, np.ones((windows.cells, windows.cells), np.float32), maps, folder), 0)


def _answers(
    tiles: Iterator[Pixels | SlideError], windows: SlideWindows, model: TrainedModel, batch: int
) -> Iterator[tuple[int, Floats | str]]:
    """The model's probabilities of each window in order, or why it cannot be read; on ranks that do not have them, only
    the latter. While a GPU computes a batch, the one before it is given."""
    begun: _Begun | None = None
    for following in itertools.chain(_begun(tiles, windows, model, batch), [None]):
        if begun is not None:
            numbers, faults, wait = begun
            yield from ((i, fault) for i, fault in zip(numbers, faults, strict=True) if fault)
            if wait is not None:
                answered = zip(numbers, wait(), faults, strict=True)
                yield from ((i, value) for i, value, fault in answered if not fault)
        begun = following


def _begun(
    tiles: Iterator[Pixels | SlideError], windows: SlideWindows, model: TrainedModel, batch: int
) -> Iterator[_Begun]:
    """Begin to compute all windows in order, batch by batch."""
    computation, unread = model.computation, 0
    stain = windows.stain if isinstance(windows.stain, StainFit) else None
    blank = np.full((model.tile, model.tile, 3), 255, np.uint8)
    for first in range(0, len(windows), batch):
        numbers = range(first, min(first + batch, len(windows)))
        read = [next(tiles) for _ in numbers] if computation.reads else []
        own = [str(tile) if isinstance(tile, SlideError) else "" for tile in read]
        lost = [str(tile) for tile in read if isinstance(tile, SlideError) and not isinstance(tile, TileReadError)]
        faults: list[str]
        faults, lost = computation.broadcast((own, lost))
        if lost:  # the disk is, which says nothing about the slide: it is predicted at the next start
            raise SlideError(lost[0])
        for fault in filter(None, faults):
            unread += 1
            if unread > MOST_UNREADABLE * len(windows):
                raise SlideError(fault)
        images = None
        if read:
            shape = len(read), *blank.shape
            images = allocate_pinned(shape, np.uint8) if computation.device.type == "cuda" else None
            images = np.stack([blank if isinstance(tile, SlideError) else tile for tile in read], out=images)
        yield numbers, faults, model.begin(images, (len(numbers), 3, model.tile, model.tile), stain)


def _tiles(slide: Slide, windows: SlideWindows, pool: ThreadPoolExecutor, ahead: int) -> Iterator[Pixels | SlideError]:
    """Yield all windows in order, or why one cannot be read; prefetch ``ahead`` of them in ``pool``."""

    def read(i: int) -> Pixels | SlideError:
        try:
            return slide.read(windows.region(i))
        except SlideError as fault:
            return fault

    waiting: deque[Future[Pixels | SlideError]] = deque()
    for i in range(len(windows)):
        waiting.append(pool.submit(read, i))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _reduced(chunk: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    """Means of ``factor`` x ``factor`` cells, uint8 (classes, h, w); cells at the edge stand for what lies beyond."""
    if factor == 1:
        return chunk
    _, height, width = chunk.shape
    even = np.pad(chunk, ((0, 0), (0, -height % factor), (0, -width % factor)), "edge")
    blocks = even.reshape(len(chunk), even.shape[1] // factor, factor, even.shape[2] // factor, factor)
    means: NDArray[np.uint8] = np.rint(blocks.mean((2, 4), dtype=np.float32)).astype(np.uint8)
    return means
