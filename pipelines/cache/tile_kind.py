"""What tiles of a cache have in common, and the place of each: what has to agree for one to stand for what is read.

Takes the tile's size, the resolution and a slide as it lies on the disk now; gives the name of a folder of the cache
and the place of a tile in it. Neither knows the slide's path: one that was moved, its time of change kept, is the same.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import pipelines.backends
import pipelines.slides
from pipelines.backends.tile_shard import TILE_BYTES
from pipelines.catalog.slide_state import SlideState
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
class TileKind:
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
        """Of the folder: other tiles, or those of another reader, are in another."""
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
