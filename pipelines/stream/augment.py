"""Augmentation: random numbers of each sample, jitter and normalisation of stains, changes on the CPU.

The numbers depend on settings, seed and sample alone, so every rank, thread and resumed run draws the same.
``device_pixels`` applies them on the device that trains, albumentations on the CPU. Stains are separated after
Ruifrok & Johnston 2001 ("Quantification of histochemical staining by color deconvolution"), jittered after Tellez et
al. 2018 ("Whole-slide mitosis detection in H&E breast histology"): c' = alpha c + beta per stain.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipelines import Rare
from pipelines.labels.class_names import IGNORE
from pipelines.slides.slide import PADDING, Pixels
from pipelines.tiles.stain import LAB_FROM_LOG_LMS, Method, StainFit

_STAINS = np.array([[0.650, 0.704, 0.286], [0.072, 0.990, 0.105], [0.268, 0.570, 0.776]])
"""Optical density per unit of stain, rows haematoxylin, eosin, DAB, columns R, G, B (Ruifrok & Johnston, table 1)."""

RGB_FROM_HED = _STAINS / np.linalg.norm(_STAINS, axis=1, keepdims=True)
"""Density in RGB (row vector) = stain amounts (row vector) @ RGB_FROM_HED. Rows of length 1."""

HED_FROM_RGB = np.linalg.inv(RGB_FROM_HED)

_DENSITY = -np.log((np.arange(256) + 1) / 256).astype(np.float32)
"""Optical density of each uint8 value: -ln((x + 1) / 256), 0 for white, 5.5 for black."""

_BAND_PIXELS = 1 << 18
"""Pixels in float at a time, so that jitter of a large tile needs little memory of its own."""


def jitter(
    alpha: NDArray[np.float64], beta: NDArray[np.float64], gain: NDArray[np.float64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return matrix float32 (n, 3, 3) and shift (n, 3) that do the jitter: density' = density @ matrix + shift.

    Args:
        alpha: (n, 3) factors of the amounts of haematoxylin, eosin, DAB.
        beta: (n, 3) added to the amounts, in units of optical density.
        gain: (n,) factor of the light, > 0.
    """
    matrix = np.einsum("ij,nj,jk->nik", HED_FROM_RGB, alpha, RGB_FROM_HED)
    shift = beta @ RGB_FROM_HED - np.log(gain)[:, None]
    return matrix.astype(np.float32), shift.astype(np.float32)


def apply_jitter(image: Pixels, matrix: NDArray[np.float32], shift: NDArray[np.float32]) -> None:
    """Jitter a tile in place: uint8 (h, w, 3), matrix (3, 3) and shift (3,) from ``jitter``."""
    rows = max(1, _BAND_PIXELS // image.shape[1])
    for y in range(0, len(image), rows):
        band = image[y : y + rows]
        light = np.exp(-(_DENSITY[band] @ matrix + shift)) * np.float32(256) - np.float32(1)
        np.copyto(band, np.rint(np.clip(light, 0, 255)), casting="unsafe")


DRAW, ALBUMENTATIONS, CROP = 3, 4, 5
"""Purposes of random numbers, part of each seed; ``order.py`` has the others."""


@dataclass(frozen=True)
class AugmentSettings:
    """Variation of tiles in training. Strengths are the largest change; 0 switches one off."""

    augment: Literal["none", "device", "cpu"] = "device"
    """device: flips, turns, stain, brightness on the device; cpu: also affine changes and blur, in reading threads."""
    flip: Rare[bool] = True
    """Flips and quarter turns, all eight orientations equally often."""
    stain_jitter: Rare[float] = 0.05
    """Change of each stain's amount: factor 1 +- this, and +- this in units of optical density."""
    brightness: Rare[float] = 0.1
    """Change of the light: factor 1 +- this."""
    affine: Rare[float] = 0.1
    """cpu only: change of scale and shift, as a part of the tile; rotation up to 90 degrees times this."""
    blur: Rare[float] = 1.0
    """cpu only: largest sigma of a Gaussian blur, in px; every fifth tile is blurred."""

    def validate(self) -> list[str]:
        """Return every fault of these settings, each with its rule and the value received."""
        faults = [
            f"augment {name} is at least 0 and less than 1; got {value:g}"
            for name, value in (
                ("stain-jitter", self.stain_jitter),
                ("brightness", self.brightness),
                ("affine", self.affine),
            )
            if not 0 <= value < 1
        ]
        if self.blur < 0:
            faults.append(f"augment blur is a sigma in px, at least 0; got {self.blur:g}")
        return faults


NO_AUGMENTATION = AugmentSettings(augment="none")


@dataclass(frozen=True, eq=False)
class Draw:
    """Changes of each of n samples: turn, then flip, then colour: normalised, then jittered.

    Attributes:
        quarter_turns: int64 (n,), 0 to 3, counter-clockwise.
        flip: bool (n,), left to right.
        rgb: matrix float32 (n, 3, 3) and shift (n, 3) for optical densities as ``jitter`` gives them; None when the
            settings leave colour alone.
        lms: the same for densities of L, M, S, before those, as ``StainSteps`` has them; None: there is no such step.
    """

    quarter_turns: NDArray[np.int64]
    flip: NDArray[np.bool_]
    rgb: tuple[NDArray[np.float32], NDArray[np.float32]] | None
    lms: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None


def sample_rng(seed: int, sample: int, purpose: int) -> np.random.Generator:
    """Return the random numbers of one sample, the same wherever and whenever it is augmented."""
    return np.random.default_rng([seed, purpose, sample])


def draw(settings: AugmentSettings, seed: int, samples: NDArray[np.int64]) -> Draw:
    """Random numbers of ``samples`` (int64 (n,), global sample numbers), each drawn independently of the others."""
    uniform = np.array([sample_rng(seed, int(sample), DRAW).random(8) for sample in samples]).reshape(-1, 8)
    on = settings.augment != "none"
    orientation = (uniform[:, 0] * 8).astype(np.int64) * (on and settings.flip)
    rgb = None
    if on and (settings.stain_jitter or settings.brightness):
        spread = 2 * uniform[:, 1:] - 1
        rgb = jitter(
            1 + settings.stain_jitter * spread[:, 0:3],
            settings.stain_jitter * spread[:, 3:6],
            1 + settings.brightness * spread[:, 6],
        )
    return Draw(orientation // 2, orientation % 2 == 1, rgb)


BLUR_PROBABILITY = 0.2

_threads = threading.local()
"""Albumentations pipelines of each reading thread: they keep their random state in themselves."""


@dataclass(frozen=True)
class CpuAugment:
    """Changes samples in place."""

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
        if (rgb := draw(self.settings, self.seed, np.array([sample])).rgb) is not None:
            apply_jitter(image, rgb[0][0], rgb[1][0])

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
                fill_mask=IGNORE,  # px from outside the tile
                p=1,
            )
        )
    if settings.blur:
        steps.append(albumentations.GaussianBlur(blur_limit=0, sigma_limit=(0.1, settings.blur), p=BLUR_PROBABILITY))
    return albumentations.Compose(steps)


LOG_LMS_FROM_LAB = np.linalg.inv(LAB_FROM_LOG_LMS)


@dataclass(frozen=True, eq=False)
class StainSteps:
    """Normalisation of the pixels of each slide.

    Attributes:
        method: macenko: density' = density @ matrix, of R, G, B; reinhard: density' = density @ matrix + shift, of
            L, M, S. Densities are row vectors, -ln of light 0 to 1.
        matrix, shift: float64 (slides, 3, 3), (slides, 3).
        slide: number of the slide of each row of a table, int (n,).
    """

    method: Method
    matrix: NDArray[np.float64]
    shift: NDArray[np.float64]
    slide: NDArray[np.int32]

    @classmethod
    def of(
        cls, target: StainFit, fits: Sequence[StainFit | None], slide: NDArray[np.int32] | Sequence[int]
    ) -> StainSteps:
        """Return the steps from each of ``fits`` to ``target``.

        Args:
            fits: one for each slide; None: it stays as it is.
            slide: number of the slide of each row of a table.
        """
        steps = [(np.eye(3), np.zeros(3)) if fit is None else _step(fit, target) for fit in fits]
        matrices, shifts = zip(*steps, strict=True)
        return cls(target.method, np.stack(matrices), np.stack(shifts), np.asarray(slide, np.int32))

    def before(self, drawn: Draw, rows: NDArray[np.int64]) -> Draw:
        """Return ``drawn`` with the normalisation of the tiles ``rows`` before it."""
        slides = self.slide[rows]
        matrix, shift = self.matrix[slides], self.shift[slides].astype(np.float32)
        if self.method == "reinhard":
            return replace(drawn, lms=(matrix.astype(np.float32), shift))
        if drawn.rgb is None:
            return replace(drawn, rgb=(matrix.astype(np.float32), shift))
        return replace(drawn, rgb=((matrix @ drawn.rgb[0]).astype(np.float32), drawn.rgb[1]))


def _step(fit: StainFit, target: StainFit) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Matrix and shift on densities as row vectors."""
    assert fit.method == target.method
    if fit.method == "macenko":
        factors = np.diag(target.amounts / fit.amounts)
        return np.linalg.pinv(fit.stains) @ factors @ target.stains, np.zeros(3)
    scale = target.spread / fit.spread
    # lab' = (lab - mean) * scale + target mean, where lab = -density @ LAB_FROM_LOG_LMS.T
    matrix = LAB_FROM_LOG_LMS.T @ np.diag(scale) @ LOG_LMS_FROM_LAB.T
    return matrix, -(target.mean - fit.mean * scale) @ LOG_LMS_FROM_LAB.T
