"""Five hundred slides from index to report: time of each command, and whether its memory grows with what it has done.

Takes nothing (slides are made); runs ``app.index``, ``app.train`` for an epoch of one tile in ``--part``,
``app.predict`` and ``app.evaluate`` on all of them, and samples what their processes hold, four times a second. With
``--slides 1 --size 100000 --tile 2048 --steps 20`` it shows what one large slide takes.

    python -m benchmarks.many_slides.run [--slides 500] [--size 1536] [--tile 512] [--steps N] [--write]
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil

from benchmarks.results import OUT as BENCH_DATA
from benchmarks.results import ROOT, markdown_table, parser_of, publish, results

OUT = BENCH_DATA / "many_slides"
EVERY_S = 0.25
MODEL, BATCH = "unet_w4", 4


@dataclass(frozen=True)
class Stage:
    """Wall seconds of one command, and bytes of all of its processes over time, (s, bytes)."""

    name: str
    wall_s: float
    held: tuple[tuple[float, int], ...]

    def median_bytes(self, first: float, last: float) -> float:
        """Return the median bytes from ``first`` to ``last``, parts of its time."""
        inside = [held for at, held in self.held if first * self.wall_s <= at <= last * self.wall_s]
        return statistics.median(inside or [held for _, held in self.held])

    def cells(self, slides: int) -> tuple[str, ...]:
        """A row of the table."""
        early, late = self.median_bytes(0.25, 0.5), self.median_bytes(0.75, 1)
        most = max(held for _, held in self.held)
        shown = (f"{held / 1e9:.2f} GB" for held in (early, late, most))
        return self.name, f"{self.wall_s:.0f}", f"{slides / self.wall_s:.1f}", *shown, f"{late / early:.2f}"


def resident(root: psutil.Process) -> int:
    """Return the resident bytes of a process and of all its descendants that still live."""
    total = 0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def watched(name: str, *arguments: object) -> Stage:
    """Run ``python -m`` with ``arguments``, its memory sampled."""
    begun_s, held, log = time.perf_counter(), [], OUT / f"{name}.log"
    with log.open("w") as out:
        command = subprocess.Popen([sys.executable, "-m", *map(str, arguments)], cwd=ROOT, stdout=out, stderr=out)
        root = psutil.Process(command.pid)
        while command.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                held.append((time.perf_counter() - begun_s, resident(root)))
            time.sleep(EVERY_S)
    if command.returncode:
        sys.exit(f"{' '.join(map(str, arguments))} ended with {command.returncode}: {log} says why")
    stage = Stage(name, time.perf_counter() - begun_s, tuple(held))
    print(*stage.cells(1), flush=True)
    return stage


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--slides", type=int, default=500)
    parser.add_argument("--size", type=int, default=1536, help="px of a slide's side")
    parser.add_argument("--part", type=int, default=2, help="an epoch is one in so many training tiles")
    parser.add_argument("--tile", type=int, default=512, help="px")
    parser.add_argument("--steps", type=int, help="of training, in place of the part of an epoch")
    given = parser.parse_args()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    slides, run, predicted = OUT / "slides", OUT / "run", OUT / "predicted"
    length = ["--steps", given.steps] if given.steps else ["--epochs", 1 / given.part]
    batch, validation = (BATCH, []) if given.slides > 1 else (1, ["--validation", "0"])
    training = ["--model", MODEL, "--tile", given.tile, "--batch", batch, *validation, *length, "--lr", "0.003"]
    training += ["--parallel", "single", "--twin-steps=0", "--validation-tiles=1", "--out", run]
    checkpoint, split = run / "checkpoints" / "last.pt", ["--split", "train"] if given.slides == 1 else []
    where, truth = ["--slides", slides], ["--annotations", slides / "annotations", *split]
    stages = [
        watched("synth", "app.synth", slides, "--slides", given.slides, "--size", given.size, "--task", "segment"),
        watched("index", "app.index", *where, "--tile", given.tile, "--out", run),
        watched("train", "app.train", *where, *training),
        watched("predict", "app.predict", *where, "--checkpoint", checkpoint, "--out", predicted),
        watched("evaluate", "app.evaluate", "--predictions", predicted, *truth, *where),
    ]
    header = ("command", "s", "slides/s", "held, 2nd quarter", "held, last quarter", "most", "last / 2nd quarter")
    table = markdown_table(header, [stage.cells(given.slides) for stage in stages])
    summary = json.loads((run / "summary.json").read_text())
    scores = json.loads((predicted / "evaluation.json").read_text())
    hours = sum(stage.wall_s for stage in stages) / 3600
    dice, page_mb = scores["dice"]["gland"], (predicted / "report.html").stat().st_size / 1e6
    said = (
        f"{given.slides} slides of {given.size:,} px, {hours:.2f} hours; trained on {summary['images']:,} tiles; "
        f"Dice {dice:.3f} over {scores['annotated_slides']} slides; report.html {page_mb:.1f} MB.\n"
    )
    publish(__file__, results(table, said), given.write)


if __name__ == "__main__":
    main()
