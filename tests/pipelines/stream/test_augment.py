"""Random numbers belong to samples: the same alone or in a batch, in any thread, and spread as the settings say."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pipelines.stream.augment import AugmentSettings, CpuAugment, draw

CPU = AugmentSettings(augment="cpu")


def test_a_sample_draws_the_same_in_any_company() -> None:
    settings = AugmentSettings()
    together = draw(settings, 5, np.array([3, 1000, 7]))
    alone = draw(settings, 5, np.array([1000]))
    assert together.matrix is not None
    assert alone.matrix is not None
    assert together.quarter_turns[1] == alone.quarter_turns[0]
    assert (together.matrix[1] == alone.matrix[0]).all()
    assert not (together.matrix[0] == alone.matrix[0]).any()


def test_all_eight_orientations_come_equally_often() -> None:
    drawn = draw(AugmentSettings(), 0, np.arange(1600))
    counts = np.bincount(drawn.quarter_turns * 2 + drawn.flip, minlength=8)
    assert counts.min() > 150
    assert counts.max() < 250


def test_what_is_off_changes_nothing() -> None:
    drawn = draw(AugmentSettings(flip=False, stain_jitter=0, brightness=0), 0, np.arange(20))
    assert not drawn.quarter_turns.any()
    assert not drawn.flip.any()
    assert drawn.matrix is None
    assert draw(AugmentSettings(augment="none"), 0, np.arange(20)).matrix is None


def tile(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A tile whose mask is its red channel, in blocks of 8 px."""
    rng = np.random.default_rng(seed)
    mask = np.kron(rng.integers(0, 4, (8, 8)), np.ones((8, 8))).astype(np.uint8)
    return np.repeat(mask[..., None] * 60, 3, axis=2), mask


@pytest.mark.parametrize("width", [64, 40])
def test_tile_and_mask_move_together(width: int) -> None:
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


def test_px_from_outside_a_tile_do_not_count() -> None:
    augment = CpuAugment(AugmentSettings(augment="cpu", stain_jitter=0, brightness=0, blur=0), 0)
    image, mask = np.zeros((64, 64, 3), np.uint8), np.ones((64, 64), np.uint8)
    augment.apply(0, image, mask)
    assert np.unique(mask).tolist() == [1, 255]
    assert np.mean((mask == 255) == (image[..., 0] > 127)) > 0.98


def test_samples_are_varied_alike_in_any_thread_and_order() -> None:
    augment = CpuAugment(CPU, 1)

    def varied(sample: int) -> bytes:
        image, mask = tile(0)
        augment.apply(sample, image, mask)
        return image.tobytes() + mask.tobytes()

    one_by_one = [varied(sample) for sample in range(12)]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(varied, reversed(range(12)))) == one_by_one[::-1]
    assert len(set(one_by_one)) == 12


def test_a_class_label_is_left_alone() -> None:
    image, _ = tile(0)
    label = np.array(3)
    CpuAugment(CPU, 1).apply(0, image, label)
    assert label == 3


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (AugmentSettings(stain_jitter=1.0), "stain-jitter is at least 0 and less than 1; got 1"),
        (AugmentSettings(affine=-0.1), "affine is at least 0 and less than 1; got -0.1"),
        (AugmentSettings(blur=-1), "blur is a sigma in px, at least 0; got -1"),
    ],
)
def test_faults_are_named(settings: AugmentSettings, fault: str) -> None:
    assert any(fault in found for found in settings.validate())
