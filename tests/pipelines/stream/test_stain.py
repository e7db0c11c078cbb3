"""Stain separation and jitter against the definitions of Ruifrok & Johnston and Tellez et al."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.stream.augment import HED_FROM_RGB, RGB_FROM_HED, apply_jitter, jitter


def colours(height: int = 16, width: int = 24) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.uint8)


def test_without_change_every_pixel_value_stays() -> None:
    image = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
    matrix, shift = jitter(np.ones((1, 3)), np.zeros((1, 3)), np.ones(1))
    changed = image.copy()
    apply_jitter(changed, matrix[0], shift[0])
    assert (changed == image).all()


def test_a_pure_stain_changes_in_amount_alone() -> None:
    """Two units of haematoxylin, doubled, are four; eosin's factor does not matter to it."""
    for k in range(3):
        alpha = np.full((1, 3), 7.0)
        alpha[0, k] = 2.0
        matrix, shift = jitter(alpha, np.zeros((1, 3)), np.ones(1))
        density = 0.9 * RGB_FROM_HED[k]
        assert density @ matrix[0] + shift[0] == pytest.approx(2 * density, abs=1e-6)


def test_jitter_is_separation_change_and_recombination() -> None:
    rng = np.random.default_rng(1)
    alpha, beta = rng.uniform(0.9, 1.1, (4, 3)), rng.uniform(-0.1, 0.1, (4, 3))
    density = rng.uniform(0, 3, (10, 3))
    matrix, shift = jitter(alpha, beta, np.ones(4))
    for n in range(4):
        amounts = density @ HED_FROM_RGB
        expected = (amounts * alpha[n] + beta[n]) @ RGB_FROM_HED
        assert density @ matrix[n] + shift[n] == pytest.approx(expected, abs=1e-5)


def test_gain_is_a_factor_of_the_light() -> None:
    image = np.full((1, 1, 3), 99, np.uint8)
    matrix, shift = jitter(np.ones((1, 3)), np.zeros((1, 3)), np.array([1.2]))
    apply_jitter(image, matrix[0], shift[0])
    assert image.tolist() == [[[119, 119, 119]]]  # (99 + 1) * 1.2 - 1


def test_large_tiles_are_changed_in_bands_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, shift = jitter(np.full((1, 3), 1.1), np.full((1, 3), 0.02), np.ones(1))
    whole, banded = colours(), colours()
    apply_jitter(whole, matrix[0], shift[0])
    monkeypatch.setattr("pipelines.stream.augment._BAND_PIXELS", 3 * 24)
    apply_jitter(banded, matrix[0], shift[0])
    assert (whole == banded).all()
    assert (whole != colours()).any()


def test_the_stains_are_those_of_the_paper() -> None:
    assert np.linalg.norm(RGB_FROM_HED, axis=1) == pytest.approx([1, 1, 1])
    assert RGB_FROM_HED[0] == pytest.approx([0.65, 0.70, 0.29], abs=0.01)
    assert RGB_FROM_HED[1] == pytest.approx([0.07, 0.99, 0.11], abs=0.01)
