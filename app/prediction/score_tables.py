"""Scores of tiles and slides as tables have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from app.pages.pictures import tinted
from pipelines.catalog.table import write_rows
from pipelines.tiles.overlay import caption_strip
from pipelines.tiles.tissue import Overview


def draw_prediction(thumbnail: Overview, probabilities: NDArray[np.uint8], caption: str) -> bytes:
    """Return a PNG of the slide with the probabilities of its classes.

    Args:
        thumbnail: the slide's bounds.
        probabilities: uint8 (classes shown, h, w), 255 is 1, of the same bounds.
        caption: one line below the picture.
    """
    picture = tinted(thumbnail.pixels, probabilities)
    framed = np.concatenate([picture, caption_strip(picture.shape[1], caption, thumbnail.mpp)])
    done, png = cv2.imencode(".png", cv2.cvtColor(framed, cv2.COLOR_RGB2BGR))
    assert done
    return png.tobytes()


@dataclass(frozen=True, eq=False)
class TileRow:
    """A tile of a slide: where it lies on level 0, the part of it that is tissue, its scores (classes,), and how
    certain the model is, 0 to 1; NaN where it could not be read. Models of bags give its attention weight, too."""

    l0_x: int
    l0_y: int
    l0_width: int
    l0_height: int
    tissue: float
    scores: NDArray[np.float64]
    certainty: float
    attention: float | None = None


def write_tiles(path: Path, classes: Sequence[str], tiles: Iterable[TileRow]) -> None:
    """Write ``tiles`` to the CSV file ``path``; the cells of a score that is NaN are empty."""
    header = ["l0_x", "l0_y", "l0_width", "l0_height", "tissue", *(f"score_{name}" for name in classes)]
    header.append("certainty")
    rows: list[list[Any]] = []
    for tile in tiles:
        values = [*tile.scores, tile.certainty]
        if tile.attention is not None:
            values.append(tile.attention)
            header = header if header[-1] == "attention" else [*header, "attention"]
        cells = [None if np.isnan(value) else float(value) for value in values]
        rows.append([tile.l0_x, tile.l0_y, tile.l0_width, tile.l0_height, round(tile.tissue, 4), *cells])
    with path.open("w", newline="", encoding="utf-8") as file:
        write_rows(file, [header, *rows])


def attention_weights(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights (n,) of the tiles of a bag from their attention ``scores``: 1 on average; NaN stays NaN."""
    weights = np.exp(scores - np.nanmax(scores))
    relative: NDArray[np.float64] = weights / np.nanmean(weights)
    return relative


def bag_scores(probability: NDArray[np.float64], attention: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probabilities (classes,) of a bag.

    ``models.bag.bag_logits`` averages logits. Logarithms of probabilities differ from the logits of a tile by one
    number for all classes, and so do their averages, which softmax does not see.

    Args:
        probability: (n, classes) of each tile.
        attention: (n,) weights, 1 on average.
    """
    logits = (attention[:, None] * np.log(np.maximum(probability, np.finfo(np.float32).tiny))).mean(0)
    exponentials: NDArray[np.float64] = np.exp(logits - logits.max())
    probabilities: NDArray[np.float64] = exponentials / exponentials.sum()
    return probabilities


def class_scores(classes: Sequence[str], scores: NDArray[np.float64]) -> dict[str, Any]:
    """Return the cells of a slide's row that say what it is: the likeliest class, and the score (classes,) of each."""
    likeliest = classes[int(np.argmax(scores))]
    return {"prediction": likeliest, **{f"score_{name}": float(scores[c]) for c, name in enumerate(classes)}}
