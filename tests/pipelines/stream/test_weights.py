"""Weights of tiles: slides equally often; the px of classes equally often, as far as tiles have them."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.stream.order import IN_TURN, pixel_weights, slide_weights


def test_slides_weigh_alike() -> None:
    slide = np.array([0, 0, 0, 2, 5, 5])  # numbers of slides without a tile are left out
    weights = slide_weights(slide)
    assert weights.sum() == pytest.approx(1)
    assert np.bincount(slide, weights)[[0, 2, 5]] == pytest.approx([1 / 3] * 3)
    assert weights[:3] == pytest.approx([1 / 9] * 3)


def shown(areas: np.ndarray) -> np.ndarray:
    """Share of each class of the px that are shown."""
    px = pixel_weights(areas) @ areas
    return px / px.sum()


def test_rare_classes_are_shown_as_much_as_common_ones_where_tiles_allow() -> None:
    rng = np.random.default_rng(0)
    tumour, stroma = 4096 * (rng.random(500) < 0.03), 4096 * (rng.random(500) < 0.2)
    stroma = np.where(tumour > 0, 0, stroma)
    areas = np.stack([4096 - tumour - stroma, stroma, tumour], 1)
    assert areas.sum(0)[2] < 0.1 * areas.sum(0)[0]
    assert shown(areas) == pytest.approx([1 / 3] * 3, abs=1e-6)
    mixed = np.stack([4096 - 3000 * (tumour > 0), 3000 * (tumour > 0)], 1)
    assert shown(mixed) == pytest.approx([1 / 2] * 2, abs=1e-4)


def test_a_class_that_is_never_large_is_shown_as_much_as_can_be_and_the_rest_is_still_seen() -> None:
    areas = np.array([[4096, 0]] * 90 + [[3686, 410]] * 10)
    weights = pixel_weights(areas)
    assert (weights > 0).all()
    assert weights[90:].sum() == pytest.approx(1 - IN_TURN / 2 + IN_TURN / 2 * 10 * 3686 / areas[:, 0].sum(), abs=1e-3)
    assert shown(areas)[1] > 7 * areas[:, 1].sum() / areas.sum()


def test_what_is_ignored_is_not_drawn() -> None:
    areas = np.array([[10, 0, 0], [0, 0, 10], [0, 0, 0]])
    assert pixel_weights(areas).tolist() == pytest.approx([0.5, 0.5, 0])
    with pytest.raises(ValueError, match="nothing on any of them"):
        pixel_weights(np.zeros((3, 2), np.int64))
