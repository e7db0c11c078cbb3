"""Where the tiles of a cache lie: 48 bytes for each tile, in sorted arrays.

Takes the places of shards; finds the shard and slot of a place. A dictionary would take ten times as much in each rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.cache.tile_kind import Place

GONE = -1
"""Shard of a tile that was found damaged."""

FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xFF51AFD7ED558CCD], np.uint64)


@dataclass(frozen=True, eq=False)
class _Block:
    """Tiles sorted by key: uint64 (n,), int64 (n, 4), and int32 (n, 2) with shard and slot."""

    keys: NDArray[np.uint64]
    places: NDArray[np.int64]
    at: NDArray[np.int32]


class PlaceIndex:
    """Shard and slot by place. Blocks are merged when the last is as large as the one before: n log n for n tiles."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def add(self, places: NDArray[np.int64], shard: int) -> None:
        """Add the tiles of ``shard``, whose places are the rows of ``places``; rows of zeros are empty slots."""
        slots = np.flatnonzero(places.any(axis=1))
        at = np.stack([np.full(len(slots), shard), slots], axis=1).astype(np.int32)
        block = _sorted(_keys(places[slots]), places[slots], at)
        while self._blocks and len(self._blocks[-1].keys) <= len(block.keys):
            other = self._blocks.pop()
            block = _sorted(
                *(np.concatenate([getattr(b, n) for b in (other, block)]) for n in ("keys", "places", "at"))
            )
        self._blocks.append(block)

    def find(self, place: Place) -> tuple[int, int] | None:
        """Return shard and slot of the tile at ``place``: of several, the latest; None if there is none."""
        matches = [block.at[row].tolist() for block, row in self._rows(place)]
        shard, slot = max(matches, default=(GONE, 0))
        return None if shard == GONE else (shard, slot)

    def drop(self, place: Place, there: tuple[int, int]) -> None:
        """Forget the tile at ``place`` in shard and slot ``there``."""
        for block, row in self._rows(place):
            if tuple(block.at[row].tolist()) == there:
                block.at[row] = GONE

    def _rows(self, place: Place) -> list[tuple[_Block, int]]:
        wanted = np.array([place], np.int64)
        key = _keys(wanted)[0]
        found = []
        for block in self._blocks:
            first, last = np.searchsorted(block.keys, key, "left"), np.searchsorted(block.keys, key, "right")
            found += [(block, row) for row in range(int(first), int(last)) if (block.places[row] == wanted[0]).all()]
        return found


def _keys(places: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A number for each place, mostly different ones."""
    keys: NDArray[np.uint64] = (places.view(np.uint64) * FACTORS).sum(axis=1, dtype=np.uint64)
    return keys


def _sorted(keys: NDArray[np.uint64], places: NDArray[np.int64], at: NDArray[np.int32]) -> _Block:
    order = np.argsort(keys, kind="stable")
    return _Block(keys[order], np.ascontiguousarray(places[order]), at[order])
