"""What each rank of a grid reads of a tile that they share, beside a rank that reads it whole.

Takes nothing; gives a table, the shares that are asked for, and `bench-data/tile_parts.json`. Every tile is read at a
random unaligned place by every member of every grid in turn, turned and flipped at random as in training, into memory
that is used again: the member's box and `HALO` px beside it. Bytes are those read of the slide's file; a mask is drawn
from `POLYGONS` polygons. Seconds are those computed, of which other processes on a busy machine take none.

    python -m benchmarks.tile_reading.parts [--side 20000] [--tile 4096] [--rounds 9]
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from benchmarks.results import parser_of
from benchmarks.tile_reading.readers import clocked
from benchmarks.tile_reading.run import OUT
from benchmarks.tile_reading.slide import make_slide
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.handles import SlidePool
from pipelines.labels.annotations import SlideAnnotations
from pipelines.slides.geometry import TileBox
from pipelines.slides.slide import Pixels
from pipelines.stream.augment import AugmentSettings
from pipelines.stream.batch import Labels, Masks, TileParts
from pipelines.stream.read import FaultLog, Read
from pipelines.tiles.index_settings import IndexSettings
from pipelines.tiles.tile_table import TileTable

GRIDS = {"1x1": (1, 1), "2x1": (2, 1), "2x2": (2, 2)}
SCALES = {"the level's px": 1.0, "2 x 2 px averaged": 2.0, "resampled, 1.37": 1.37}
HALO = 3
"""Of a convolution of 7 x 7 px, the first of most models."""

POLYGONS = 40_000
ASKED = 1.15
"""At the level's px: seconds and bytes of R members together over those of the whole, at most."""


def members(grid: tuple[int, int], side: int) -> list[TileBox]:
    """Return the box of each member of ``grid`` (rows, columns), with its halo."""
    rows, columns = ([side * k // n for k in range(n + 1)] for n in grid)
    return [
        TileBox(max(0, top - HALO), min(side, bottom + HALO), max(0, left - HALO), min(side, right + HALO))
        for top, bottom in pairwise(rows)
        for left, right in pairwise(columns)
    ]


def table_at(mpp: float, side: int, slide_side: int, rounds: int) -> TileTable:
    """Return tiles at random places that lie inside the slide."""
    places, reach = np.random.default_rng(0), slide_side - int(side * mpp / 0.5) - 1
    if reach < 1:
        raise ValueError(f"a tile of {side} px at {mpp} um/px does not fit into {slide_side} px: raise --side")
    x, y = places.integers(0, reach, (2, rounds))
    made = IndexSettings(tile=side, mpp=mpp, min_tissue=0.0)
    return TileTable(("slide",), np.zeros(rounds, np.int32), x, y, np.ones(rounds, np.float32), made)


def drawn(folder: Path, side: int) -> SlideAnnotations:
    """Return annotations of ``POLYGONS`` outlines of nuclei, written to ``folder``."""
    numbers = np.random.default_rng(1)
    angles = np.linspace(0, 2 * np.pi, 13)[:12]
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    centres, radii = numbers.uniform(0, side, (POLYGONS, 1, 2)), numbers.uniform(5, 20, (POLYGONS, 12, 1))
    rings = (centres + circle * radii).round(2).tolist()
    path = folder / f"parts_{side}.geojson"
    kind = {"classification": {"name": "nucleus"}}
    features = [
        {"type": "Feature", "properties": kind, "geometry": {"type": "Polygon", "coordinates": [ring]}}
        for ring in rings
    ]
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    return SlideAnnotations(("background", "nucleus"), {"slide": "slide"}, "drawn", {"slide": path})


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Yield a list that grows by the bytes of every read of compressed tiles."""
    counts: list[int] = []
    pread = os.pread

    def counting(descriptor: int, count: int, offset: int) -> bytes:
        data = pread(descriptor, count, offset)
        counts.append(len(data))
        return data

    os.pread = counting
    try:
        yield counts
    finally:
        os.pread = pread


def measure(path: Path, side: int, slide_side: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each scale and grid: of seconds and bytes medians over tiles of the members' mean, of its share
    of the whole, and of the share of the member that has most."""
    pool, truth = SlidePool([SlideSpec("slide", path)], 1), Masks(drawn(path.parent, slide_side))
    memory, mask = np.zeros(3 * (side + 2 * HALO) ** 2, np.uint8), np.zeros((side + 2 * HALO) ** 2, np.uint8)
    order, rows = random.Random(0), []
    for scale, factor in SCALES.items():
        table = table_at(0.5 * factor, side, slide_side, rounds)
        took: dict[str, list[list[tuple[float, float, int]]]] = {grid: [] for grid in GRIDS}
        for row in range(-1, rounds):  # the first warms caches of the file, of the drawing and of memory
            grids = list(GRIDS)
            order.shuffle(grids)
            for grid in grids:
                of_members = [
                    read_part(pool, table, box, max(row, 0), truth, memory, mask) for box in members(GRIDS[grid], side)
                ]
                if row >= 0:
                    took[grid].append(of_members)
        whole = [members[0] for members in took["1x1"]]
        for grid, of_tiles in took.items():
            line: dict[str, Any] = {"scale": scale, "grid": grid, "ranks": len(of_tiles[0])}
            for k, name in enumerate(("pixels_s", "mask_s", "bytes")):
                means = [statistics.mean(member[k] for member in of_tile) for of_tile in of_tiles]
                shares = [mean / all_[k] for mean, all_ in zip(means, whole, strict=True)]
                most = [
                    max(member[k] for member in of_tile) / all_[k]
                    for of_tile, all_ in zip(of_tiles, whole, strict=True)
                ]
                line |= {name: statistics.median(means), f"{name}_share": statistics.median(shares)}
                line |= {f"{name}_most": statistics.median(most)}
            rows.append(line)
    return rows


def read_part(
    pool: SlidePool, table: TileTable, box: TileBox, row: int, truth: Masks, memory: Pixels, mask: Pixels
) -> tuple[float, float, int]:
    """Return computed seconds for the pixels and the mask of ``box`` of a tile, and bytes read of the file."""
    side = table.settings.side
    parts = TileParts(box, box, side, side, AugmentSettings(), 0)
    read = Read(table, pool, None, parts=parts)
    pixels, classes = memory[: 3 * box.height * box.width], mask[: box.height * box.width]
    label = Labels(np.zeros(len(table), np.int64))
    with counted_bytes() as counts:
        seconds = clocked(read.fill, row, row, label, pixels, np.zeros((), np.int64), FaultLog(None)).cpu
    return seconds, clocked(read.fill_target, row, row, truth, classes).cpu, sum(counts)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--side", type=int, default=20_000, help="px of the slide that is made")
    parser.add_argument("--tile", type=int, default=4096, help="px of a tile")
    parser.add_argument("--rounds", type=int, default=9, help="tiles read")
    given = parser.parse_args(argv)
    cv2.setNumThreads(1)
    path = make_slide(OUT / f"tissue_{given.side}_q80.tif", given.side)
    rows = measure(path, given.tile, given.side, given.rounds)
    names = {"pixels_s": "pixels, ms", "bytes": "read, MB", "mask_s": "mask, ms"}
    print(f"{'of a rank: mean, share, most':30}{'grid':6}" + "".join(f"{name:>24}" for name in names.values()))
    for row in rows:
        figures = ((row[name] * (1e-6 if name == "bytes" else 1e3), name) for name in names)
        cells = (f"{value:10.1f}{row[f'{name}_share']:7.2f}{row[f'{name}_most']:7.2f}" for value, name in figures)
        print(f"{row['scale']:30}{row['grid']:6}" + "".join(cells))
    checks = [
        {"what": f"{row['grid']}, {name} of all ranks over the whole", "asked": ASKED}
        | {"measured": row[f"{name}_share"] * row["ranks"], "passed": row[f"{name}_share"] * row["ranks"] <= ASKED}
        for row in rows
        if row["scale"] == "the level's px" and row["ranks"] > 1
        for name in ("pixels_s", "bytes")
    ]
    for check in checks:
        verdict = "ok" if check["passed"] else "FAILED"
        print(f"{check['what']:60}{check['measured']:8.2f} asked {check['asked']} {verdict}")
    environment = {"date": date.today().isoformat(), "load": os.getloadavg()[0]} | vars(given)
    OUT.mkdir(exist_ok=True)
    (OUT / "tile_parts.json").write_text(json.dumps({"environment": environment, "rows": rows, "checks": checks}))
    return 0 if all(check["passed"] for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
