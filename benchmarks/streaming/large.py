"""Tiles that fit no other way, trained on from slide files in 2 GiB of device bytes: loss, seconds, bytes of each step.

Takes a case and where its tissue is from: slides of ``app.synth``, or ``--slide FILE``, whose level 0 is mirrored and
laid side by side to the size of the tile (the shipped section without a file); gives
``bench-data/streaming/large/large_CASE_TISSUE.json`` and a picture of the tile that was trained on; with ``--write``
both in ``results/``, and the table of all that are there in the README. ``app.train`` does the work. A few steps at
small tiles come first, with batch norm in training, whose statistics the large tiles are then normalised by. Labels of
laid-out tissue are made up: the slide and the same turned by a quarter are the two classes, dark px are the foreground.
What is measured is the work.

    python -m benchmarks.streaming.large --case resnet18-16384 [--slide FILE] [--write]
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import measured_on
from benchmarks.results import markdown_table, parser_of, results, write_results
from benchmarks.tile_reading.slide import SOURCE, make_slide
from pipelines.backends.registry import open_slide
from pipelines.slides.geometry import Region

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench-data" / "streaming" / "large"
README, RESULTS = Path(__file__).with_name("README.md"), Path(__file__).with_name("results")
COMMAND = "python -m benchmarks.streaming.large --case CASE [--slide FILE]"

DARK = 150
"""Grey value below which a px is called foreground, of 255."""
PICTURE = 768
"""px of the picture's side."""
MPP = 0.5
WARM_TILE, WARM_STEPS, WARM_BATCH = 256, 24, 4


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        model: as for ``--model``.
        tile: px.
        stream: px of the boxes.
        task: classify or segment.
        norm: as for ``--norm``.
        host: that maps may take, as for ``--offload-host=``; "" leaves it to the run.
    """

    model: str
    tile: int
    stream: int
    task: str = "classify"
    steps: int = 3
    memory: str = "2GiB"
    norm: str = "frozen"
    host: str = ""


CASES = {
    "resnet18-4096": Case("resnet18", 4096, 512),
    "resnet18-8192": Case("resnet18", 8192, 512),
    "resnet18-16384": Case("resnet18", 16384, 512),
    "resnet50-8192": Case("resnet50", 8192, 512),
    "resnet50-batch-4480": Case("resnet50", 4480, 256, norm="batch", host="15.5GiB"),
    "unet_w16-4096": Case("unet_w16", 4096, 512, "segment"),
    "unet-4096": Case("unet", 4096, 384, "segment", steps=2),
}
"""The first two: device bytes are to be those of the third."""


def synthetic_slides(case: Case) -> Path:
    """Return a folder of two slides of the tile's size; those of an earlier call are kept."""
    folder = OUT / "slides" / f"synthetic_{case.task}_{case.tile}"
    if not (folder / "synthetic.json").exists():
        size = ["--size", str(case.tile), "--mpp", str(MPP), "--task", case.task]
        _run("app.synth", str(folder), "--slides", "2", *size)
    return folder


def laid_slides(case: Case, source: Path) -> Path:
    """Return a folder of two slides of ``source`` laid side by side, with labels or masks."""
    folder = OUT / "slides" / f"{source.stem}_{case.task}_{case.tile}"
    paths = [
        make_slide(folder / f"{name}.tif", case.tile, source, turned=name == "turned") for name in ("as_is", "turned")
    ]
    if case.task == "classify":
        (folder / "labels.csv").write_text("slide,label\nas_is,upright\nturned,turned\n")
        return folder
    for path in paths:
        mask = folder / "masks" / f"{path.stem}_mask.png"
        if not mask.exists():
            mask.parent.mkdir(exist_ok=True)
            grey = cv2.cvtColor(pixels(path, case.tile), cv2.COLOR_RGB2GRAY)
            cv2.imwrite(str(mask), np.where(grey < DARK, 255, 0).astype(np.uint8))
    return folder


def pixels(path: Path, side: int) -> NDArray[np.uint8]:
    """Return the upper left ``side`` x ``side`` px of level 0."""
    with open_slide(path) as slide:
        level = slide.levels[0]
        return slide.read(Region(0, 0, min(side, level.width), min(side, level.height), slide.mpp))


def draw_picture(slides: Path, case: Case, path: Path) -> None:
    """Write the tile in small, with its boxes, beside the darkest piece of it in full resolution."""
    whole = pixels(sorted(slides.glob("*.tif"))[0], case.tile)
    pieces = [
        whole[row : row + PICTURE, column : column + PICTURE]
        for row in range(0, max(1, whole.shape[0] - PICTURE), PICTURE)
        for column in range(0, max(1, whole.shape[1] - PICTURE), PICTURE)
    ]
    detail = cv2.resize(min(pieces, key=lambda piece: float(piece[::8, ::8].mean())), (PICTURE, PICTURE))
    small = cv2.resize(whole, (PICTURE, PICTURE), interpolation=cv2.INTER_AREA)
    for cut in range(case.stream, case.tile, case.stream):
        place = cut * PICTURE // case.tile
        small[place] = small[:, place] = (small[place] // 2, small[:, place] // 2)[0]
    gap = np.full((PICTURE, 16, 3), 255, np.uint8)
    cv2.imwrite(
        str(path),
        cv2.cvtColor(np.concatenate([small, gap, detail], 1), cv2.COLOR_RGB2BGR),
        [cv2.IMWRITE_JPEG_QUALITY, 85],
    )


def warm_weights(case: Case, slides: Path, out: Path) -> Path:
    """Return a checkpoint of a few steps at small tiles, whose running statistics are those of the tissue."""
    run = out / "warm"
    small = ["--tile", str(min(WARM_TILE, case.tile)), "--batch", str(WARM_BATCH), "--steps", str(WARM_STEPS)]
    _train(slides, run, case, *small, "--norm", "batch")
    return run / "checkpoints" / "last.pt"


def measure(case: Case, slides: Path, out: Path) -> dict[str, Any]:
    """Return what ``app.train`` says of the large tile, with a row for each step."""
    run = out / "run"
    large = ["--tile", str(case.tile), "--stream", str(case.stream), "--batch", "1", "--steps", str(case.steps)]
    large += ["--norm", case.norm, "--memory", case.memory]
    if case.norm == "frozen":
        large += ["--weights", str(warm_weights(case, slides, out))]
    if case.host:
        large += [f"--offload-host={case.host}"]
    _train(slides, run, case, *large)
    summary = json.loads((run / "summary.json").read_text())
    with (run / "metrics.csv").open() as file:
        steps = [{"loss": float(row["loss"]), "seconds": float(row["step_s"])} for row in csv.DictReader(file)]
    kept = ("status", "model", "tile_px", "stream_px", "parameters", "memory_limit_bytes", "wall_s")
    (device_bytes,), (process_bytes,) = summary["device_bytes"], summary["peak_memory_bytes"]
    return {
        **{name: summary[name] for name in kept},
        "norm": case.norm,
        "device_bytes": device_bytes,
        "host_bytes": process_bytes - device_bytes,
        "resident_bytes": summary["peak_resident_bytes"][0],
        "steps": steps,
    }


def _train(slides: Path, run: Path, case: Case, *arguments: str) -> None:
    shutil.rmtree(run, ignore_errors=True)
    common = ["--slides", str(slides), "--out", str(run), "--model", case.model, "--mpp", str(MPP), "--min-tissue", "0"]
    common += ["--parallel", "single", "--validation", "0", "--lr", "1e-4", "--twin-steps=0"]
    _run("app.train", *common, *arguments)


def _run(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=True)


def table(folder: Path) -> str:
    """Return a line for each result in ``folder``."""
    lines, places = [], set()
    for path in sorted(folder.glob("large_*.json")):
        result = json.loads(path.read_text())
        places.add(result["environment"])
        losses = ", ".join(f"{step['loss']:.3f}" for step in result["steps"])
        seconds = ", ".join(f"{step['seconds']:.0f}" for step in result["steps"])
        sizes = [f"{result[name] / 2**20:,.0f}" for name in ("device_bytes", "host_bytes")]
        tile = f"{result['tile_px']:,}"
        lines.append(
            [result["model"], result["norm"], tile, result["tissue"], str(result["stream_px"]), losses, seconds, *sizes]
        )
    header = [
        "model",
        "norm",
        "tile px",
        "tissue",
        "boxes px",
        "loss of each step",
        "seconds of each",
        "device MiB",
        "host MiB",
    ]
    return markdown_table(header, lines) + "\nMeasured: " + "; ".join(sorted(places)) + ".\n"


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument(
        "--slide", type=Path, nargs="?", const=SOURCE, help="tissue; without a file the shipped section"
    )
    parser.add_argument("--tile", type=int, help="px, instead of the case's")
    parser.add_argument("--stream", type=int, help="px of the boxes, instead of the case's")
    parser.add_argument("--steps", type=int, help="instead of the case's")
    parser.add_argument("--write", action="store_true", help="the table of all results into the README")
    asked = parser.parse_args(argv)
    changed = {name: getattr(asked, name) for name in ("tile", "stream", "steps") if getattr(asked, name)}
    case = replace(CASES[asked.case], **changed)
    slides = laid_slides(case, asked.slide.resolve()) if asked.slide else synthetic_slides(case)
    tissue = asked.slide.stem if asked.slide else "synthetic"
    name = f"{asked.case}_{tissue}" + (f"_{case.tile}" if asked.tile else "")
    result = measure(case, slides, OUT / name)
    result |= {"case": asked.case, "tissue": tissue, "environment": measured_on()}
    folder = RESULTS if asked.write else OUT
    folder.mkdir(exist_ok=True)
    draw_picture(slides, case, folder / f"large_{name}.jpg")
    (folder / f"large_{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(folder))
    if asked.write:
        write_results(README, results(COMMAND, table(folder)), "large")
    return 0 if result["status"] == "completed" and result["device_bytes"] <= result["memory_limit_bytes"] else 1


if __name__ == "__main__":
    sys.exit(main())
