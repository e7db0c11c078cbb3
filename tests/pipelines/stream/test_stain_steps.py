"""Stain normalisation on the device, beside the papers' own steps in numpy, and whatever is to stay as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipelines.stream.augment import AugmentSettings, StainSteps, draw
from pipelines.stream.device_pixels import IMAGENET, PixelMaker
from pipelines.tiles.stain_fit import LAB_FROM_LOG_LMS, LMS_FROM_RGB, PUBLISHED, StainFit, fit_pixels

CPU = torch.device("cpu")
NONE = AugmentSettings(augment="none")
MEAN, STD = (np.array(values) for values in IMAGENET)
SLIDES = {
    "macenko": StainFit("macenko", (0.662, 0.648, 0.377, 0.176, 0.851, 0.495, 2.844, 1.741)),
    "reinhard": StainFit("reinhard", (-1.479, -0.145, 0.06, 0.73, 0.126, 0.033)),
}
METHODS = pytest.mark.parametrize("method", ["macenko", "reinhard"])


def tissue(n: int = 4096) -> np.ndarray:
    """uint8 (n, 3): px of ``SLIDES["macenko"]``, strongly stained ones and pale ones."""
    amounts = np.random.default_rng(3).uniform(0, 1, (n, 2)) ** 2 * SLIDES["macenko"].amounts
    return np.clip(np.rint(256 * np.exp(-amounts @ SLIDES["macenko"].stains) - 1), 0, 255).astype(np.uint8)


def maker(steps: StainSteps | None, settings: AugmentSettings = NONE) -> PixelMaker:
    return PixelMaker(CPU, settings, 5, channels_last=False, stains=steps)


def levels(images: torch.Tensor) -> np.ndarray:
    """0 to 255, (m, h, w, 3), of what the model gets."""
    return 255 * (images.double().numpy().transpose(0, 2, 3, 1) * STD + MEAN)


def made(steps: StainSteps, pixels: np.ndarray, rows: list[int], settings: AugmentSettings = NONE) -> np.ndarray:
    """What becomes of the same ``pixels`` as tiles of each of ``rows``, as levels."""
    images = torch.from_numpy(np.repeat(pixels.reshape(1, 64, -1, 3), len(rows), 0))
    whole, _ = maker(steps, settings).make(images, None, np.arange(len(rows)), np.array(rows))
    assert whole is not None
    return levels(whole).reshape(len(rows), -1, 3)


def by_macenko(pixels: np.ndarray, fit: StainFit, target: StainFit) -> np.ndarray:
    density = -np.log((pixels + 1.0) / 256)
    amounts = np.linalg.lstsq(fit.stains.T, density.T, rcond=None)[0].T
    return 256 * np.exp(-(amounts / fit.amounts * target.amounts) @ target.stains) - 1


def by_reinhard(pixels: np.ndarray, fit: StainFit, target: StainFit) -> np.ndarray:
    lab = np.log((pixels + 1.0) / 256 @ LMS_FROM_RGB.T) @ LAB_FROM_LOG_LMS.T
    moved = (lab - fit.mean) / fit.spread * target.spread + target.mean
    lms = np.exp(np.linalg.solve(LAB_FROM_LOG_LMS, moved.T))
    return 256 * np.linalg.solve(LMS_FROM_RGB, lms).T - 1


@METHODS
def test_tissue_becomes_what_the_paper_says(method: str) -> None:
    fit, target, pixels = SLIDES[method], PUBLISHED[method], tissue()  # type: ignore[index]
    pixels[:10] = 255, 255, 255
    steps = StainSteps.of(target, [None, fit], [0, 1, 1])
    left, normal, again = made(steps, pixels, [0, 1, 2])
    assert np.abs(left - pixels).max() < 2e-3, "a slide without a fit stays as it is"
    assert np.array_equal(normal, again)
    assert np.abs(normal[:10] - 255).max() < 1e-3, "white stays white"
    expected = (by_macenko if method == "macenko" else by_reinhard)(pixels, fit, target)
    stained = (-np.log((pixels + 1.0) / 256) >= 0.15).all(1)
    assert stained.sum() > 2000
    assert np.abs(normal - np.clip(expected, 0, 255))[stained].max() < 5e-3
    assert np.abs(normal - pixels).max() > 20


@METHODS
def test_what_is_normalised_has_the_stain_of_the_target(method: str) -> None:
    pixels = tissue(40_960)
    pixels = pixels[(pixels <= 219).all(1)][:32_768]
    fit, target = fit_pixels(pixels, method), PUBLISHED[method]  # type: ignore[arg-type,index]
    normal = made(StainSteps.of(target, [fit], [0]), pixels, [0])[0]
    if method == "macenko":
        numbers = fit_pixels(np.rint(normal).astype(np.uint8), method).numbers
    else:  # of the same px, also of those that are pale now
        lab = np.log((normal + 1) / 256 @ LMS_FROM_RGB.T) @ LAB_FROM_LOG_LMS.T
        numbers = (*lab.mean(0), *lab.std(0))
    assert numbers == pytest.approx(target.numbers, abs=0.05)
    assert np.abs(np.subtract(fit.numbers, target.numbers)).max() > 0.3


@METHODS
def test_jitter_follows_normalisation(method: str) -> None:
    settings = AugmentSettings(flip=False, stain_jitter=0.1, brightness=0.1)
    steps = StainSteps.of(PUBLISHED[method], [SLIDES[method]], [0])  # type: ignore[index]
    pixels = tissue()
    normal, both = (made(steps, pixels, [0, 0], how) for how in (NONE, settings))
    jitter = draw(settings, 5, np.arange(2))
    assert jitter.matrix is not None
    assert jitter.shift is not None
    for k in range(2):
        density = -np.log((normal[k] + 1) / 256) @ jitter.matrix[k] + jitter.shift[k]
        expected = np.clip(256 * np.exp(-density) - 1, 0, 255)
        inside = (normal[k] > 0).all(1) & (normal[k] < 255).all(1)  # a limit between the two is not drawn
        assert inside.sum() > 3000
        assert np.abs(both[k] - expected)[inside].max() < 5e-3


@METHODS
def test_microbatches_do_not_matter(method: str) -> None:
    settings = AugmentSettings()
    fits = [None, SLIDES[method]]
    pixels = maker(StainSteps.of(PUBLISHED[method], fits, [0, 1, 1, 0]), settings)  # type: ignore[index]
    images = torch.from_numpy(tissue(4 * 400).reshape(4, 20, 20, 3))
    samples, rows = np.arange(10, 14), np.array([3, 1, 0, 2])
    together, _ = pixels.make(images, None, samples, rows)
    assert together is not None
    for k in range(4):
        alone, _ = pixels.make(images[k : k + 1], None, samples[k : k + 1], rows[k : k + 1])
        assert alone is not None
        assert torch.equal(alone[0], together[k])
