"""How often each tile is drawn, so that slides, or the pixels of classes, are shown equally often.

Takes the slide of each tile, or the area of each class on it; gives weights whose sum is 1, for ``TileStream.weigh``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IN_TURN = 0.5
"""Part of the draws that go to the classes in turn: a tile that is background throughout is seen, however much of the
rare classes' tiles is background, too."""

ROUNDS = 2000
"""Steps towards equal pixels: each is an update of a few numbers, and far fewer are needed."""


def slide_weights(slide: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return weights (n,) by which each slide is drawn equally often, and so are the tiles of one slide."""
    tiles: NDArray[np.float64] = np.bincount(slide).astype(np.float64)
    weights: NDArray[np.float64] = 1 / tiles[slide] / np.count_nonzero(tiles)
    return weights


def pixel_weights(areas: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return weights (n,) by which the px of each class are shown as equally often as the tiles allow.

    A draw is for a class, and finds a tile in proportion to its px of that class. Half of the draws go to the classes
    in turn. How the other half is shared out among them is what shows their px most equally: it maximises the sum of
    the logarithms of the px shown of each class, by the multiplicative updates of expectation maximisation: of tiles
    without ignored px that is equality wherever the free half can bring it about.

    Args:
        areas: (n, C), px or points of each class on each tile; a class without any takes no part, and a tile without
            any is not drawn.

    Raises:
        ValueError: there is nothing on any tile.
    """
    totals = areas.sum(0)
    drawn = areas[:, totals > 0].astype(np.float64)
    if not drawn.size:
        raise ValueError("--sample pixels needs something drawn on the training tiles; there is nothing on any of them")
    of_class = drawn / drawn.sum(0)  # (n, C'), chance of each tile when a draw is for a class
    shown = of_class.T @ drawn  # (C', C'), px of each class that a draw for a class shows
    classes = len(shown)
    even = np.full(classes, 1 / classes)
    free = even
    for _ in range(ROUNDS):
        share = (IN_TURN * even + (1 - IN_TURN) * free) @ shown
        updated = free * (shown @ (even / share))
        updated /= updated.sum()
        if np.abs(updated - free).max() < 1e-9:
            break
        free = updated
    weights: NDArray[np.float64] = of_class @ (IN_TURN * even + (1 - IN_TURN) * free)
    return weights
