"""Key of cached tiles (size, resolution and software of a folder, slide and place of a tile) and an index of places.

Slides are known by content, not by path: a moved slide finds its tiles.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import pipelines.backends
import pipelines.slides
from pipelines.backends.tile_shard import TILE_BYTES
from pipelines.catalog.handles import SlideState
from pipelines.slides.geometry import Region
from pipelines.slides.slide import Slide

SHARD_BYTES = 32 << 20
"""Of pixels in a shard, and held in memory until it is written; one tile, where that is more."""

MOST_SLOTS = 1024
"""Tiles in a shard at most."""

DECODERS: Final = (
    *("imagecodecs", "numpy", "opencv-python-headless", "openslide-bin", "openslide-python", "pillow", "simplejpeg"),
    *("tifffile", "zarr"),
)
"""Packages whose versions may change a pixel."""

Place = tuple[int, int, int, int]
"""A tile's place: two numbers for the slide and how it is opened, then the tile's level-0 x and y."""

PLACE_NUMBERS = 4


@dataclass(frozen=True)
class CacheSpec:
    """Tiles of one size and resolution.

    Raises:
        ValueError: a tile is larger than Blosc compresses in one piece.
    """

    width: int
    height: int
    mpp: float

    def __post_init__(self) -> None:
        if self.tile_bytes > TILE_BYTES:
            raise ValueError(
                f"--cache keeps tiles of up to {TILE_BYTES} bytes; {self.width} x {self.height} px are "
                f"{self.tile_bytes}: leave it out, or lower --tile"
            )

    @property
    def tile_bytes(self) -> int:
        return 3 * self.width * self.height

    @property
    def slots(self) -> int:
        """Tiles in a shard."""
        return min(MOST_SLOTS, max(1, SHARD_BYTES // self.tile_bytes))

    def has(self, region: Region) -> bool:
        """Return whether ``region`` is of this size and resolution."""
        return (region.width, region.height, region.mpp) == (self.width, self.height, self.mpp)

    @property
    def about(self) -> dict[str, Any]:
        """All that decides what a tile of a place looks like, but the slide."""
        return {"tile": [self.width, self.height], "mpp": self.mpp, "reader": _reader(), "decoders": _versions()}

    @property
    def name(self) -> str:
        """Name of the folder; other tiles, or those of another reader, have another."""
        digest = hashlib.blake2b(json.dumps(self.about, sort_keys=True).encode(), digest_size=6).hexdigest()
        return f"tiles-{self.width}x{self.height}-{self.mpp:g}mpp-{digest}"


def slide_number(slide: Slide, scene: int | None = None) -> tuple[int, int]:
    """Return two numbers for an open slide: of its file's size, time of change and digest, backend, um/px, scene.

    Raises:
        OSError: the file cannot be read.
    """
    state = SlideState.now(slide.path)
    text = f"{state.file_bytes} {state.modified_ns} {state.digest} {slide.backend} {slide.mpp!r}"
    text += "" if scene is None else f" scene {scene}"
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)


@cache
def _reader() -> str:
    """A digest of the code that turns files into pixels: after a change to it nothing is taken from an old cache."""
    hasher = hashlib.blake2b(digest_size=8)
    for room in (pipelines.backends, pipelines.slides):
        for file in sorted(Path(room.__path__[0]).glob("*.py")):
            hasher.update(file.read_bytes())
    return hasher.hexdigest()


@cache
def _versions() -> dict[str, str]:
    versions = {}
    for package in DECODERS:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # an OpenSlide of the system, say
            versions[package] = "none"
    return versions


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
