"""Tiles that stay bytes in host memory, of which a box at a time is turned and made floats on the device.

Takes what is stored of a microbatch's tiles; gives images and masks that a model asks for box by box, with the numbers
of a crop of what ``PixelMaker`` makes of whole tiles, bit for bit: all that is done to a pixel is done to it alone. Of
parts of tiles, boxes inside the part.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.stream.augment import Draw
from pipelines.stream.device_pixels import PixelMaker
from pipelines.stream.tile_bytes import Extent, Orientation, TileBytes, orientation


class BoxMaker:
    """Makes microbatches of which nothing but labels is on the device.

    Args:
        pixels: says what is done to a tile, and where.
    """

    def __init__(self, pixels: PixelMaker) -> None:
        self.device = pixels.device
        self._pixels = pixels

    def make(
        self,
        images: torch.Tensor | None,
        targets: torch.Tensor | None,
        samples: NDArray[np.int64],
        rows: NDArray[np.int64] | None = None,
    ) -> tuple[TileBoxes | None, MaskBoxes | torch.Tensor | None]:
        """Return one microbatch.

        Args:
            images: uint8 (m, h, w, 3), on the host; read for as long as boxes are asked for.
            targets: int64 (m,) or, read likewise, uint8 (m, h, w).
            samples: int64 (m,), global sample numbers.
            rows: int64 (m,), rows of the table that the tiles are of; only stain normalisation asks for them.
        """
        stored = None if images is None else TileBytes.whole(images)
        masks = TileBytes.whole(targets) if targets is not None and targets.ndim > 1 else targets
        return self.make_part(stored, masks, samples, rows)

    def make_part(
        self,
        images: TileBytes | None,
        targets: TileBytes | torch.Tensor | None,
        samples: NDArray[np.int64],
        rows: NDArray[np.int64] | None = None,
    ) -> tuple[TileBoxes | None, MaskBoxes | torch.Tensor | None]:
        """Return the part of one microbatch that is stored, the rest as ``make``."""
        drawn = self._pixels.drawn(samples, rows)
        boxes = None if images is None else TileBoxes(self._pixels, images, drawn)
        if isinstance(targets, TileBytes):
            return boxes, MaskBoxes(targets, orientation(drawn, len(samples)), self.device)
        return boxes, None if targets is None else targets.to(self.device, copy=True)


class TileBoxes:
    """Images float32 (m, 3, h, w), by boxes.

    Args:
        pixels: makes them of bytes.
        stored: of uint8 (h, w, 3) each, on the host.
        drawn: what is done to each; None: nothing.
    """

    def __init__(self, pixels: PixelMaker, stored: TileBytes, drawn: Draw | None) -> None:
        self.shape: tuple[int, ...] = (len(stored.tiles), 3, stored.height, stored.width)
        self.dtype = torch.float32
        self.device = pixels.device
        self._pixels, self._stored, self._drawn = pixels, stored, drawn

    def box(self, rows: Extent, columns: Extent) -> torch.Tensor:
        """Return float32 (m, 3, rows, columns) on the device.

        Raises:
            ValueError: they are not all inside the part that is stored.
        """
        orientations = orientation(self._drawn, len(self._stored.tiles))
        return self._pixels.floats(_sent(self._stored, orientations, rows, columns, self.device), self._drawn)


class MaskBoxes:
    """Targets uint8 (m, h, w), by boxes, turned as the images are.

    Args:
        stored: as they were read, uint8 (h, w) each, on the host.
    """

    def __init__(self, stored: TileBytes, orientations: Orientation, device: torch.device) -> None:
        self.shape: tuple[int, ...] = (len(stored.tiles), stored.height, stored.width)
        self.dtype = torch.uint8
        self.device = device
        self._stored, self._orientations = stored, orientations

    def box(self, rows: Extent, columns: Extent) -> torch.Tensor:
        """Return uint8 (m, rows, columns) on the device.

        Raises:
            ValueError: they are not all inside the part that is stored.
        """
        return _sent(self._stored, self._orientations, rows, columns, self.device)


def _sent(
    stored: TileBytes, orientations: Orientation, rows: Extent, columns: Extent, device: torch.device
) -> torch.Tensor:
    """A box of bytes on the device; nothing else crosses to it."""
    # torch keeps pinned memory from being reused before the copy is done.
    cut = stored.turned(orientations, rows, columns, pinned=device.type == "cuda")
    return cut.to(device, non_blocking=True)
