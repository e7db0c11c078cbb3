"""How fast a whole TileStream fills batch tensors, beside the decoder alone on the same compressed tiles.

Takes nothing; gives a table, the ratio that is asked for, and `bench-data/stream.json`. Each round draws the same
random unaligned tiles through both, in changing order, so that a busy machine slows them alike; figures are medians.
The stream is everything a training run has: shuffled order, slide pool, labels, reading threads, buffers used again.

    python -m benchmarks.tile_reading.stream [--side 20000] [--rounds 1.0]
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.results import OUT, parser_of
from benchmarks.tile_reading.readers import Reader, bare_decoder
from benchmarks.tile_reading.slide import make_slide
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.handles import SlidePool
from pipelines.stream.stream import TileStream
from pipelines.tiles.index import TileTable
from pipelines.tiles.index_settings import IndexSettings

ROUNDS = {512: (64, 8, 15), 2048: (8, 2, 15), 8192: (2, 1, 7)}
"""Per tile side in px: tiles in a round, tiles in a batch, rounds."""

ASKED = 0.70
"""Of the bare decoder, 2048 px tiles, one thread."""


class WarmMemory:
    """An allocator that hands out the same arrays in every round: a training run makes its buffers once."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], list[NDArray[Any]]] = {}
        self._next: dict[tuple[int, ...], int] = {}

    def start_round(self) -> None:
        self._next = {}

    def __call__(self, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        kept, k = self._kept.setdefault(shape, []), self._next.get(shape, 0)
        if k == len(kept):
            kept.append(np.zeros(shape, dtype))
        self._next[shape] = k + 1
        return kept[k]


def table_of(path: Path, px: int, count: int, side: int, mpp: float) -> TileTable:
    """``count`` tiles at random places, none of them on the slide's own tile grid."""
    places = random.Random(px)
    x, y = (
        np.array([256 * places.randrange((side - px) // 256) + places.randrange(1, 255) for _ in range(count)])
        for _ in "xy"
    )
    ones = np.ones(count, np.float32)
    return TileTable((path.stem,), np.zeros(count, np.int32), x, y, ones, IndexSettings(tile=px, mpp=mpp))


def stream_seconds(stream: TileStream, tiles: int) -> float:
    start, seen = time.perf_counter(), 0
    with iter(stream) as batches:
        for batch in batches:
            seen += len(torch.from_numpy(batch.images))
            batch.release()
    assert seen == tiles
    return time.perf_counter() - start


def decoder_seconds(readers: Sequence[Reader], table: TileTable) -> float:
    """Seconds of the slowest of the threads, which share the tiles; reading the file is not counted."""
    took = [0.0] * len(readers)

    def work(k: int) -> None:
        for i in range(k, len(table), len(readers)):
            took[k] += readers[k](int(table.l0_x[i]), int(table.l0_y[i]), table.settings.tile).wall

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(readers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(took)


def measure(path: Path, side: int, threads: int, factor: float) -> list[dict[str, Any]]:
    """One row per tile side."""
    spec, order, rows = SlideSpec(path.stem, path), random.Random(0), []
    with spec.open() as slide:
        mpp = slide.mpp
    for px, (count, batch, rounds) in ROUNDS.items():
        table, memory = table_of(path, px, count, side, mpp), WarmMemory()
        stream = (
            TileStream.over(table, epochs=1)
            .shuffle()
            .read(SlidePool([spec], 2))
            .label(np.zeros(count, np.int64))
            .batch(batch)
            .prefetch((threads + 1) * batch * px * px * 3 + 4096, threads, memory)
        )
        readers = [bare_decoder(path) for _ in range(threads)]
        seconds: dict[str, list[float]] = {"stream": [], "decoder": []}
        for i in range(max(1, round(rounds * factor)) + 1):
            for name in order.sample(sorted(seconds), 2):
                memory.start_round()
                took = stream_seconds(stream, count) if name == "stream" else decoder_seconds(readers, table)
                if i:  # the first round warms caches and memory
                    seconds[name].append(took)
        ratios = [d / s for s, d in zip(seconds["stream"], seconds["decoder"], strict=True)]
        speed = {name: count * px * px / 1e6 / statistics.median(took) for name, took in seconds.items()}
        row = {"threads": threads, "tile_px": px, "batch": batch, "rounds": len(ratios)}
        row |= {"stream_mpx_per_s": speed["stream"], "decoder_mpx_per_s": speed["decoder"]}
        row |= {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
        rows.append(row)
        print(
            f"{threads:7} {px:8} {speed['stream']:14.0f} {speed['decoder']:14.0f} "
            f"{row['ratio']:10.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            flush=True,
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--side", type=int, default=20_000, help="px of the slide that is made")
    parser.add_argument("--rounds", type=float, default=1.0, help="factor on the number of rounds")
    given = parser.parse_args(argv)
    cv2.setNumThreads(1)
    path = make_slide(OUT / f"tissue_{given.side}_q80.tif", given.side)
    cores = len(os.sched_getaffinity(0))
    print(f"{'threads':>7} {'tile px':>8} {'stream Mpx/s':>14} {'decoder Mpx/s':>14} {'ratio':>10} (range)")
    rows = [row for threads in sorted({1, cores}) for row in measure(path, given.side, threads, given.rounds)]
    measured = next(row["ratio"] for row in rows if row["threads"] == 1 and row["tile_px"] == 2048)
    print(f"2048 px, one thread: {measured:.2f} asked {ASKED} {'ok' if measured >= ASKED else 'FAILED'}")
    environment: dict[str, Any] = {"date": date.today().isoformat(), "cores": cores, "machine": platform.platform()}
    environment |= {"python": platform.python_version()}
    environment |= {name: version(name) for name in ("torch", "numpy", "simplejpeg")}
    (OUT / "stream.json").write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))
    return 0 if measured >= ASKED else 1


if __name__ == "__main__":
    sys.exit(main())
