"""Augmentation on the CPU, in the reading threads, with albumentations: tile and mask together.

Takes one sample's tile and target and its number; changes both in place. Geometry comes from albumentations, fed with
the sample's own random numbers; stain and light from the same draw as on a device (``augment.draw``).
"""

from __future__ import annotations

import os
import random
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.slides.slide import PADDING, Pixels
from pipelines.stream import stain
from pipelines.stream.augment import ALBUMENTATIONS, AugmentSettings, draw, sample_rng

IGNORE = 255
"""Mask value of pixels that come from outside the tile."""

BLUR_PROBABILITY = 0.2

_threads = threading.local()
"""Albumentations pipelines of each reading thread: they keep their random state in themselves."""


@dataclass(frozen=True)
class CpuAugment:
    """Changes samples in place.

    Attributes:
        settings: with augment "cpu".
        seed: of the run.
    """

    settings: AugmentSettings
    seed: int

    def apply(self, sample: int, image: Pixels | None, target: NDArray[Any] | None) -> None:
        """Vary ``image``, uint8 (h, w, 3), and ``target`` with it when that is a mask, uint8 (h, w); either alone is
        varied as both together. Oblong ones are flipped and turned by halves, not by quarters."""
        is_mask = target is not None and target.ndim == 2
        if image is None and not is_mask:
            return
        numbers = sample_rng(self.seed, sample, ALBUMENTATIONS)
        height, width = image.shape[:2] if image is not None else target.shape  # type: ignore[union-attr]
        compose = self._compose(height == width)
        compose.set_random_state(numbers, random.Random(int(numbers.integers(1 << 62))))
        if target is not None and is_mask:
            # The library draws for an image only; the pixels of a blank one are of no account.
            varied = compose(image=np.zeros((*target.shape, 1), np.uint8) if image is None else image, mask=target)
            target[...] = varied["mask"]
        else:
            varied = compose(image=image)
        if image is None:
            return
        image[...] = varied["image"]
        drawn = draw(self.settings, self.seed, np.array([sample]))
        if drawn.matrix is not None and drawn.shift is not None:
            stain.apply(image, drawn.matrix[0], drawn.shift[0])

    def _compose(self, is_square: bool) -> Any:
        made: dict[tuple[AugmentSettings, bool], Any] = _threads.__dict__.setdefault("made", {})
        key = (self.settings, is_square)
        if key not in made:
            made[key] = _albumentations(*key)
        return made[key]


def _albumentations(settings: AugmentSettings, is_square: bool) -> Any:
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # it asks the network for a newer version when imported
    import albumentations  # 2 s, and only for --augment cpu
    import cv2

    steps: list[Any] = []
    if settings.flip:
        flips = [albumentations.HorizontalFlip(p=0.5), albumentations.VerticalFlip(p=0.5)]
        steps += [albumentations.D4(p=1)] if is_square else flips
    if settings.affine:
        extent = settings.affine
        steps.append(
            albumentations.Affine(
                scale=(1 - extent, 1 + extent),
                translate_percent=(-extent, extent),
                rotate=(-90 * extent, 90 * extent),
                border_mode=cv2.BORDER_CONSTANT,
                fill=PADDING,
                fill_mask=IGNORE,
                p=1,
            )
        )
    if settings.blur:
        steps.append(albumentations.GaussianBlur(blur_limit=0, sigma_limit=(0.1, settings.blur), p=BLUR_PROBABILITY))
    return albumentations.Compose(steps)
