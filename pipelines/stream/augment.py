"""Augmentation: what may change in a tile, and the random numbers for it.

Takes settings, the run's seed and sample numbers; gives the numbers each sample is changed by. They depend on nothing
else, so every rank, thread and resumed run draws the same. ``cpu_augment.py`` applies them on the CPU with
albumentations, ``device.py`` on the device that trains. Stain jitter after Tellez et al. 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipelines.slides.rare import Rare
from pipelines.stream import stain

DRAW, ALBUMENTATIONS, CROP = 3, 4, 5
"""Purposes of random numbers, part of each seed; ``order.py`` has 1 and 2."""


@dataclass(frozen=True)
class AugmentSettings:
    """How tiles are varied in training. Strengths are the largest change; 0 switches one off."""

    augment: Literal["none", "device", "cpu"] = "device"
    """device: flips, quarter turns, stain, brightness, where the model runs; cpu: also affine changes and blur, in
    the reading threads, which costs more there than reading; none: tiles as they are. With
    --pictures resize, device stands for random crops and left-right flips, and for nothing else."""
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


@dataclass(frozen=True, eq=False)
class Draw:
    """What is done to each of n samples: turn, then flip, then colour: normalised, then jittered.

    Attributes:
        quarter_turns: int64 (n,), 0 to 3, counter-clockwise.
        flip: bool (n,), left to right.
        matrix, shift: float32 (n, 3, 3), (n, 3), for optical densities as ``stain.jitter`` gives them; None when the
            settings leave colour alone.
        lms: float32 (n, 3, 3), (n, 3), matrix and shift for densities of L, M, S, before those, as ``stain_steps``
            has them; None: there is no such step.
    """

    quarter_turns: NDArray[np.int64]
    flip: NDArray[np.bool_]
    matrix: NDArray[np.float32] | None
    shift: NDArray[np.float32] | None
    lms: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None


def sample_rng(seed: int, sample: int, purpose: int) -> np.random.Generator:
    """Return the random numbers of one sample, the same wherever and whenever it is augmented."""
    return np.random.default_rng([seed, purpose, sample])


def draw(settings: AugmentSettings, seed: int, samples: NDArray[np.int64]) -> Draw:
    """Random numbers of ``samples`` (int64 (n,), global sample numbers), each drawn independently of the others."""
    uniform = np.array([sample_rng(seed, int(sample), DRAW).random(8) for sample in samples]).reshape(-1, 8)
    on = settings.augment != "none"
    orientation = (uniform[:, 0] * 8).astype(np.int64) * (on and settings.flip)
    matrix = shift = None
    if on and (settings.stain_jitter or settings.brightness):
        spread = 2 * uniform[:, 1:] - 1
        matrix, shift = stain.jitter(
            1 + settings.stain_jitter * spread[:, 0:3],
            settings.stain_jitter * spread[:, 3:6],
            1 + settings.brightness * spread[:, 6],
        )
    return Draw(orientation // 2, orientation % 2 == 1, matrix, shift)
