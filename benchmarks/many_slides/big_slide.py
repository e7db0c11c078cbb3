"""A 100,000 x 100,000 px slide made, indexed and trained on: time and peak resident memory of each step of the way.

Takes nothing; gives one line per command, memory summed over all its processes, sampled every 50 ms.

    python -m benchmarks.many_slides.big_slide [--size 100000] [--tile 2048] [--steps 20]
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.machine import measured_on
from benchmarks.results import parser_of

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench-data" / "big_slide"
EVERY_S = 0.05


def resident(root: psutil.Process) -> list[int]:
    """Resident bytes of a process and all its descendants that still live."""
    found = []
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(process.memory_info().rss)
    return found


def watched(name: str, *arguments: str) -> dict[str, float | str]:
    """Run ``python -m`` with ``arguments``; its wall time, and its largest memory in sum and of one process."""
    start = time.perf_counter()
    command = subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)
    root = psutil.Process(command.pid)
    total = largest = 0
    while command.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            now = resident(root)
            total, largest = max(total, sum(now)), max(largest, *now, 0)
        time.sleep(EVERY_S)
    if command.returncode:
        sys.exit(f"{' '.join(arguments)} ended with {command.returncode}")
    row = {"step": name, "wall_s": time.perf_counter() - start, "total_bytes": total, "largest_bytes": largest}
    print(f"{name:8}{row['wall_s']:8.0f} s{total / 1e9:8.2f} GB{largest / 1e9:8.2f} GB", flush=True)
    return row


def main() -> None:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--size", type=int, default=100_000, help="px of the slide's side")
    parser.add_argument("--tile", type=int, default=2048, help="px of the training tiles")
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    given = parser.parse_args()
    shutil.rmtree(OUT, ignore_errors=True)
    slides, run = OUT / "slides", OUT / "run"
    tile = str(given.tile)
    print(measured_on())
    print(f"{'command':8}{'wall':>10}{'all processes':>15}{'largest':>8}")
    rows = [
        watched("synth", "app.synth", str(slides), "--slides", "1", "--size", str(given.size), "--task", "segment"),
        watched("index", "app.index", "--slides", str(slides), "--tile", tile, "--out", str(OUT / "index")),
    ]
    training = ["--slides", str(slides), "--model", "unet_w4", "--tile", tile, "--batch", "1", "--validation", "0"]
    training += ["--steps", str(given.steps), "--out", str(run)]
    training += ["--twin-steps=0", "--read-ahead=64MiB"]
    rows.append(watched("train", "app.train", *training))
    summary = json.loads((run / "summary.json").read_text())
    slide = next(slides.glob("*.tif"))
    print(f"slide {slide.stat().st_size / 1e9:.2f} GB, {summary['images']} tiles trained on")
    result = {"rows": rows, "slide_bytes": slide.stat().st_size, "images": summary["images"], "where": measured_on()}
    (OUT / "big_slide.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
