"""``python -m app.synth``: artificial slides of stained tissue with labels or annotations, for trials and benchmarks.

Takes a folder, how many slides, how large, and the task; returns pyramidal JPEG TIFFs and ``labels.csv``, and for
`segment` a mask per slide under ``annotations/``. The drawing is in ``pipelines.synthetic``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import cv2
import tyro

from app.launch.host import usable_cores
from app.settings.cli import run_command
from app.settings.fields import at_least, broken
from pipelines.backends.tiff_levels import PRINT_UM
from pipelines.slides.geometry import MPP_MIN, check_mpp
from pipelines.synthetic.collection import Collection, make_collection

LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class SynthCommand:
    """Make artificial slides of stained tissue. The same settings give the same bytes; more can be added later."""

    out: Annotated[Path, tyro.conf.Positional]
    """Folder for the slides; made if missing. Slides that are already there and the same are kept."""
    slides: int = 8
    """How many."""
    size: int = 4096
    """Width and height in px, 512 to 200,000. Slides are written row by row: memory grows with the width alone."""
    task: Literal["classify", "segment"] = "classify"
    """classify: two classes, crowded and sparse glands, and labels.csv. segment: glands of many sizes, and their masks
    under annotations/."""
    seed: int = 0
    """Of everything drawn."""
    mpp: float = 0.5
    """Resolution in um/px that the files state."""
    workers: int = usable_cores()
    """Threads that draw. The result does not depend on it."""

    def validate(self) -> list[str]:
        rules = {
            **at_least(self, slides=1, workers=1),
            f"--size is 512 to 200000 px; got {self.size}": not 512 <= self.size <= 200_000,
            f"--mpp is {MPP_MIN} to below {PRINT_UM:g} um/px, since a coarser TIFF is taken for a printed picture; got "
            f"{self.mpp}": not (check_mpp(self.mpp) and self.mpp < PRINT_UM),
            f"--seed is 0 to 2147483647; got {self.seed}": not 0 <= self.seed < 1 << 31,
        }
        return broken(rules)


def synth(command: SynthCommand) -> None:
    cv2.setNumThreads(1)  # blocks are the unit of parallel work; threads within one would only get in their way
    began_s = last_s = time.monotonic()

    def report(slide_id: str, done: int, total: int) -> None:
        """Print a line for a finished slide, and one every ten seconds while a large one is drawn."""
        nonlocal last_s
        if done == total or time.monotonic() - last_s >= LINE_EVERY_S:
            last_s = time.monotonic()
            print(f"{slide_id}: " + ("done" if done == total else f"{100 * done // total}%"), flush=True)

    collection = Collection(command.task, command.slides, command.size, command.seed, command.mpp)
    made = make_collection(collection, command.out, workers=command.workers, report=report)
    kept = command.slides - made
    pixels = made * command.size**2
    print(
        f"{command.out}: {made} slides made"
        + (f", {kept} were there already" if kept else "")
        + f"; {pixels / 1e6:.0f} MPx in {time.monotonic() - began_s:.1f} s"
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(SynthCommand, synth, argv, prog="python -m app.synth")


if __name__ == "__main__":
    sys.exit(main())
