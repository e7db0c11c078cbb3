"""Scores of tiles and slides as tables have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.catalog.csv_cells import write_rows


@dataclass(frozen=True, eq=False)
class TileRow:
    """A tile of a slide: where it lies on level 0, the part of it that is tissue, its scores (classes,), and how
    certain the model is, 0 to 1; NaN where it could not be read."""

    l0_x: int
    l0_y: int
    l0_width: int
    l0_height: int
    tissue: float
    scores: NDArray[np.float64]
    certainty: float


def write_tiles(path: Path, classes: Sequence[str], tiles: Iterable[TileRow]) -> None:
    """Write ``tiles`` to the CSV file ``path``; the cells of a score that is NaN are empty."""
    header = ["l0_x", "l0_y", "l0_width", "l0_height", "tissue", *(f"score_{name}" for name in classes)]
    header.append("certainty")
    rows: list[list[Any]] = []
    for tile in tiles:
        cells = [None if np.isnan(score) else float(score) for score in (*tile.scores, tile.certainty)]
        rows.append([tile.l0_x, tile.l0_y, tile.l0_width, tile.l0_height, round(tile.tissue, 4), *cells])
    with path.open("w", newline="", encoding="utf-8") as file:
        write_rows(file, [header, *rows])


def class_scores(classes: Sequence[str], scores: NDArray[np.float64]) -> dict[str, Any]:
    """Return the cells of a slide's row that say what it is: the likeliest class, and the score (classes,) of each."""
    likeliest = classes[int(np.argmax(scores))]
    return {"prediction": likeliest, **{f"score_{name}": float(scores[c]) for c, name in enumerate(classes)}}
