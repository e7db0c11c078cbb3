"""Pictures of the tiles that a model is least and most certain of.

Takes a folder of predictions and the folder of its slides; gives PNGs by caption. A tile whose slide cannot be opened
any more is passed over.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np

from app.prediction.prediction_folder import PredictionFolder
from pipelines.catalog.catalog import find_slides
from pipelines.catalog.csv_cells import read_rows
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError
from pipelines.stream.picture_crop import centre

SHOWN, PICTURE_PX = 6, 192
"""Tiles of each kind, and the side of their pictures."""


def certain_tiles(folder: PredictionFolder, slides: Path, made_with: dict[str, Any]) -> dict[str, bytes]:
    """Return ``SHOWN`` tiles of the least and of the most certainty, and the class that covers most of each; none of a
    model that looks at slides as one image."""
    if made_with["tile"] == "slide":
        return {}
    classes = made_with["classes"]
    tiles = []
    for row in folder.rows():
        with folder.tiles(row["slide"]).open(newline="", encoding="utf-8") as file:
            for tile in read_rows(file):
                scores = [float(tile[f"score_{name}"]) for name in classes if tile[f"score_{name}"]]
                if scores:
                    place = row["slide"], int(tile["l0_x"]), int(tile["l0_y"])
                    tiles.append((float(tile["certainty"]), *place, classes[int(np.argmax(scores))]))
    tiles.sort()
    whole = bool(made_with.get("whole_pictures"))
    listed = find_slides(
        slides,
        mpp=made_with["slide_mpp"],
        picture_mpp=made_with["mpp"],
        whole_pictures=whole,
        scene=made_with.get("scene"),
    )
    specs = {spec.slide_id: spec for spec in listed}
    pictures = {}
    for certainty, slide_id, l0_x, l0_y, name in dict.fromkeys([*tiles[:SHOWN], *tiles[: -SHOWN - 1 : -1]]):
        try:
            with specs[slide_id].open() as slide:
                if whole:
                    level = slide.levels[0]
                    pixels = centre(slide.read(Region(0, 0, level.width, level.height, level.mpp)), made_with["tile"])
                else:
                    pixels = slide.read(Region(l0_x, l0_y, made_with["tile"], made_with["tile"], made_with["mpp"]))
        except (KeyError, SlideError):
            continue
        small = cv2.resize(pixels, (PICTURE_PX, PICTURE_PX), interpolation=cv2.INTER_AREA)
        caption = f"{name} {certainty:.3f}, {slide_id} at {l0_x}, {l0_y}"
        pictures[caption] = cv2.imencode(".png", small[..., ::-1])[1].tobytes()
    return pictures
