"""A folder of shards that several processes write into: each shard by one of them, whole, or not at all.

Its name says of which tiles (size, resolution, software); a slide is known by content, so a moved one finds its tiles.
Two Zarr arrays under one group: ``tiles``, and ``places``, which says what each tile is. A process claims a number by
making ``tiles/.K.writing``, which only one can; the file is renamed when it is whole, and the places follow, so that a
reader finds no tile that is not there. What a killed process leaves is removed an hour later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import pipelines.backends
import pipelines.slides
from pipelines.backends.tile_shard import TILE_BYTES, checked, places_metadata, tiles_metadata, with_checksum
from pipelines.catalog.handles import SlideState
from pipelines.slides.geometry import Region
from pipelines.slides.slide import Slide
from pipelines.slides.whole_files import lock, write_text

SHARD_BYTES, MOST_SLOTS = 32 << 20, 1024
"""Of pixels in a shard, held in memory until it is written, or one tile; tiles in a shard at most."""

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
    """Tiles of one size and resolution. Raises ValueError where a tile is larger than Blosc compresses in one piece."""

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
    Raises OSError where the file cannot be read."""
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


class _Block(NamedTuple):
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
            pairs: Any = zip(self._blocks.pop(), block, strict=True)
            block = _sorted(*map(np.concatenate, pairs))
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


MOST_SHARDS, ABANDONED_S = 1 << 20, 3600.0
"""Shards that the arrays have room for; seconds after which a shard that is not whole has no writer any more."""

WRITING, LEDGER = ".writing", ".bytes"
"""End of the name of a shard being written; file in the folder of the cache with the bytes of all its shards."""


class ShardFolder:
    """The shards of one kind of tiles. Raises OSError where the folder cannot be made or written."""

    def __init__(self, cache: Path, kind: CacheSpec) -> None:
        self.cache, self.kind = cache, kind
        self.path = cache / kind.name
        self._tiles, self._places = self.path / "tiles", self.path / "places"
        for folder in (self._tiles, self._places):
            folder.mkdir(parents=True, exist_ok=True)
        _write_json(self.path, {"zarr_format": 3, "node_type": "group", "attributes": {"megatile": kind.about}})
        _write_json(self._tiles, tiles_metadata(MOST_SHARDS, kind.slots, kind.height, kind.width))
        _write_json(self._places, places_metadata(MOST_SHARDS, kind.slots, PLACE_NUMBERS))
        listed = self.shards()
        self._remove_abandoned(set(listed))
        numbers = (_number(name, "c.", ".0.0.0") for name in os.listdir(self._tiles))
        listed += [number for number in numbers if number is not None]
        self._next = 1 + max(listed, default=-1)  # to be claimed
        with self._ledger() as ledger:
            _write_held(ledger, self._held_bytes())

    def shards(self) -> list[int]:
        """Return the numbers of the shards that are whole, in order."""
        return sorted(number for name in os.listdir(self._places) if (number := _number(name, "c.", ".0")) is not None)

    def tiles_of(self, shard: int) -> Path:
        """Return the file with the tiles of ``shard``."""
        return self._tiles / f"c.{shard}.0.0.0"

    def places_of(self, shard: int) -> NDArray[np.int64]:
        """Return the places of the tiles of ``shard``, int64 (slots, 4). Raises OSError or DamagedShard."""
        data = checked(self._list_of(shard).read_bytes())
        return np.frombuffer(data, "<i8").reshape(self.kind.slots, -1)

    def publish(self, parts: Sequence[bytes], places: Sequence[Place], most_bytes: int) -> int | None:
        """Write a shard, and return its number; None if the cache would become larger than ``most_bytes``.

        Raises:
            OSError: the disk is full, or the folder is gone.
        """
        listed = np.zeros((self.kind.slots, PLACE_NUMBERS), "<i8")
        listed[: len(places)] = places
        list_bytes = with_checksum(listed.tobytes())
        shard, file = self._claim()
        with file:
            path = Path(file.name)
            try:
                if not self._reserve(file, sum(len(part) for part in parts), len(list_bytes), most_bytes):
                    path.unlink(missing_ok=True)
                    return None
                for part in parts:
                    file.write(part)
                file.flush()
                if not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                    raise OSError(f"{path}: another process took this process for dead")
                path.replace(self.tiles_of(shard))
            except BaseException:  # once it has its name, the other may be that of another process
                path.unlink(missing_ok=True)
                raise
        list_file = self._places / f".{shard}{WRITING}"
        list_file.write_bytes(list_bytes)
        list_file.replace(self._list_of(shard))
        return shard

    def _list_of(self, shard: int) -> Path:
        return self._places / f"c.{shard}.0"

    def _claim(self) -> tuple[int, BinaryIO]:
        """Return a number that no other process has, and the file that claims it, open to be written."""
        while True:
            shard, self._next = self._next, self._next + 1  # what is below was claimed: no folder is listed
            if self.tiles_of(shard).exists() or self._list_of(shard).exists():  # a list whose tiles were deleted
                continue
            with contextlib.suppress(FileExistsError):
                file = (self._tiles / f".{shard}{WRITING}").open("xb")
                if not self.tiles_of(shard).exists():  # it may have become whole since
                    return shard, file
                file.close()
                Path(file.name).unlink(missing_ok=True)

    def _reserve(self, file: BinaryIO, tile_bytes: int, list_bytes: int, most_bytes: int) -> bool:
        """Make ``file`` as large as it will be, if the cache stays within ``most_bytes`` by the ledger."""
        with self._ledger() as ledger:
            text = os.pread(ledger, 32, 0)
            held = int(text) if text.isdigit() else most_bytes
            if held + tile_bytes + list_bytes > most_bytes:
                held = self._held_bytes()  # the ledger was damaged, or files may have been deleted
            fits = held + tile_bytes + list_bytes <= most_bytes
            if fits:
                os.ftruncate(file.fileno(), tile_bytes)
                held += tile_bytes + list_bytes
            _write_held(ledger, held)
        return fits

    @contextlib.contextmanager
    def _ledger(self) -> Iterator[int]:
        """The file with the bytes that the cache holds, locked. On a disk without locks, processes that write at the
        same time may count too few bytes, and exceed the limit until the files are counted."""
        ledger = os.open(self.cache / LEDGER, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            lock(ledger)
            yield ledger
        finally:
            os.close(ledger)

    def _held_bytes(self) -> int:
        """Bytes of all shards in the cache, of whatever kind, those being written included."""
        held = 0
        for folder in self.cache.glob("tiles-*/*/"):
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        held += entry.stat().st_size
        return held

    def _remove_abandoned(self, listed: set[int]) -> None:
        """Remove what processes left that were killed while they wrote."""
        begun = time.time() - ABANDONED_S
        for file in (*self._tiles.iterdir(), *self._places.iterdir()):
            shard = _number(file.name, "c.", ".0.0.0")
            unlisted = shard is not None and shard not in listed
            with contextlib.suppress(FileNotFoundError):  # another process was first
                if (unlisted or file.name.endswith(WRITING)) and file.stat().st_mtime < begun:
                    file.unlink()


def _write_held(ledger: int, held: int) -> None:
    os.pwrite(ledger, b"%020d" % held, 0)
    os.truncate(ledger, 20)


def _number(name: str, before: str, after: str) -> int | None:
    digits = name.removeprefix(before).removesuffix(after)
    return int(digits) if name == f"{before}{digits}{after}" and digits.isdecimal() else None


def _write_json(folder: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2) + "\n"
    path = folder / "zarr.json"
    if not path.exists() or path.read_bytes() != text.encode():
        write_text(path, text)
