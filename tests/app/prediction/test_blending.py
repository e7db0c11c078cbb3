"""Windows blended in a few rows of memory are the weighted mean that one would write out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from app.prediction import blending
from app.prediction.blending import Blender, chunks, gaussian_window


def blended(blender, windows, height):
    rows, row = [], 0
    for x, y, values in windows:
        if y > row:
            rows += blender.rows_above(y)
            row = y
        blender.add(x, y, values)
    return np.concatenate([*rows, *blender.rows_above(height)], axis=1)


def test_two_windows_that_overlap_by_one_column(tmp_path):
    weights = np.array([[1.0, 3.0], [1.0, 3.0]], np.float32)
    windows = [
        (0, 0, np.full((1, 2, 2), 0.2, np.float32)),
        (1, 0, np.full((1, 2, 2), 0.6, np.float32)),
    ]
    with Blender(1, 4, 3, weights, tmp_path) as blender:
        done = blended(blender, windows, 3)
    middle = (3 * 0.2 + 1 * 0.6) / (3 + 1)
    expected = [[0.2, middle, 0.6, 0.0], [0.2, middle, 0.6, 0.0], [0.0, 0.0, 0.0, 0.0]]
    np.testing.assert_allclose(done[0], expected, rtol=1e-6)


@pytest.mark.parametrize("spilled", [False, True])
def test_any_windows_equal_sums_over_the_whole_canvas(spilled, tmp_path, monkeypatch):
    if spilled:
        monkeypatch.setattr(blending, "SPILL_BYTES", 64)  # a file, let go of again and again
    random = np.random.default_rng(3)
    height, width, side = 41, 23, 7
    weights = gaussian_window(side)
    origins = [(x, y) for y in (0, 3, 6, 20, 34) for x in (0, 5, 9, 16) if random.random() < 0.8]
    windows = [(x, y, random.random((2, side, side)).astype(np.float32)) for x, y in origins]
    sums, total = np.zeros((2, height, width)), np.zeros((height, width))
    for x, y, values in windows:
        sums[:, y : y + side, x : x + side] += values * weights
        total[y : y + side, x : x + side] += weights
    expected = np.divide(sums, total, out=np.zeros_like(sums), where=total > 0)
    with Blender(2, width, height, weights, tmp_path) as blender:
        done = blended(blender, windows, height)
    np.testing.assert_allclose(done, expected, atol=1e-6)
    assert not list(tmp_path.iterdir())


def test_a_window_that_reaches_beyond_the_canvas_is_cut_off(tmp_path):
    with Blender(1, 2, 2, gaussian_window(4), tmp_path) as blender:
        done = blended(blender, [(0, 0, np.full((1, 4, 4), 0.5, np.float32))], 2)
    np.testing.assert_allclose(done, np.full((1, 2, 2), 0.5), rtol=1e-6)


def test_the_gaussian_has_an_eighth_of_the_side_as_its_deviation():
    weights = gaussian_window(9)
    assert weights[4, 4] == 1
    assert weights[4, 5] == weights[5, 4] == pytest.approx(np.exp(-0.5 * (1 / (9 / 8)) ** 2))
    assert weights[0, 0] == pytest.approx(1e-3)  # never 0: a corner may be all that there is


def test_bands_are_cut_anew():
    bands = [np.arange(k * 2).reshape(1, k, 2) + 100 * k for k in (3, 1, 7, 2)]
    cut = list(chunks(iter(bands), 4))
    assert [chunk.shape[1] for chunk in cut] == [4, 4, 4, 1]
    np.testing.assert_array_equal(np.concatenate(cut, 1), np.concatenate(bands, 1))
