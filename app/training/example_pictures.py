"""Pictures of example tiles for the report: each tile, with true and predicted mask where pixels have classes.

Takes the session and the examples of the last validation; leaves small JPEG files in the run folder's ``examples/``.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.pages.pictures import as_jpeg, tinted
from app.training.metrics import Example
from app.training.session import Session
from models.losses import IGNORE
from parallel.offload.copies import read_later
from parallel.space.cuts import Span
from pipelines.catalog.handles import SlidePool
from pipelines.labels.annotations import SlideAnnotations
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError

FOLDER = "examples"
PICTURE_PX, GAP_PX = 192, 6
"""Longer side of a tile in a picture, and the space between a tile and its masks."""

CELLS = 128
"""Rows and columns of a predicted mask."""

Masks = NDArray[np.uint8]


@dataclass(frozen=True)
class _CellTargets:
    """Number of the cell that each pixel of a tile lies in, int64 (n, h, w), in place of the targets: sums over px then
    are sums over cells, however the tile is divided into boxes or among ranks."""

    shape: tuple[int, ...]
    dtype = torch.int64
    device = torch.device("cpu")

    def box(self, rows: Span, columns: Span) -> Tensor:
        count, height, width = self.shape
        y = torch.arange(rows.start, rows.stop) * CELLS // height
        x = torch.arange(columns.start, columns.stop) * CELLS // width
        return (y[:, None] * CELLS + x).expand(count, -1, -1).clone()


def predicted_masks(session: Session, examples: Sequence[Example]) -> Masks | None:
    """Return the class that is predicted most often in each cell of the tiles, uint8 (examples, CELLS, CELLS); None of
    a classifier. All ranks call it together."""
    if session.dataset.task != "segment" or not examples:
        return None
    classes, communicator = len(session.dataset.classes), session.placement.communicator
    rows = np.array([example.row for example in examples], np.int64)
    counts = torch.zeros((len(rows), classes * CELLS * CELLS), dtype=torch.float64)
    count = functools.partial(_count, classes)
    with session.engine.averaged(), session.engine.predicting(), session.validation(rows) as stream:
        for part in stream:
            n, _, height, width = part.microbatch.shape
            wanted = part.microbatch.targets is not None
            microbatch = part.microbatch._replace(targets=_CellTargets((n, height, width)) if wanted else None)
            output = session.engine.predict(microbatch, count)
            if output is not None:
                cells = read_later(output)().reshape(n, classes, CELLS, CELLS)
                cells = cells[:, :, _filled(height)][:, :, :, _filled(width)]
                counts[torch.from_numpy(part.rows)] = cells.reshape(n, -1)
    communicator.all_reduce(counts)
    return counts.reshape(len(rows), classes, CELLS, CELLS).argmax(1).numpy().astype(np.uint8)


def _filled(side: int) -> Tensor:
    """Return for each cell along a tile of ``side`` px the one to take counts from: itself, or where a cell is less
    than a px, the nearest that has one."""
    px = (torch.arange(CELLS) * side + CELLS - 1) // CELLS
    return px.clamp(max=side - 1) * CELLS // side


def _count(classes: int, logits: Tensor, cells: Tensor) -> Tensor:
    """Count how often each class is predicted in each cell, float64 (n, classes * CELLS * CELLS)."""
    number = logits.argmax(1) * (CELLS * CELLS) + cells.to(logits.device)
    return torch.stack([torch.bincount(tile.ravel(), minlength=classes * CELLS * CELLS) for tile in number]).double()


def write_examples(
    session: Session, examples: Sequence[Example], masks: Masks | None, run: Path
) -> list[dict[str, Any]]:
    """Write a picture of each example into the run folder ``run``, and return what the report says of it: ``picture``
    (path in the run folder), slide, l0_x, l0_y, truth, prediction, score.

    A tile that cannot be read is left out.
    """
    shutil.rmtree(run / FOLDER, ignore_errors=True)
    if not examples:
        return []
    (run / FOLDER).mkdir()
    tiles, classes = session.dataset.tiles, session.dataset.classes
    told = []
    with contextlib.closing(session.dataset.pool(1)) as pool:
        for number, example in enumerate(examples):
            try:
                panels = _panels(session, example.row, None if masks is None else masks[number], pool)
            except (SlideError, OSError):
                continue
            name = f"{FOLDER}/{number + 1}.jpg"
            (run / name).write_bytes(as_jpeg(_beside(panels)[..., ::-1]))
            told.append(
                {
                    "picture": name,
                    "slide": tiles.slide_id(example.row),
                    "l0_x": int(tiles.l0_x[example.row]),
                    "l0_y": int(tiles.l0_y[example.row]),
                    "truth": None if example.truth is None else classes[example.truth],
                    "prediction": None if example.prediction is None else classes[example.prediction],
                    "score": example.score,
                }
            )
    return told


def _panels(session: Session, row: int, predicted: Masks | None, pool: SlidePool) -> list[NDArray[np.uint8]]:
    """Return the tile, and in segmentation the tile with its true and its predicted mask; RGB."""
    dataset, slide_id = session.dataset, session.dataset.tiles.slide_id(row)
    tile = dataset.tiles.region(row)
    with pool.lease(slide_id) as slide:
        if session.config.index.whole_pictures:
            level = slide.levels[0]
            tile = Region(0, 0, level.width, level.height, level.mpp)
        factor = max(1.0, max(tile.width, tile.height) / PICTURE_PX)
        width, height = (max(1, round(side / factor)) for side in (tile.width, tile.height))
        small = Region(tile.l0_x, tile.l0_y, width, height, tile.mpp * factor)
        pixels = slide.read(small)
        if predicted is None:
            return [pixels]
        assert isinstance(dataset.truth, SlideAnnotations)
        true = np.empty((height, width), np.uint8)
        dataset.truth.read_mask(slide_id, slide, small, true)
    return [pixels, *(tinted(pixels, _shares(mask, len(dataset.classes))) for mask in (true, predicted))]


def _shares(mask: Masks, classes: int) -> NDArray[np.uint8]:
    """255 where ``mask`` has a class, for each class but the background; of ignored px nothing."""
    shown = np.where(mask == IGNORE, 0, mask)
    return np.stack([np.where(shown == number, 255, 0) for number in range(1, classes)]).astype(np.uint8)


def _beside(panels: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    gap = np.full((len(panels[0]), GAP_PX, 3), 255, np.uint8)
    parts = [part for panel in panels for part in (gap, panel)][1:]
    return np.concatenate(parts, axis=1)
