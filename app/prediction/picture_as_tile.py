"""One picture predicted as one image, by a model of ``--pictures resize``: one score for each class.

Takes a PNG or JPEG of any size and such a model; leaves the part that was looked at, which is the middle as in
validation, and a table of one row, and gives the picture's row.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np

from app.prediction.computation import rank_faults
from app.prediction.prediction_folder import PredictionFolder
from app.prediction.slide_as_tile import finish_image
from app.prediction.trained_model import TrainedModel
from pipelines.catalog.catalog import SlideSpec
from pipelines.slides.geometry import Region
from pipelines.stream.read import centre
from pipelines.tiles.index_settings import IndexSettings
from pipelines.tiles.slide_index import default_threads, find_tiles
from pipelines.tiles.stain_fit import StainFit
from pipelines.tiles.stain_fits import stain_of


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
