"""Bytes of tiles as a batch holds them, whole or a box of each, and rows and columns of them once turned and flipped.

A box outside the stored part is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pipelines.slides.geometry import TileBox, turns_that_fit
from pipelines.stream.augment import Draw


class Extent(Protocol):
    """Rows or columns [start, stop)."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


Orientation = Sequence[tuple[int, bool]]
"""Of each tile: quarter turns counter-clockwise, and whether it is flipped left to right after them."""


def orientation(drawn: Draw | None, count: int) -> Orientation:
    """Return how each of ``count`` tiles is turned."""
    if drawn is None:
        return [(0, False)] * count
    return list(zip(drawn.quarter_turns.tolist(), drawn.flip.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class TileBytes:
    """Bytes of tiles.

    Attributes:
        tiles: uint8 (h, w, ...) of what is stored of each, at least one.
        height, width: of whole tiles.
        part: the box that can be asked for, of the tile as it lies once turned; all of it, where tiles are whole.
        boxes: where in its tile, before that is turned, each of ``tiles`` lies.
    """

    tiles: Sequence[torch.Tensor]
    height: int
    width: int
    part: TileBox
    boxes: Sequence[TileBox]

    @classmethod
    def whole(cls, tiles: torch.Tensor) -> TileBytes:
        """Return whole tiles, uint8 (m, h, w, ...)."""
        height, width = tiles.shape[1:3]
        box = TileBox.whole(height, width)
        return cls(list(tiles), height, width, box, [box] * len(tiles))

    def turned(self, orientations: Orientation, rows: Extent, columns: Extent, *, pinned: bool = False) -> torch.Tensor:
        """Return rows and columns of the tiles as they lie once turned counter-clockwise and then flipped; of oblong
        tiles, which would not fit turned by quarters, that number of half turns. uint8 (m, rows, columns, ...).

        Raises:
            ValueError: they are not all inside ``part``.
        """
        asked = TileBox(rows.start, rows.stop, columns.start, columns.stop)
        refuse_outside(self.part, asked)
        first = self.tiles[0]
        shape = (len(self.tiles), asked.height, asked.width, *first.shape[2:])
        turned = torch.empty(shape, dtype=first.dtype, device=first.device, pin_memory=pinned)
        for out, tile, box, (quarters, flip) in zip(turned, self.tiles, self.boxes, orientations, strict=True):
            turns = turns_that_fit(quarters, self.height, self.width)
            before = asked.before_turning(turns, flip, self.height, self.width)
            if not box.holds(before):
                raise ValueError(f"{asked} of a turned tile are {before} of it, and {box} were read: other turns")
            inner = before.within(box)
            pixels = tile[inner.row_start : inner.row_stop, inner.column_start : inner.column_stop]
            pixels = torch.rot90(pixels, turns, (0, 1))
            out.copy_(pixels.flip(1) if flip else pixels)
        return turned

    def all_turned(self, orientations: Orientation) -> torch.Tensor:
        """Return all of ``part``, as ``turned`` does."""
        part = self.part
        return self.turned(
            orientations, range(part.row_start, part.row_stop), range(part.column_start, part.column_stop)
        )


class MadePart:
    """A part of images float32 (m, 3, h, w), or of masks uint8 (m, h, w), made already, by boxes.

    Args:
        made: (m, ..., rows, columns) of the part.
        part: which rows and columns of the tile these are.
        height, width: of whole tiles.
    """

    def __init__(self, made: torch.Tensor, part: TileBox, height: int, width: int) -> None:
        self.shape: tuple[int, ...] = (*made.shape[:-2], height, width)
        self.dtype = made.dtype
        self.device = made.device
        self.made, self._part = made, part

    def box(self, rows: Extent, columns: Extent) -> torch.Tensor:
        """Return (m, ..., rows, columns) on the device.

        Raises:
            ValueError: they are not all inside the part.
        """
        asked = TileBox(rows.start, rows.stop, columns.start, columns.stop)
        refuse_outside(self._part, asked)
        inner = asked.within(self._part)
        return self.made[..., inner.row_start : inner.row_stop, inner.column_start : inner.column_stop].clone(
            memory_format=torch.preserve_format
        )


def refuse_outside(part: TileBox, asked: TileBox) -> None:
    """Refuse a box of tiles that this rank did not read.

    Raises:
        ValueError: ``asked`` is not inside ``part``.
    """
    if not part.holds(asked):
        raise ValueError(f"this rank reads {part} of every tile, and was asked for {asked}: TileStream.part says which")
