"""How fast tiles are read from a tiled JPEG slide, beside other readers and beside the decoder alone.

Takes nothing; gives a table, the ratios that are asked for, and `bench-data/tile_reading.json`. All readers read the
same random unaligned squares in turn, in changing order; figures are medians. Ratios are given for the wall clock and
for the seconds computed, of which other processes on a busy machine take none.

    python -m benchmarks.tile_reading.run [--cucim-python PYTHON] [--side 20000] [--rounds 1.0]
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cv2

from benchmarks.results import OUT, parser_of, write_json
from benchmarks.tile_reading.readers import Reader, Took, bare_decoder, clocked, megatile, readers
from benchmarks.tile_reading.slide import make_slide
from pipelines.backends.tiled import open_tiled
from pipelines.slides.geometry import Region

ROUNDS = {512: 80, 2048: 30, 8192: 7}
"""Squares read by every reader, per side in px."""

THREAD_ROUNDS = 5
"""Comparisons of one thread with two."""

PACKAGES = ("simplejpeg", "openslide-python", "openslide-bin", "tifffile", "zarr", "numpy")

ASKED = (("megatile", "openslide", 4.5), ("megatile into a given array", "bare decoder", 0.80))
"""At 2048 px, by computed seconds: who has to be so many times as fast as whom. The decoder writes to memory that it
uses again, so what is held against it does too, as the tile stream does; OpenSlide and `read` bring new memory."""
ASKED_MEMORY = 1.35
"""Growth of the peak resident memory over one 8192 px read, over the tile's bytes."""

PEAK = """
import sys
from pathlib import Path
import numpy as np
def status(key):
    return int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0]) * 1024
reader, path, side = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
if reader == "megatile":
    from pipelines.slides.geometry import Region
    from pipelines.backends.registry import open_slide
    slide = open_slide(path, backend="tiled")
    read = lambda side: slide.read(Region(101, 203, side, side, slide.mpp))
else:
    from openslide import OpenSlide
    slide = OpenSlide(path)
    read = lambda side: np.asarray(slide.read_region((101, 203), 0, (side, side)).convert("RGB"))
read(300)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
pixels = read(side)
print(status("VmHWM") - before)
"""


def measure(path: Path, side: int, factor: float, cucim_python: str | None) -> dict[str, dict[int, list[Took]]]:
    """Seconds of every reader per square side, in the order of the rounds."""
    compared = readers(path, max(ROUNDS), cucim_python)
    places = random.Random(0)
    seconds: dict[str, dict[int, list[Took]]] = {name: {} for name in compared}
    for px, rounds in ROUNDS.items():
        for i in range(max(1, round(rounds * factor)) + 1):
            x, y = (256 * places.randrange((side - px) // 256) + places.randrange(1, 255) for _ in "xy")
            names = list(compared)
            places.shuffle(names)
            for name in names:
                took = compared[name](x, y, px)
                if i:  # the first round warms caches of the file and of the memory allocator
                    seconds[name].setdefault(px, []).append(took)
        print(f"{px} px: {i} rounds", file=sys.stderr)
    return seconds


def in_threads(path: Path, px: int, reads: int, rounds: int) -> dict[str, float]:
    """Speed-up of two threads over one: reading tiles of their own, sharing each read, and decoding alone.

    The last is what the machine has to give: less than 2 says that other processes hold its cores.
    """

    def wall(workers: list[Reader]) -> float:
        def work(read: Reader) -> None:
            for _ in range(reads // len(workers)):
                read(101, 203, px)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    def shared(threads: int) -> float:
        with open_tiled(path, mpp=None, decode_threads=threads) as slide:
            return wall([lambda x, y, side: clocked(slide.read, Region(x, y, side, side, slide.mpp))])

    one, decoders = megatile(path), [bare_decoder(path), bare_decoder(path)]
    wall([one, one])
    return {
        "tiles of their own": statistics.median(wall([one]) / wall([one, one]) for _ in range(rounds)),
        "sharing each tile": statistics.median(shared(1) / shared(2) for _ in range(rounds)),
        "bare decoder": statistics.median(wall(decoders[:1]) / wall(decoders) for _ in range(rounds)),
    }


def peak_memory(reader: str, path: Path, px: int) -> int:
    """Bytes by which one read of ``px`` x ``px`` px grows the peak resident memory of a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, reader, str(path), str(px)], check=True, capture_output=True, text=True
    )
    return int(done.stdout)


def report(path: Path, seconds: dict[str, dict[int, list[Took]]]) -> dict[str, Any]:
    """Medians, ranges and ratios, printed as a table and returned."""
    rows, ratios = [], []
    print(f"\n{'Mpx/s, median (range)':32}" + "".join(f"{px:>8} px{'':16}" for px in ROUNDS))
    for name, by_px in seconds.items():
        line = f"{name:32}"
        for px, took in by_px.items():
            speeds = [px * px / one.wall / 1e6 for one in took]
            row = {"reader": name, "tile_px": px, "mpx_per_s": statistics.median(speeds)}
            rows.append(row | {"slowest": min(speeds), "fastest": max(speeds), "rounds": len(speeds)})
            line += f"{statistics.median(speeds):8.0f}   {f'({min(speeds):.0f}-{max(speeds):.0f})':16}"
        print(line)
    for clock in range(2):
        print(f"\ntimes as fast by {Took._fields[clock]} seconds (median of the rounds' ratios)")
        for name in ("megatile", "megatile into a given array"):
            for other in (other for other in seconds if other != name):
                by_px = {
                    px: statistics.median(b[clock] / a[clock] for a, b in zip(took, seconds[other][px], strict=True))
                    for px, took in seconds[name].items()
                }
                ratios += [
                    {"clock": Took._fields[clock], "reader": name, "over": other, "tile_px": px, "ratio": ratio}
                    for px, ratio in by_px.items()
                ]
                print(f"{f'{name} / {other}':60}" + "".join(f"{ratio:9.2f}" for ratio in by_px.values()))
    return {"rows": rows, "ratios": ratios}


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--side", type=int, default=20_000, help="px of the slide that is made")
    parser.add_argument("--rounds", type=float, default=1.0, help="factor on the number of rounds")
    parser.add_argument("--cucim-python", help="a Python interpreter in which cucim is installed")
    given = parser.parse_args(argv)
    cv2.setNumThreads(1)
    path = make_slide(OUT / f"tissue_{given.side}_q80.tif", given.side)

    environment = {
        "date": date.today().isoformat(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "machine": platform.platform(),
        "python": platform.python_version(),
    } | {name: version(name) for name in PACKAGES}
    print(environment)

    seconds = measure(path, given.side, given.rounds, given.cucim_python)
    result = report(path, seconds)
    tile_bytes = 8192 * 8192 * 3
    memory = {reader: peak_memory(reader, path, 8192) for reader in ("megatile", "openslide")}
    print("\npeak memory of one 8192 px read, MB (over the tile's 201)")
    for reader, grown in memory.items():
        print(f"{reader:32}{grown / 1e6:8.0f} ({grown / tile_bytes:.2f})")
    threads = in_threads(path, 2048, 12, max(1, round(THREAD_ROUNDS * given.rounds)))
    print("\nspeed-up by a second thread")
    for name, ratio in threads.items():
        print(f"{name:32}{ratio:8.2f}")

    at_2048 = {
        (row["reader"], row["over"]): row["ratio"]
        for row in result["ratios"]
        if row["tile_px"] == 2048 and row["clock"] == "cpu"
    }
    checks = [
        {"what": f"2048 px, {reader} / {over}", "asked": asked, "measured": at_2048[reader, over]}
        | {"passed": at_2048[reader, over] >= asked}
        for reader, over, asked in ASKED
    ]
    grown = memory["megatile"] / tile_bytes
    checks.append(
        {"what": "8192 px, memory", "asked": ASKED_MEMORY, "measured": grown, "passed": grown <= ASKED_MEMORY}
    )
    for check in checks:
        verdict = "ok" if check["passed"] else "FAILED"
        print(f"{check['what']:60}{check['measured']:8.2f} asked {check['asked']} {verdict}")

    result |= {"environment": environment | {"slide_bytes": path.stat().st_size}, "memory": memory}
    result |= {"threads": threads, "checks": checks}
    write_json("tile_reading", result)
    return 0 if all(check["passed"] for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
