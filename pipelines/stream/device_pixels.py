"""From uint8 tiles on a device to the model's input there: oriented, stains and light jittered, normalised.

Takes what is stored of a microbatch's tiles, and their sample numbers; gives float32 (m, 3, h, w) and targets, turned
alike. What is done to a sample follows from the seed and its number alone, so it is the same in any microbatch, on any
rank, thread or stream. Stain jitter as ``stain.py`` (Tellez et al. 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.stream.augment import AugmentSettings, Draw, draw

NORMALISATION = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "he": ((0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517)),
}
"""Mean and standard deviation of R, G, B, 0 to 1. imagenet: torchvision's, for weights trained with them; he: of H&E
tiles, as the model card of H-optimus-0 (Bioptimus, 2024) gives them."""

Orientation = Sequence[tuple[int, bool]]
"""Of each tile: quarter turns counter-clockwise, and whether it is flipped left to right after them."""


class Extent(Protocol):
    """Rows or columns [start, stop)."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


class PixelMaker:
    """Makes microbatches.

    Args:
        device: where tiles are, and what is made of them.
        augment: applied when it says "device".
        seed: of the run.
        normalisation: which mean and standard deviation, a key of ``NORMALISATION``.
        channels_last: memory format of the images, what convolutions are usually fastest with.
    """

    def __init__(
        self,
        device: torch.device,
        augment: AugmentSettings,
        seed: int,
        normalisation: Literal["imagenet", "he"] = "imagenet",
        channels_last: bool = True,
    ) -> None:
        self.device = device
        self._augment = augment
        self._seed = seed
        self._channels_last = channels_last
        mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in NORMALISATION[normalisation])
        self._scale, self._offset = 1 / (255 * std), -mean / std

    def make(
        self, images: torch.Tensor | None, targets: torch.Tensor | None, samples: NDArray[np.int64]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """One microbatch, in memory of its own.

        Args:
            images: uint8 (m, h, w, 3).
            targets: int64 (m,) or uint8 (m, h, w).
            samples: int64 (m,), global sample numbers.
        """
        drawn = self.drawn(samples)
        if drawn is not None:
            orientations = orientation(drawn, len(samples))
            images = None if images is None else _turned(images, orientations)
            targets = targets if targets is None or targets.ndim == 1 else _turned(targets, orientations)
        if targets is not None and (drawn is None or targets.ndim == 1):
            targets = targets.clone()
        return None if images is None else self.floats(images, drawn), targets

    def drawn(self, samples: NDArray[np.int64]) -> Draw | None:
        """Return what is done to ``samples``; None: nothing."""
        return draw(self._augment, self._seed, samples) if self._augment.augment == "device" else None

    def floats(self, images: torch.Tensor, drawn: Draw | None) -> torch.Tensor:
        """Return float32 (m, 3, h, w) in memory of their own: pixels jittered as ``drawn`` says, and normalised.

        Args:
            images: uint8 (m, h, w, 3) on the device, turned already.
        """
        pixels = self._planes(images)
        if drawn is not None and drawn.matrix is not None and drawn.shift is not None:
            _jitter(pixels, self._to_device(drawn.matrix), self._to_device(drawn.shift))
        return self._normalised(pixels)

    def _planes(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 (m, h, w, 3) as float32 (m, 3, h, w), 0 to 255; new memory."""
        layout = torch.channels_last if self._channels_last else torch.contiguous_format
        return images.permute(0, 3, 1, 2).to(torch.float32, memory_format=layout)

    def _normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.mul_(self._scale).add_(self._offset)

    def _to_device(self, array: NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def orientation(drawn: Draw | None, count: int) -> Orientation:
    """Return how each of ``count`` tiles is turned."""
    if drawn is None:
        return [(0, False)] * count
    return list(zip(drawn.quarter_turns.tolist(), drawn.flip.tolist(), strict=True))


def turned_box(
    stored: torch.Tensor, orientations: Orientation, rows: Extent, columns: Extent, *, pinned: bool = False
) -> torch.Tensor:
    """Return rows and columns of tiles as they lie once turned counter-clockwise and then flipped; of oblong tiles,
    which would not fit turned by quarters, as many half turns.

    Args:
        stored: uint8 (m, h, w, ...).
        pinned: into page-locked memory.
    """
    height, width = stored.shape[1:3]
    shape = (len(stored), rows.stop - rows.start, columns.stop - columns.start, *stored.shape[3:])
    cut = torch.empty(shape, dtype=stored.dtype, device=stored.device, pin_memory=pinned)
    for out, tile, (turns, flip) in zip(cut, stored, orientations, strict=True):
        turns = turns if height == width else 2 * turns % 4
        top, bottom, left, right = rows.start, rows.stop, columns.start, columns.stop
        if flip:
            left, right = width - right, width - left
        for turns_before in reversed(range(turns)):  # row r and column c of what a turn gives were row c, column -1 - r
            side = (width, height)[turns_before % 2]
            top, bottom, left, right = left, right, side - bottom, side - top
        whole = torch.rot90(tile[top:bottom, left:right], turns, (0, 1))
        out.copy_(whole.flip(1) if flip else whole)
    return cut


def _turned(images: torch.Tensor, orientations: Orientation) -> torch.Tensor:
    """Whole tiles, turned."""
    height, width = images.shape[1:3]
    return turned_box(images, orientations, range(height), range(width))


def _jitter(pixels: torch.Tensor, matrix: torch.Tensor, shift: torch.Tensor) -> None:
    """Jitter stains in place: float32 (m, 3, h, w), 0 to 255, with (m, 3, 3) and (m, 3) of ``stain.jitter``.

    Plane by plane, not as a matrix product, whose rounding depends on the size of the microbatch.
    """
    density = pixels.add_(1).div_(256).log_().neg_()
    planes = []
    for k in range(3):
        plane = shift[:, k, None, None].expand_as(density[:, 0]).clone()
        for j in range(3):
            plane.addcmul_(density[:, j], matrix[:, j, k, None, None])
        planes.append(plane)
    for k, plane in enumerate(planes):
        pixels[:, k] = plane.neg_().exp_().mul_(256).sub_(1).clamp_(0, 255)
