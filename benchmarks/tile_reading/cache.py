"""Measure what a tile cache saves and costs: tiles read from slides, read and kept, and read from the cache.

Takes nothing; makes slides of real tissue and reads tiles of a grid from each three times, in an order without a
pattern, on one thread: without a cache, with an empty one, and with a full one. Slow storage is this machine's with a
wait after every read: so many bytes a second, so long a request. Figures are of the clock on the wall.

    python -m benchmarks.tile_reading.cache [--tiles 150] [--side 9000] [--px 512 2048] [--write]
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import tifffile
from numpy.typing import NDArray

from benchmarks.results import OUT, markdown_table, parser_of, publish, results
from benchmarks.tile_reading.slide import make_slide
from pipelines.backends.registry import open_slide
from pipelines.cache.shards import CacheSpec
from pipelines.cache.tile_cache import CachedSlide, TileCache
from pipelines.slides.geometry import Region
from pipelines.slides.slide import Slide

TILES = (512, 2048)
MPP = 0.5
"""Of the slides' only level."""
WARM_UP = 2

Read = Callable[[Region, NDArray[np.uint8]], object]


@dataclass(frozen=True)
class Storage:
    """Cost of a read in addition to the reading itself.

    Attributes:
        bytes_s: bytes a second; 0: as this machine has it.
        wait_s: seconds for each request.
    """

    name: str
    bytes_s: float = 0.0
    wait_s: float = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for what the calling thread reads within, as it would on this storage."""
        bytes_before, calls_before = _bytes_and_calls()
        yield
        bytes_after, calls_after = _bytes_and_calls()
        if self.bytes_s:
            time.sleep((bytes_after - bytes_before) / self.bytes_s + (calls_after - calls_before - 1) * self.wait_s)


MEMORY = Storage("memory")
SHARE = Storage("share", 100e6, 2e-3)
"""Files that the machine still holds, and a slow network."""


def _bytes_and_calls() -> tuple[int, int]:
    """Return the bytes that this thread has read from files, and the number of calls."""
    values = dict(line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines())
    return int(values["rchar"]), int(values["syscr"])


@dataclass(frozen=True)
class Case:
    """Tiles of one slide.

    Attributes:
        slides, cache: storage of each.
        mpp: at which tiles are read.
    """

    title: str
    path: Path
    backend: str = "auto"
    mpp: float = MPP
    slides: Storage = MEMORY
    cache: Storage = MEMORY


def jpeg2000_slide(path: Path, source: Path, side: int) -> Path:
    """Write the corner of ``source`` as a tiled TIFF of lossy JPEG 2000, unless it is there."""
    if not path.exists():
        with open_slide(source) as slide:
            pixels = slide.read(Region(0, 0, side, side, slide.mpp))
        options = {"level": 40, "reversible": False, "mct": True}
        tags = {"resolution": (20_000, 20_000), "resolutionunit": "CENTIMETER"}
        partial = path.with_suffix(".partial")
        tifffile.imwrite(
            partial, pixels, tile=(256, 256), compression="jpeg2000", compressionargs=options, photometric="rgb", **tags
        )
        partial.rename(path)
    return path


def regions(side: int, tile: int, case: Case, count: int) -> list[Region]:
    """Tiles of a grid over ``side`` px of level 0, in an order without a pattern, ``count`` at most."""
    l0 = round(tile * case.mpp / MPP)
    step = l0 if l0 <= side // 4 else max(1, (side - l0) // 3)
    grid = [Region(x, y, tile, tile, case.mpp) for y in range(7, side - l0, step) for x in range(11, side - l0, step)]
    random.Random(0).shuffle(grid)
    return grid[:count]


def seconds(read: Read, tiles: Sequence[Region], storage: Storage) -> float:
    """Return the seconds to read ``tiles`` from ``storage`` into one array."""
    out = np.zeros((tiles[0].height, tiles[0].width, 3), np.uint8)
    begun = time.perf_counter()
    for region in tiles:
        with storage.waiting():
            read(region, out)
    return time.perf_counter() - begun


def measured(case: Case, tile: int, side: int, count: int) -> tuple[str, ...]:
    """Return a row of the table."""
    tiles = regions(side, tile, case, count)
    with tempfile.TemporaryDirectory(dir=OUT) as name, open_slide(case.path, backend=case.backend) as slide:
        folder, kind = Path(name), CacheSpec(tile, tile, case.mpp)
        slow = _Slow(slide, case.slides)
        seconds(slide.read, tiles[:WARM_UP], MEMORY)
        direct_s = seconds(slide.read, tiles, case.slides)
        with TileCache(folder, 1 << 40, kind) as cache:
            keep_s = seconds(CachedSlide(slow, cache).read, tiles, MEMORY)
            begun = time.perf_counter()
            cache.close()
            keep_s += time.perf_counter() - begun
        cache_bytes = sum(file.stat().st_size for file in folder.rglob("c.*"))
        with TileCache(folder, 0, kind) as cache:
            cached = CachedSlide(slow, cache).read
            seconds(cached, tiles[:1], MEMORY)
            hit_s = seconds(cached, tiles, case.cache)
            assert cache.counts.misses == 0, "the cache has every tile"
    mpx = len(tiles) * tile * tile / 1e6
    pays = (keep_s - direct_s) / (direct_s - hit_s) if hit_s < direct_s else None
    return (
        case.title,
        case.slides.name,
        case.cache.name,
        str(tile),
        f"{mpx / direct_s:.0f}",
        f"{mpx / keep_s:.0f}",
        f"{mpx / hit_s:.0f}",
        f"{direct_s / hit_s:.2f}",
        "never" if pays is None else f"{1 + max(0.0, pays):.1f}",
        f"{cache_bytes / mpx / 1e6:.2f}",
    )


class _Slow(CachedSlide):
    """A slide on other storage."""

    def __init__(self, slide: Slide, storage: Storage) -> None:
        self._slide, self._storage = slide, storage
        self.path, self.backend, self.mpp = slide.path, slide.backend, slide.mpp
        self.levels, self.bounds = slide.levels, slide.bounds

    def read(self, region: Region, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        with self._storage.waiting():
            return self._slide.read(region, out)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tiles", type=int, default=150, help="read from each slide, at most")
    parser.add_argument("--side", type=int, default=9000, help="of the slides in px")
    parser.add_argument("--px", type=int, nargs="+", default=TILES, help="sides of the tiles")
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    side = arguments.side
    jpeg = make_slide(OUT / f"tissue_{side}_q80.tif", side)
    jpeg2000 = jpeg2000_slide(OUT / f"tissue_{side}_j2k.tif", jpeg, side)
    cases = [
        Case("JPEG at its own mpp", jpeg),
        Case("JPEG, mpp 1.0 from 0.5", jpeg, mpp=2 * MPP),
        Case("JPEG, mpp 1.25 from 0.5", jpeg, mpp=2.5 * MPP),
        Case("read by OpenSlide", jpeg, backend="openslide"),
        Case("JPEG 2000", jpeg2000),
        Case("JPEG at its own mpp", jpeg, slides=SHARE),
        Case("JPEG at its own mpp", jpeg, slides=SHARE, cache=SHARE),
        Case("JPEG, mpp 1.0 from 0.5", jpeg, mpp=2 * MPP, slides=SHARE, cache=SHARE),
    ]
    rows = []
    for tile in arguments.px:
        for case in cases:
            rows.append(measured(case, tile, side, max(4, arguments.tiles * TILES[0] // tile)))
            print(*rows[-1], sep=" | ", flush=True)
    header = ("tiles", "slides on", "cache on", "px", "slide", "slide, and kept", "cache", "gain")
    table = markdown_table((*header, "pays from epoch", "bytes a px"), rows)
    share = f"{jpeg.stat().st_size / side**2:.2f} and {jpeg2000.stat().st_size / side**2:.2f}"
    about = (
        f"Mpx/s, one thread. A share gives {SHARE.bytes_s / 1e6:.0f} MB/s and takes {1e3 * SHARE.wait_s:.0f} ms for a "
        f"request. The slides, JPEG and JPEG 2000, have {share} bytes a px.\n"
    )
    text = results("python -m benchmarks.tile_reading.cache --write", table, about)
    publish(__file__, text, arguments.write, "cache")


if __name__ == "__main__":
    main()
