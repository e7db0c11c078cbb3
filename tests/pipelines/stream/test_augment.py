"""Variations of tiles belong to samples; stains change as the papers say (Ruifrok, Tellez, Macenko, Reinhard)."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from pipelines.stream.augment import (
    HED_FROM_RGB,
    RGB_FROM_HED,
    AugmentSettings,
    CpuAugment,
    StainSteps,
    apply_jitter,
    draw,
    jitter,
)
from pipelines.stream.device_pixels import IMAGENET, PixelMaker
from pipelines.tiles.stain import LAB_FROM_LOG_LMS, LMS_FROM_RGB, PUBLISHED, StainFit, fit_pixels


def test_a_sample_draws_the_same_in_any_company():
    together = draw(AugmentSettings(), 5, np.array([3, 1000, 7]))
    alone = draw(AugmentSettings(), 5, np.array([1000]))
    assert together.quarter_turns[1] == alone.quarter_turns[0]
    assert (together.rgb[0][1] == alone.rgb[0][0]).all()
    assert not (together.rgb[0][0] == alone.rgb[0][0]).any()


def test_all_eight_orientations_come_equally_often_and_what_is_off_changes_nothing():
    drawn = draw(AugmentSettings(), 0, np.arange(1600))
    counts = np.bincount(drawn.quarter_turns * 2 + drawn.flip, minlength=8)
    assert 150 < counts.min() <= counts.max() < 250
    off = draw(AugmentSettings(flip=False, stain_jitter=0, brightness=0), 0, np.arange(20))
    assert not off.quarter_turns.any()
    assert not off.flip.any()
    assert off.rgb is None
    assert draw(AugmentSettings(augment="none"), 0, np.arange(20)).rgb is None


def tile(seed):
    """A tile whose mask is its red channel, in blocks of 8 px."""
    rng = np.random.default_rng(seed)
    mask = np.kron(rng.integers(0, 4, (8, 8)), np.ones((8, 8))).astype(np.uint8)
    return np.repeat(mask[..., None] * 60, 3, axis=2), mask


@pytest.mark.parametrize("width", [64, 40])
def test_tile_and_mask_move_together(width):
    augment = CpuAugment(AugmentSettings(augment="cpu", stain_jitter=0, brightness=0, blur=0), 0)
    for sample in range(20):
        image, mask = (np.ascontiguousarray(part[:, :width]) for part in tile(sample))
        before = mask.copy()
        augment.apply(sample, image, mask)
        inside = mask != 255
        # Bilinear pixels at the edges of blocks differ; the bulk must not.
        assert np.mean(np.abs(image[..., 0][inside].astype(int) - mask[inside] * 60) <= 30) > 0.9
        assert inside.mean() > 0.5
        assert not (mask == before).all()


def test_px_from_outside_a_tile_do_not_count():
    augment = CpuAugment(AugmentSettings(augment="cpu", stain_jitter=0, brightness=0, blur=0), 0)
    image, mask = np.zeros((64, 64, 3), np.uint8), np.ones((64, 64), np.uint8)
    augment.apply(0, image, mask)
    assert np.unique(mask).tolist() == [1, 255]
    assert np.mean((mask == 255) == (image[..., 0] > 127)) > 0.98


def test_samples_are_varied_alike_in_any_thread_and_order_and_labels_left_alone():
    augment = CpuAugment(AugmentSettings(augment="cpu"), 1)

    def varied(sample):
        image, mask = tile(0)
        augment.apply(sample, image, mask)
        return image.tobytes() + mask.tobytes()

    one_by_one = [varied(sample) for sample in range(12)]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(varied, reversed(range(12)))) == one_by_one[::-1]
    assert len(set(one_by_one)) == 12
    label = np.array(3)
    augment.apply(0, tile(0)[0], label)
    assert label == 3


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (AugmentSettings(stain_jitter=1.0), "stain-jitter is at least 0 and less than 1; got 1"),
        (AugmentSettings(affine=-0.1), "affine is at least 0 and less than 1; got -0.1"),
        (AugmentSettings(blur=-1), "blur is a sigma in px, at least 0; got -1"),
    ],
)
def test_faults_are_named(settings, fault):
    assert any(fault in found for found in settings.validate())


UNCHANGED, NO_SHIFT = np.ones((1, 3)), np.zeros((1, 3))


def jittered(pixels, alpha, beta, gain=1.0):
    matrix, shift = jitter(alpha, beta, np.array([gain]))
    changed = pixels.copy()
    apply_jitter(changed, matrix[0], shift[0])
    return changed


def test_without_change_every_pixel_value_stays_and_gain_is_a_factor_of_the_light():
    image = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
    assert (jittered(image, UNCHANGED, NO_SHIFT) == image).all()
    brighter = jittered(np.full((1, 1, 3), 99, np.uint8), UNCHANGED, NO_SHIFT, gain=1.2)
    assert brighter.tolist() == [[[119, 119, 119]]]  # (99 + 1) * 1.2 - 1


@pytest.mark.parametrize("stain", range(3))
def test_a_pure_stain_changes_in_amount_alone(stain):
    """Two units of haematoxylin, doubled, are four; eosin's factor does not matter to it."""
    alpha = np.full((1, 3), 7.0)
    alpha[0, stain] = 2.0
    matrix, shift = jitter(alpha, NO_SHIFT, np.ones(1))
    density = 0.9 * RGB_FROM_HED[stain]
    assert density @ matrix[0] + shift[0] == pytest.approx(2 * density, abs=1e-6)


def test_jitter_is_separation_change_and_recombination():
    rng = np.random.default_rng(1)
    alpha, beta = rng.uniform(0.9, 1.1, (4, 3)), rng.uniform(-0.1, 0.1, (4, 3))
    density = rng.uniform(0, 3, (10, 3))
    matrix, shift = jitter(alpha, beta, np.ones(4))
    for n in range(4):
        expected = (density @ HED_FROM_RGB * alpha[n] + beta[n]) @ RGB_FROM_HED
        assert density @ matrix[n] + shift[n] == pytest.approx(expected, abs=1e-5)


def test_large_tiles_are_changed_in_bands_alike(monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3)).astype(np.uint8)
    alpha, beta = np.full((1, 3), 1.1), np.full((1, 3), 0.02)
    whole = jittered(pixels, alpha, beta)
    monkeypatch.setattr("pipelines.stream.augment._BAND_PIXELS", 3 * 24)
    assert (whole == jittered(pixels, alpha, beta)).all()
    assert (whole != pixels).any()


def test_the_stains_are_those_of_the_paper():
    assert np.linalg.norm(RGB_FROM_HED, axis=1) == pytest.approx([1, 1, 1])
    assert RGB_FROM_HED[0] == pytest.approx([0.65, 0.70, 0.29], abs=0.01)
    assert RGB_FROM_HED[1] == pytest.approx([0.07, 0.99, 0.11], abs=0.01)


NONE = AugmentSettings(augment="none")
MEAN, STD = (np.array(values) for values in IMAGENET)
SLIDES = {
    "macenko": StainFit("macenko", (0.662, 0.648, 0.377, 0.176, 0.851, 0.495, 2.844, 1.741)),
    "reinhard": StainFit("reinhard", (-1.479, -0.145, 0.06, 0.73, 0.126, 0.033)),
}
METHODS = pytest.mark.parametrize("method", ["macenko", "reinhard"])


def tissue(n=4096):
    """uint8 (n, 3): px of ``SLIDES["macenko"]``, strongly stained ones and pale ones."""
    amounts = np.random.default_rng(3).uniform(0, 1, (n, 2)) ** 2 * SLIDES["macenko"].amounts
    return np.clip(np.rint(256 * np.exp(-amounts @ SLIDES["macenko"].stains) - 1), 0, 255).astype(np.uint8)


def maker(steps, settings=NONE):
    return PixelMaker(torch.device("cpu"), settings, 5, channels_last=False, stains=steps)


def made(steps, pixels, rows, settings=NONE):
    """What becomes of the same ``pixels`` as tiles of each of ``rows``, as levels from 0 to 255."""
    images = torch.from_numpy(np.repeat(pixels.reshape(1, 64, -1, 3), len(rows), 0))
    whole, _ = maker(steps, settings).make(images, None, np.arange(len(rows)), np.array(rows))
    return 255 * (whole.double().numpy().transpose(0, 2, 3, 1) * STD + MEAN).reshape(len(rows), -1, 3)


def by_macenko(pixels, fit, target):
    density = -np.log((pixels + 1.0) / 256)
    amounts = np.linalg.lstsq(fit.stains.T, density.T, rcond=None)[0].T
    return 256 * np.exp(-(amounts / fit.amounts * target.amounts) @ target.stains) - 1


def lab_of(pixels):
    return np.log((pixels + 1.0) / 256 @ LMS_FROM_RGB.T) @ LAB_FROM_LOG_LMS.T


def by_reinhard(pixels, fit, target):
    moved = (lab_of(pixels) - fit.mean) / fit.spread * target.spread + target.mean
    lms = np.exp(np.linalg.solve(LAB_FROM_LOG_LMS, moved.T))
    return 256 * np.linalg.solve(LMS_FROM_RGB, lms).T - 1


@METHODS
def test_tissue_becomes_what_the_paper_says(method):
    fit, target, pixels = SLIDES[method], PUBLISHED[method], tissue()
    pixels[:10] = 255, 255, 255
    left, normal, again = made(StainSteps.of(target, [None, fit], [0, 1, 1]), pixels, [0, 1, 2])
    assert np.abs(left - pixels).max() < 2e-3, "a slide without a fit stays as it is"
    assert np.array_equal(normal, again)
    assert np.abs(normal[:10] - 255).max() < 1e-3, "white stays white"
    expected = (by_macenko if method == "macenko" else by_reinhard)(pixels, fit, target)
    stained = (-np.log((pixels + 1.0) / 256) >= 0.15).all(1)
    assert stained.sum() > 2000
    assert np.abs(normal - np.clip(expected, 0, 255))[stained].max() < 5e-3
    assert np.abs(normal - pixels).max() > 20


@METHODS
def test_what_is_normalised_has_the_stain_of_the_target(method):
    pixels = tissue(40_960)
    pixels = pixels[(pixels <= 219).all(1)][:32_768]
    fit, target = fit_pixels(pixels, method), PUBLISHED[method]
    normal = made(StainSteps.of(target, [fit], [0]), pixels, [0])[0]
    if method == "macenko":
        numbers = fit_pixels(np.rint(normal).astype(np.uint8), method).numbers
    else:  # of the same px, also of those that are pale now
        numbers = (*lab_of(normal).mean(0), *lab_of(normal).std(0))
    assert numbers == pytest.approx(target.numbers, abs=0.05)
    assert np.abs(np.subtract(fit.numbers, target.numbers)).max() > 0.3


@METHODS
def test_jitter_follows_normalisation(method):
    settings = AugmentSettings(flip=False, stain_jitter=0.1, brightness=0.1)
    steps = StainSteps.of(PUBLISHED[method], [SLIDES[method]], [0])
    normal, both = (made(steps, tissue(), [0, 0], how) for how in (NONE, settings))
    drawn = draw(settings, 5, np.arange(2))
    for k in range(2):
        density = -np.log((normal[k] + 1) / 256) @ drawn.rgb[0][k] + drawn.rgb[1][k]
        expected = np.clip(256 * np.exp(-density) - 1, 0, 255)
        inside = (normal[k] > 0).all(1) & (normal[k] < 255).all(1)  # a limit between the two is not drawn
        assert inside.sum() > 3000
        assert np.abs(both[k] - expected)[inside].max() < 5e-3


@METHODS
def test_microbatches_do_not_matter(method):
    pixels = maker(StainSteps.of(PUBLISHED[method], [None, SLIDES[method]], [0, 1, 1, 0]), AugmentSettings())
    images = torch.from_numpy(tissue(4 * 400).reshape(4, 20, 20, 3))
    samples, rows = np.arange(10, 14), np.array([3, 1, 0, 2])
    together, _ = pixels.make(images, None, samples, rows)
    for k in range(4):
        alone, _ = pixels.make(images[k : k + 1], None, samples[k : k + 1], rows[k : k + 1])
        assert torch.equal(alone[0], together[k])
