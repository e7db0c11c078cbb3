"""Tiles that were read once, stored for the next epoch, rank and run.

Takes the place of a tile and gives its pixels as they were read, or nothing; takes pixels that were read from a slide.
Tiles are held in memory until a shard is full, then written by a reading thread. When the folder is full, or cannot be
written, nothing more is kept; what is there serves on. A tile that is damaged on the disk is as one that is not there.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pipelines.backends.tile_shard import NO_CHUNK, DamagedShard, decode_tile, encode_tile, read_index, shard_bytes
from pipelines.cache.shards import CacheSpec, Place, PlaceIndex, ShardFolder, slide_number
from pipelines.catalog.catalog import SlideSpec
from pipelines.slides.geometry import Region, TileBox
from pipelines.slides.slide import Closing, Pixels, Slide, SlideError

log = logging.getLogger(__name__)

LOOK_EVERY_S, LOOK_SHARE, AFTER_FAULT_S = 1.0, 0.05, 300.0
"""After a tile that is not there: shards of other processes are looked for at most so often, and at most for so much
of the time; after a fault, so many seconds later."""


@dataclass
class CacheCounts:
    """Counts of the tiles that were requested from a cache.

    Attributes:
        hits, misses: tiles that were there, and that were read from their slide.
        damaged: of the misses, tiles that were there and are damaged; and lists of shards that are.
        stored: tiles put on the disk.
        hit_s, slide_s, store_s: seconds of all threads: reading from the cache, from slides, and keeping.
    """

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    stored: int = 0
    hit_s: float = 0.0
    slide_s: float = 0.0
    store_s: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return counts from their values, in order, such as the sums over ranks."""
        named = zip(fields(cls), values, strict=True)
        counts: dict[str, Any] = {f.name: round(value) if f.type == "int" else value for f, value in named}
        return cls(**counts)


class TileCache(Closing):
    """Tiles of one kind. Safe in many threads, and with other processes that share the folder.

    Args:
        most_bytes: that the folder may grow to, counting what other processes put there.

    Attributes:
        counts: since it was opened.
        full: why nothing more is kept; empty while tiles are.

    Raises:
        ValueError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path, most_bytes: int, kind: CacheSpec) -> None:
        try:
            self._shards = ShardFolder(folder, kind)
        except OSError as fault:
            what = "" if fault.filename in (None, str(folder)) else f"{fault.filename}: "
            raise ValueError(
                f"--cache {folder} cannot be written ({what}{fault.strerror}); name another folder"
            ) from fault
        self.folder, self.kind = folder, kind
        self.counts, self.full = CacheCounts(), ""
        self._most_bytes = most_bytes
        self._closed = False
        self._lock = threading.Lock()
        self._memory: dict[Place, bytes] = {}  # tiles that are on no disk yet
        self._filling: list[Place] = []  # of these, the ones of the next shard
        self._on_disk = PlaceIndex()
        self._indexes: dict[int, tuple[tuple[int, int], NDArray[np.uint64], NDArray[np.int64]]] = {}
        """Of each shard that was read: inode and time of change of its file, index, and places."""
        self._known: set[int] = set()  # shards whose places were looked at
        self._looking = threading.Lock()
        self._look_at_s = 0.0
        self._look()

    def get(self, place: Place, out: Pixels) -> bool:
        """Write the pixels of the tile at ``place`` into ``out``, and return whether it is there."""
        begun = time.perf_counter()
        if there := self._get(place, out):
            with self._lock:
                self.counts.hits += 1
                self.counts.hit_s += time.perf_counter() - begun
        return there

    def missed(self, slide_s: float) -> None:
        """Count a tile that was read from its slide in ``slide_s`` seconds."""
        with self._lock:
            self.counts.misses += 1
            self.counts.slide_s += slide_s

    def add(self, place: Place, pixels: Pixels) -> None:
        """Keep the pixels of the tile at ``place``, as they were read."""
        if self.full or self._closed:
            return
        begun = time.perf_counter()
        tile = encode_tile(pixels)
        ready: list[Place] = []
        with self._lock:
            if place not in self._memory:  # two samples of one tile may be read at a time
                self._memory[place] = tile
                self._filling.append(place)
            if len(self._filling) >= self.kind.slots:
                ready, self._filling = self._filling, []
        if ready:
            self._write(ready)
        with self._lock:
            self.counts.store_s += time.perf_counter() - begun

    def close(self) -> None:
        """Write what is in memory. What is added later is not kept."""
        with self._lock:
            ready, self._filling = self._filling, []
            self._closed = True
        if ready and not self.full:
            self._write(ready)

    def _get(self, place: Place, out: Pixels) -> bool:
        with self._lock:
            tile, there = self._memory.get(place), self._on_disk.find(place)
        if tile is None and there is None and self._look():
            with self._lock:
                there = self._on_disk.find(place)
        try:
            if tile is not None:
                decode_tile(tile, out)
                return True
            if there is not None:
                self._read(place, *there, out)
                return True
        except (DamagedShard, OSError) as fault:
            with self._lock:
                if not self.counts.damaged:
                    path = self._shards.path
                    log.warning("%s: a tile is read from its slide again; others are only counted: %s", path, fault)
                self.counts.damaged += 1
                if there is not None:
                    self._on_disk.drop(place, there)
        return False

    def _read(self, place: Place, shard: int, slot: int, out: Pixels) -> None:
        descriptor = os.open(self._shards.tiles_of(shard), os.O_RDONLY)
        try:
            status, known = os.fstat(descriptor), self._indexes.get(shard)
            file = status.st_ino, status.st_mtime_ns
            if known is None or known[0] != file:
                known = file, read_index(descriptor, self.kind.slots), self._shards.places_of(shard)
                self._indexes[shard] = known
            _, index, places = known
            if tuple(places[slot].tolist()) != place:  # the folder was deleted, and another run has filled it
                raise DamagedShard(f"shard {shard} was replaced by one with other tiles")
            offset, size = index[slot].tolist()
            if offset == NO_CHUNK:
                raise DamagedShard("the index does not have it")
            decode_tile(os.pread(descriptor, size, offset), out)
        finally:
            os.close(descriptor)

    def _write(self, places: list[Place]) -> None:
        """Make a shard of the tiles at ``places``, which are in memory until it is there."""
        tiles = [self._memory[place] for place in places]
        shard, full = None, ""
        try:
            shard = self._shards.publish(shard_bytes(tiles, self.kind.slots), places, self._most_bytes)
            if shard is None:
                full = f"it has its {self._most_bytes} bytes"
        except OSError as fault:
            full = f"it cannot be written: {fault}"
        with self._lock:
            if full and not self.full:
                self.full = full
                log.info("%s: no more tiles are kept: %s", self.folder, full)
            for place in places:
                del self._memory[place]
            if shard is not None:
                if shard not in self._known:  # another thread may have looked meanwhile
                    self._known.add(shard)
                    self._on_disk.add(np.array(places, np.int64), shard)
                self.counts.stored += len(places)

    def _look(self) -> bool:
        """Learn what other processes have put there, and return whether it was done. Other threads go on meanwhile."""
        if time.monotonic() < self._look_at_s or not self._looking.acquire(blocking=False):
            return False
        try:
            begun_s = time.monotonic()
            try:
                for shard in self._shards.shards():
                    if shard not in self._known:
                        self._learn(shard)
                ended_s = time.monotonic()
                self._look_at_s = ended_s + max(LOOK_EVERY_S, (ended_s - begun_s) / LOOK_SHARE)
            except OSError as fault:  # the slide itself can be read all the same
                # Somebody took the folder away, or its file server fails for a while.
                self._look_at_s = math.inf if isinstance(fault, FileNotFoundError) else begun_s + AFTER_FAULT_S
                log.warning("%s: its tiles cannot be listed: %s", self._shards.path, fault)
        finally:
            self._looking.release()
        return True

    def _learn(self, shard: int) -> None:
        try:
            places = self._shards.places_of(shard)
        except (DamagedShard, OSError, ValueError) as fault:
            log.warning("%s: the list of shard %d cannot be used: %s", self._shards.path, shard, fault)
            with self._lock:
                self._known.add(shard)
                self.counts.damaged += 1
            return
        with self._lock:
            if shard not in self._known:
                self._known.add(shard)
                self._on_disk.add(places, shard)


def open_cached(spec: SlideSpec, cache: TileCache) -> CachedSlide:
    """Open a slide whose tiles go through ``cache``; raises SlideError as ``SlideSpec.open`` does."""
    slide = spec.open()
    try:
        return CachedSlide(slide, cache, spec.scene)
    except SlideError:
        slide.close()
        raise
    except OSError as fault:
        slide.close()
        raise SlideError(f"{slide.path}: the file cannot be read: {fault.strerror or fault}") from fault


class CachedSlide(Closing):
    """A ``Slide`` over a slide and a cache; closes the slide, not the cache. OSError: the file cannot be read."""

    def __init__(self, slide: Slide, cache: TileCache, scene: int | None = None) -> None:
        self._slide, self._cache = slide, cache
        self.path, self.backend, self.mpp = slide.path, slide.backend, slide.mpp
        self.levels, self.bounds = slide.levels, slide.bounds
        self._number = slide_number(slide, scene)

    def read(self, region: Region, out: Pixels | None = None) -> Pixels:
        cache, shape = self._cache, (region.height, region.width, 3)
        if out is None:
            out = np.empty(shape, np.uint8)
        fits = out.shape == shape and out.dtype == np.uint8 and out.flags.c_contiguous
        if not (fits and cache.kind.has(region)):
            return self._slide.read(region, out)
        place = (*self._number, region.l0_x, region.l0_y)
        if cache.get(place, out):
            return out
        begun = time.perf_counter()
        self._slide.read(region, out)
        cache.missed(time.perf_counter() - begun)
        cache.add(place, out)
        return out

    def read_box(self, region: Region, box: TileBox, out: Pixels) -> None:
        if self._cache.kind.has(region):
            out[...] = box.crop(self.read(region))  # tiles are kept whole: whoever reads one first, for all
        else:
            self._slide.read_box(region, box, out)

    def close(self) -> None:
        self._slide.close()
