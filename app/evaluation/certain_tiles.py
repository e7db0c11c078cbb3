"""Pictures of the tiles that a model is least and most certain of.

Takes a folder of predictions and the folder of its slides; returns PNGs by caption. A tile whose slide cannot be opened
any more is passed over.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from app.prediction.prediction_folder import PredictionFolder
from pipelines.catalog.catalog import find_slides
from pipelines.catalog.table import read_rows
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError
from pipelines.stream.read import centre

SHOWN, PICTURE_PX = 6, 192
"""Tiles of each kind, and the side of their pictures."""


Tile = tuple[float, str, int, int, str]
"""Certainty, slide, l0_x, l0_y, and the class that covers most."""


def extreme_tiles(of_slides: Iterable[list[Tile]]) -> list[Tile]:
    """Return the ``SHOWN`` tiles of the least and of the most certainty; tiles of one slide at a time are held."""
    least: list[Tile] = []
    most: list[Tile] = []
    for tiles in of_slides:
        least = heapq.nsmallest(SHOWN, [*least, *tiles])
        most = heapq.nlargest(SHOWN, [*most, *tiles])
    return list(dict.fromkeys([*least, *most]))


def certain_tiles(
    folder: PredictionFolder, slide_ids: Sequence[str], slides: Path, made_with: dict[str, Any]
) -> dict[str, bytes]:
    """Return pictures of the `extreme_tiles` of ``slide_ids``; none of a model that looks at slides as one image."""
    if made_with["tile"] == "slide":
        return {}
    classes = made_with["classes"]
    whole = made_with["whole_pictures"]
    specs = {spec.slide_id: spec for spec in find_slides(slides, whole_pictures=whole)}
    openings = {record["row"]["slide"]: record["opening"] for record in folder.records()}
    pictures = {}
    for certainty, slide_id, l0_x, l0_y, name in extreme_tiles(_tiles(folder, each, classes) for each in slide_ids):
        try:
            with replace(specs[slide_id], **openings[slide_id]).open() as slide:
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


def _tiles(folder: PredictionFolder, slide_id: str, classes: Sequence[str]) -> list[Tile]:
    """The tiles of a slide that could be read."""
    tiles: list[Tile] = []
    with folder.tiles(slide_id).open(newline="", encoding="utf-8") as file:
        for tile in read_rows(file):
            scores = [float(tile[f"score_{name}"]) for name in classes if tile[f"score_{name}"]]
            if scores:
                place = slide_id, int(tile["l0_x"]), int(tile["l0_y"])
                tiles.append((float(tile["certainty"]), *place, classes[int(np.argmax(scores))]))
    return tiles
