"""What one rank of several that share every tile reads of it: a box of the tile as the model is given it.

Takes the box and what is done to tiles; says which box of a tile that is as the slide has it. Turned and flipped tiles
have it elsewhere, and lying instead of standing, each of them as its sample number says. A colour is changed px by px
and needs no neighbours. What is varied in the reading threads (``--augment cpu``: affine changes, blur) and pictures
that are resized are made whole, and cut then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.slides.tile_box import TileBox, turns_that_fit
from pipelines.stream.augment import AugmentSettings, draw


@dataclass(frozen=True)
class TileParts:
    """The boxes that are read of every tile.

    Attributes:
        images, targets: boxes of a tile and of its mask, in px of the tile as the model is given it.
        height, width: of whole tiles.
        augment: what is varied in them, by seed and sample.
        seed: of the run.

    Raises:
        ValueError: a box is not inside the tile.
    """

    images: TileBox
    targets: TileBox
    height: int
    width: int
    augment: AugmentSettings
    seed: int

    def __post_init__(self) -> None:
        whole = TileBox.whole(self.height, self.width)
        for name, box in (("pixels", self.images), ("masks", self.targets)):
            if not whole.holds(box):
                raise ValueError(f"a part of {name} lies inside the tile, {whole}; got {box}")

    @property
    def varied_whole(self) -> bool:
        """Whether tiles are varied by the reading threads, and cut after that."""
        return self.augment.augment == "cpu"

    def stored(self, box: TileBox, sample: int) -> TileBox:
        """Return where ``box`` lies in the tile of ``sample`` as a batch holds it, before a device turns that."""
        if self.augment.augment != "device" or not self.augment.flip:
            return box
        drawn = draw(self.augment, self.seed, np.array([sample]))
        turns = turns_that_fit(int(drawn.quarter_turns[0]), self.height, self.width)
        return box.before_turning(turns, bool(drawn.flip[0]), self.height, self.width)

    def cut(self, image: NDArray[Any] | None, target: NDArray[Any] | None, fill: Callable[..., int]) -> int:
        """Have whole tiles filled by ``fill``, (image, target) -> row used, and write their parts.

        Args:
            image: a line of the bytes of a part; None: none is wanted.
            target: a line of the bytes of a part of a mask, or a class; None: none is wanted.
        """
        whole = None if image is None else np.empty((self.height, self.width, 3), np.uint8)
        is_mask = target is not None and target.ndim == 1
        mask = np.empty((self.height, self.width), np.uint8) if is_mask else target
        used = fill(whole, mask)
        if image is not None and whole is not None:
            image.reshape(self.images.height, self.images.width, 3)[...] = self.images.crop(whole)
        if is_mask and target is not None and mask is not None:
            target.reshape(self.targets.height, self.targets.width)[...] = self.targets.crop(mask)
        return used
