"""One slide predicted as one image, by a model trained so: one score for each class, and nothing of where.

Takes a slide and a model of ``--tile slide``; leaves the picture of what was looked at and a table of one row, and
gives the slide's row. The rectangle is that of the index: around the tissue, its sides multiples of the run's
``--stride``.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from app.prediction.computation import rank_faults
from app.prediction.prediction_folder import PredictionFolder
from app.prediction.score_tables import TileRow, class_scores, write_tiles
from app.prediction.trained_model import TrainedModel
from app.training.run_slides import opening
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.processes import map_isolated
from pipelines.slides.geometry import Region, l0_from_t
from pipelines.slides.slide import SlideError
from pipelines.stream.read import centre
from pipelines.tiles.index_settings import IndexSettings
from pipelines.tiles.slide_index import SlideResult, SlideTiles, default_threads, find_tiles, index_slide, slide_limits
from pipelines.tiles.stain_fit import Method, StainFit
from pipelines.tiles.stain_fits import STEP, stain_of
from pipelines.tiles.tile_table import IndexedSlide


def predict_picture(
    spec: SlideSpec, model: TrainedModel, settings: IndexSettings, folder: PredictionFolder
) -> dict[str, Any] | None:
    """Predict one picture; return its row of ``slides.csv``, on the rank of its group that has the model's outputs.

    Raises:
        SlideError: it is no picture, or cannot be decoded; on every rank of the group.
        RunError: one of several ranks of the group has failed.
    """
    with model.computation.fail_together():
        threads = default_threads(1)
        source = find_tiles(spec, settings, threads).source
        stain = None
        if model.stain_target is not None:
            stain = stain_of(spec, model.stain_target.method, settings.tissue_mpp, threads)
        with spec.open() as slide:
            level = slide.levels[0]
            picture = slide.read(Region(0, 0, level.width, level.height, level.mpp))
        pixels = np.array(centre(picture, settings.side))  # torch wants memory that may be written to
    with rank_faults(spec.slide_id, model.computation):
        fit = stain if isinstance(stain, StainFit) else None
        values = model.probabilities(pixels[None], (1, 3, settings.side, settings.side), fit)
    if values is None:
        return None
    for path in (folder.overlay(spec.slide_id), folder.tiles(spec.slide_id), folder.record(spec.slide_id)):
        path.parent.mkdir(parents=True, exist_ok=True)  # its name is its path below --slides
    folder.overlay(spec.slide_id).write_bytes(cv2.imencode(".png", pixels[..., ::-1])[1].tobytes())
    return finish_image(folder, model, spec, source, values, (0, 0, source.width, source.height, 1.0), stain)


def predict_as_tile(
    spec: SlideSpec, model: TrainedModel, settings: IndexSettings, folder: PredictionFolder
) -> dict[str, Any] | None:
    """Predict one slide; return its row of ``slides.csv``, on the rank of its group that has the model's outputs.

    Raises:
        SlideError: the slide cannot be used; on every rank of the group.
        RunError: one of several ranks of the group has failed.
    """
    with ExitStack() as opened:
        pixels = None
        with model.computation.fail_together():
            tiles, picture = _rectangle(spec, settings)
            stain = None if model.stain_target is None else _stain(spec, model.stain_target.method, settings)
            region = Region(int(tiles.l0_x[0]), int(tiles.l0_y[0]), *tiles.size, settings.mpp)
            slide = opened.enter_context(spec.open())
            if model.computation.reads:
                pixels = slide.read(region)[None]
        with rank_faults(spec.slide_id, model.computation):
            fit = stain if isinstance(stain, StainFit) else None
            values = model.probabilities(pixels, (1, 3, region.height, region.width), fit)
        if values is None:
            return None
        folder.overlay(spec.slide_id).write_bytes(picture)
        l0_size = [l0_from_t(side, settings.mpp, slide.mpp) for side in tiles.size]
        place = region.l0_x, region.l0_y, l0_size[0], l0_size[1]
        return finish_image(folder, model, spec, tiles.source, values, (*place, float(tiles.tissue[0])), stain)


def finish_image(
    folder: PredictionFolder,
    model: TrainedModel,
    spec: SlideSpec,
    source: IndexedSlide,
    values: NDArray[np.float32],
    place: tuple[int, int, int, int, float],
    stain: StainFit | str | None,
) -> dict[str, Any]:
    """Write down the probabilities of a slide that was one image; return its row of ``slides.csv``.

    Args:
        values: (1, classes).
        place: l0_x, l0_y, l0_width, l0_height of the image, and the part of it that is tissue.
        stain: of the slide, or why it has none.
    """
    slide_id = source.slide_id
    if isinstance(stain, str):
        folder.failed.add(slide_id, STEP, f"its colours are left as they are: {stain}")
    (scores,) = values.astype(float)
    write_tiles(folder.tiles(slide_id), model.classes, [TileRow(*place, scores, float(scores.max()))])
    assert source.state is not None
    row = {
        "slide": slide_id,
        **model.origin(slide_id, source.state),
        "tiles": 1,
        "tiles_unreadable": 0,
        **class_scores(model.classes, scores),
    }
    canvas = {"mpp": source.mpp, "l0_size": [source.width, source.height]}
    folder.finish(row, source.state, canvas, opening(spec))
    return row


def _stain(spec: SlideSpec, method: Method, settings: IndexSettings) -> StainFit | str:
    """Return the stain of the slide, or why it cannot be measured."""
    threads = default_threads(1)
    task = functools.partial(stain_of, method=method, tissue_mpp=settings.tissue_mpp, threads=threads)
    ((_, result),) = map_isolated(task, [spec], 1, slide_limits(threads))
    return result if isinstance(result, StainFit) else str(result)


def _rectangle(spec: SlideSpec, settings: IndexSettings) -> tuple[SlideTiles, bytes]:
    """The tile of a slide, and the picture of it."""
    threads = default_threads(1)
    task = functools.partial(index_slide, settings=settings, threads=threads)
    ((_, result),) = map_isolated(task, [spec], 1, slide_limits(threads))
    if not isinstance(result, SlideResult):
        raise SlideError(f"{spec.path}: {result}")
    if not isinstance(result.found, SlideTiles):
        raise SlideError(f"{result.found.step}: {result.found.error}")
    if not len(result.found.l0_x):
        raise SlideError(f"{spec.path}: its tissue cannot be read: {result.found.damaged[1]}")
    return result.found, result.overlay_png or b""
