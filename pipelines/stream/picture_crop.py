"""A whole picture cut to the model's tile, as trainers on ImageNet do it: ``--pictures resize``.

Takes a decoded picture of any size and a sample number; fills a square tile. In training a part of 8 to 100 % of the
area, of sides 3:4 to 4:3, is resized to the tile and flipped left to right half of the time (Szegedy et al. 2015,
"Going deeper with convolutions"); otherwise the shorter side is resized to 8/7 of the tile, whose middle is cut out
(256 and 224 px in He et al. 2016). Resizing is Pillow's, bilinear with antialiasing, as torchvision's transforms have
it. What is drawn depends on the seed, the sample and the picture's size alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from pipelines.slides.slide import Pixels
from pipelines.stream.augment import CROP, sample_rng

AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Part of the picture, and width over height, of what is cut out of it in training."""

TRIES = 10
"""Crops drawn until one fits into the picture; the largest in its middle, if none does."""

SHORTER_SIDE = 256 / 224
"""The shorter side of a picture that is not varied, in tiles."""


@dataclass(frozen=True)
class PictureCrop:
    """Cuts pictures to tiles.

    Attributes:
        side: of a tile in px.
        seed: of the run.
        varied: cut at random, otherwise the middle.
        flip: whether what is varied is flipped, too.
    """

    side: int
    seed: int
    varied: bool
    flip: bool = True

    def fill(self, sample: int, picture: Pixels, out: Pixels) -> None:
        """Write what is cut of ``picture``, uint8 (h, w, 3), into ``out``, uint8 (side, side, 3)."""
        if not self.varied:
            out[...] = centre(picture, self.side)
            return
        numbers = sample_rng(self.seed, sample, CROP)
        left, top, width, height = random_box(picture.shape[1], picture.shape[0], numbers)
        cut = _resized(picture[top : top + height, left : left + width], self.side, self.side)
        out[...] = cut[:, ::-1] if self.flip and numbers.random() < 0.5 else cut


def centre(picture: Pixels, side: int) -> Pixels:
    """Return the middle of ``picture``, uint8 (side, side, 3), once its shorter side is ``SHORTER_SIDE`` tiles."""
    height, width = picture.shape[:2]
    shorter = round(SHORTER_SIDE * side)
    if width <= height:
        resized = _resized(picture, shorter, int(shorter * height / width))
    else:
        resized = _resized(picture, int(shorter * width / height), shorter)
    top, left = (round((length - side) / 2) for length in resized.shape[:2])
    return resized[top : top + side, left : left + side]


def random_box(width: int, height: int, numbers: np.random.Generator) -> tuple[int, int, int, int]:
    """Return left, top, width and height of what is cut out of a picture of ``width`` x ``height`` px."""
    for _ in range(TRIES):
        area = width * height * numbers.uniform(*AREA)
        ratio = math.exp(numbers.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, top = (int(numbers.integers(0, room + 1)) for room in (width - box_width, height - box_height))
            return left, top, box_width, box_height
    box_width = min(width, max(1, round(height * RATIO[1])))
    box_height = min(height, max(1, round(width / RATIO[0])))
    return (width - box_width) // 2, (height - box_height) // 2, box_width, box_height


def _resized(pixels: Pixels, width: int, height: int) -> Pixels:
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
