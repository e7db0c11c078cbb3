"""The class of a tile from the areas drawn on it.

Takes the areas of all classes on each tile, class 0 being the background; gives a class for each tile, by the rule that
``--tile-label`` names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

NOTHING_COUNTS = -1
"""Class of a tile all of which is ignored."""


@dataclass(frozen=True, slots=True)
class TileLabel:
    """Rule by which a tile gets its class.

    Attributes:
        least: fraction of what counts on the tile that the largest drawn class must cover, 0 for any of it, or else
            the tile is background. None: the class that covers most, background included.
    """

    least: float | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the rule called majority or any, or of a fraction.

        Raises:
            ValueError: it is none of them.
        """
        if text == "majority":
            return cls(None)
        if text == "any":
            return cls(0.0)
        if not re.fullmatch(r"[0-9]*\.?[0-9]+", text) or not 0 < float(text) <= 1:
            raise ValueError(f"--tile-label is majority, any, or a fraction above 0 and up to 1; got {text!r}")
        return cls(float(text))

    @property
    def counts_any(self) -> bool:
        """Whether the smallest area counts."""
        return self.least == 0

    def classes(self, areas: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the class of each tile, int64 (n,), or ``NOTHING_COUNTS``.

        Args:
            areas: (n, C), of each class on each tile; what is ignored is in none of them.
        """
        counted = areas.sum(axis=1)
        if self.least is None:
            classes = areas.argmax(axis=1)
        else:
            drawn = areas[:, 1:]
            covers = (drawn.max(axis=1) >= self.least * counted) & (drawn.max(axis=1) > 0)
            classes = np.where(covers, drawn.argmax(axis=1) + 1, 0)
        return np.where(counted > 0, classes, NOTHING_COUNTS).astype(np.int64)
