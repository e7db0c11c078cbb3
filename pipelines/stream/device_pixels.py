"""Input of the model from uint8 tiles on a device: turned, stains normalised and jittered, scaled.

Gives float32 (m, 3, h, w) and targets, turned alike. What is done to a sample follows from the seed and its number, so
it is the same on any rank, thread or stream. Macenko's normalisation is a matrix on optical densities, Reinhard's a
matrix and a shift on the logarithms of L, M, S; a slide without a fit stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.slides.geometry import TileBox, turns_that_fit
from pipelines.stream.augment import NO_AUGMENTATION, AugmentSettings, Draw, StainSteps, draw
from pipelines.tiles.stain import LEAST_DENSITY, LMS_FROM_RGB


class Extent(Protocol):
    """Rows or columns [start, stop)."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


def _orientations(drawn: Draw | None, count: int) -> list[tuple[int, bool]]:
    """Quarter turns counter-clockwise of each of ``count`` tiles, and whether it is then flipped left to right."""
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
    def of(cls, stored: Stored) -> TileBytes:
        """Return ``stored`` as parts of tiles; whole tiles are parts, too."""
        if isinstance(stored, TileBytes):
            return stored
        height, width = stored.shape[1:3]
        box = TileBox.full(height, width)
        return cls(list(stored), height, width, box, [box] * len(stored))

    def turned(self, drawn: Draw | None, box: TileBox | None = None, *, pinned: bool = False) -> torch.Tensor:
        """Return ``box``, inside ``part``, or all of it, of the tiles as they lie once turned counter-clockwise and
        then flipped; of oblong tiles, which would not fit turned by quarters, that number of half turns. uint8 (m, h,
        w, ...). Raises ValueError where what was read of a tile does not hold it."""
        asked, first = box or self.part, self.tiles[0]
        shape = (len(self.tiles), asked.height, asked.width, *first.shape[2:])
        turned = torch.empty(shape, dtype=first.dtype, device=first.device, pin_memory=pinned)
        turns_of_tiles = _orientations(drawn, len(self.tiles))
        for out, tile, stored, (quarters, flip) in zip(turned, self.tiles, self.boxes, turns_of_tiles, strict=True):
            turns = turns_that_fit(quarters, self.height, self.width)
            before = asked.before_turning(turns, flip, self.height, self.width)
            if not stored.holds(before):
                raise ValueError(f"{asked} of a turned tile are {before} of it, and {stored} were read: other turns")
            inner = before.within(stored)
            pixels = tile[inner.row_start : inner.row_stop, inner.column_start : inner.column_stop]
            pixels = torch.rot90(pixels, turns, (0, 1))
            out.copy_(pixels.flip(1) if flip else pixels)
        return turned


Stored = torch.Tensor | TileBytes
"""Bytes of the tiles of a microbatch: whole, uint8 (m, h, w, ...), or parts of them. Classes are int64 (m,)."""


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
        inner = box_inside(self._part, rows, columns).within(self._part)
        return self.made[..., inner.row_start : inner.row_stop, inner.column_start : inner.column_stop].clone(
            memory_format=torch.preserve_format
        )


def box_inside(part: TileBox, rows: Extent, columns: Extent) -> TileBox:
    """Return the box of ``rows`` and ``columns``; ValueError where this rank did not read it."""
    asked = TileBox(rows.start, rows.stop, columns.start, columns.stop)
    if not part.holds(asked):
        raise ValueError(f"this rank reads {part} of every tile, and was asked for {asked}: TileStream.part says which")
    return asked


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of R, G, B, 0 to 1: torchvision's."""

GLASS_DENSITY = 0.01
"""Mean optical density below which a px is white and stays so under ``--stain reinhard``, whose shift would colour it;
from ``LEAST_DENSITY`` on it is tissue, and changed as a whole."""

CPU_BAND_PX, BAND_PX = 1 << 15, 1 << 24
"""Px whose colours are changed at a time: on a CPU as many as its cache holds."""


class PixelMaker:
    """Makes microbatches.

    Args:
        device: where tiles are, and what is made of them.
        augment: applied when it says "device".
        seed: of the run.
        normalisation: mean and standard deviation of R, G and B, 0 to 1, that the model expects.
        channels_last: memory format of the images, what convolutions are usually fastest with.
        stains: how the tiles of each row are normalised; None: they are not.
    """

    def __init__(
        self,
        device: torch.device,
        augment: AugmentSettings,
        seed: int,
        normalisation: tuple[Sequence[float], Sequence[float]] = IMAGENET,
        channels_last: bool = True,
        stains: StainSteps | None = None,
    ) -> None:
        self.device = device
        self._augment = augment
        self._seed = seed
        self._channels_last = channels_last
        self._stains = stains
        self._lms_from_rgb, self._rgb_from_lms = (  # of row vectors
            torch.from_numpy(np.ascontiguousarray(matrix.T, np.float32)).to(device)
            for matrix in (LMS_FROM_RGB, np.linalg.inv(LMS_FROM_RGB))
        )
        mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in normalisation)
        self._scale, self._offset = 1 / (255 * std), -mean / std

    def make(
        self, images: Stored | None, targets: Stored | None, samples: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> tuple[torch.Tensor | MadePart | None, torch.Tensor | MadePart | None]:
        """Return one microbatch, in memory of its own: whole tiles, or the stored parts of them.

        Args:
            images: uint8 (m, h, w, 3).
            targets: int64 (m,) or uint8 (m, h, w).
            samples: int64 (m,), global sample numbers.
            rows: int64 (m,), rows of the table that the tiles are of; only stain normalisation asks for them.
        """
        drawn = self.drawn(samples, rows)
        made = None if images is None else _as_stored(images, self.floats(_turned(images, drawn), drawn))
        if targets is None:
            return made, None
        turned = _turned(targets, drawn)
        return made, _as_stored(targets, turned.clone() if turned is targets else turned)

    def drawn(self, samples: NDArray[np.int64], rows: NDArray[np.int64]) -> Draw | None:
        """Return what is done to ``samples``, tiles of the table's ``rows``; None: nothing."""
        varied = self._augment.augment == "device"
        if self._stains is None:
            return draw(self._augment, self._seed, samples) if varied else None
        return self._stains.before(draw(self._augment if varied else NO_AUGMENTATION, self._seed, samples), rows)

    def floats(self, images: torch.Tensor, drawn: Draw | None) -> torch.Tensor:
        """Return float32 (m, 3, h, w) in memory of their own: colours changed as ``drawn`` says, then scaled.

        Args:
            images: uint8 (m, h, w, 3) on the device, turned already.
        """
        layout = torch.channels_last if self._channels_last else torch.contiguous_format
        pixels = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=layout)
        if drawn is not None and drawn.lms is not None:
            self._transfer(pixels, *map(self._to_device, drawn.lms))
        if drawn is not None and drawn.rgb is not None:
            matrix, shift = map(self._to_device, drawn.rgb)
            for band, light in _bands(pixels):  # change optical densities
                band.copy_(_levels(_mixed(light.log_().neg_(), matrix, shift).neg_().exp_()))
        return pixels.mul_(self._scale).add_(self._offset)

    def _transfer(self, pixels: torch.Tensor, matrix: torch.Tensor, shift: torch.Tensor) -> None:
        """Transfer colours in place, of float32 (m, 3, h, w), 0 to 255, by ``StainSteps`` for L, M, S."""
        for band, light in _bands(pixels):
            density = _mixed(light, self._lms_from_rgb.expand_as(matrix)).log_().neg_()
            part = density.sum(1, keepdim=True).div_(3)
            changed = _mixed(_mixed(density, matrix, shift).neg_().exp_(), self._rgb_from_lms.expand_as(matrix))
            # What is light is not stained: it changes in proportion to the light it takes, and white not at all.
            part.sub_(GLASS_DENSITY).div_(LEAST_DENSITY - GLASS_DENSITY).clamp_(0, 1)
            band.copy_(_levels(changed.sub_(light).mul_(part).add_(light)))

    def _to_device(self, array: NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _turned(stored: Stored, drawn: Draw | None) -> torch.Tensor:
    """Bytes turned as ``drawn`` says. Classes, and whole tiles where nothing is drawn, are not copied."""
    if isinstance(stored, torch.Tensor) and (drawn is None or stored.ndim == 1):
        return stored
    return TileBytes.of(stored).turned(drawn)


def _as_stored(stored: Stored, made: torch.Tensor) -> torch.Tensor | MadePart:
    """``made`` as the part of tiles that ``stored`` has, or as whole tiles."""
    return MadePart(made, stored.part, stored.height, stored.width) if isinstance(stored, TileBytes) else made


def _bands(pixels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield bands of rows of ``pixels``, float32 (m, 3, h, w), 0 to 255, and their light, 0 to 1, in new memory."""
    count, _, height, width = pixels.shape
    rows = max(1, (CPU_BAND_PX if pixels.device.type == "cpu" else BAND_PX) // (count * width))
    for top in range(0, height, rows):
        band = pixels[:, :, top : top + rows]
        light = torch.empty(band.shape, device=pixels.device)
        yield band, torch.add(band, 1, out=light).div_(256)


def _levels(light: torch.Tensor) -> torch.Tensor:
    """Pixel values, 0 to 255, of ``light``, in place."""
    return light.mul_(256).sub_(1).clamp_(0, 255)


def _mixed(planes: torch.Tensor, matrix: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
    """Return planes (m, 3, h, w) @ matrix (m, 3, 3) + shift (m, 3), in new memory.

    Plane by plane, not as a matrix product, whose rounding depends on the size of the microbatch.
    """
    mixed = torch.zeros_like(planes)
    if shift is not None:
        mixed += shift[:, :, None, None]
    for k in range(3):
        for j in range(3):
            mixed[:, k].addcmul_(planes[:, j], matrix[:, j, k, None, None])
    return mixed
