"""Tiles that fit no other way, trained on from slide files in 2 GiB of device bytes: loss, seconds, bytes of each step.

Takes a case; gives the table of the README, with the rows of cases that were measured before. Slides are made by
``app.synth``, and ``app.train`` does the work. A few steps at small tiles come first, with batch norm in training:
large tiles are normalised by their statistics. Exit code 1 if a tile takes more memory than asked.

    python -m benchmarks.streaming.large --case resnet18-16384 [--write]
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.results import (
    OUT,
    ROOT,
    finish,
    markdown_table,
    measured_on,
    parser_of,
    publish,
    read_json,
    results,
    write_json,
)

FOLDER = OUT / "streaming_large"
MPP = ("--mpp", "0.5")
WARM = ("--tile", "256", "--batch", "4", "--steps", "24", "--norm", "batch")


@dataclass(frozen=True)
class Case:
    """Tiles of ``tile`` px in boxes of ``stream`` px.

    Attributes:
        model, norm: as for ``app.train``.
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
"""Device bytes of the first three are to be the same."""


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Return what ``app.train`` says of the large tile, with a row for each step."""
    slides = FOLDER / "slides" / f"{case.task}_{case.tile}"
    if not (slides / "synthetic.json").exists():
        _run("app.synth", str(slides), "--slides", "2", "--size", str(case.tile), *MPP, "--task", case.task)
    large = ["--tile", str(case.tile), "--stream", str(case.stream), "--batch", "1", "--steps", str(case.steps)]
    large += ["--norm", case.norm, "--memory", case.memory]
    if case.norm == "frozen":
        _train(slides, folder / "warm", case, *WARM)
        large += ["--weights", str(folder / "warm" / "checkpoints" / "last.pt")]
    if case.host:
        large += [f"--offload-host={case.host}"]
    _train(slides, folder / "run", case, *large)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    with (folder / "run" / "metrics.csv").open() as file:
        steps = [{"loss": float(row["loss"]), "seconds": float(row["step_s"])} for row in csv.DictReader(file)]
    (device_bytes,), (process_bytes,) = summary["device_bytes"], summary["peak_memory_bytes"]
    return {
        **asdict(case),
        "status": summary["status"],
        "limit_bytes": summary["memory_limit_bytes"],
        "device_bytes": device_bytes,
        "host_bytes": process_bytes - device_bytes,
        "steps": steps,
        "environment": measured_on(),
    }


def _train(slides: Path, run: Path, case: Case, *arguments: str) -> None:
    shutil.rmtree(run, ignore_errors=True)
    common = ["--slides", str(slides), "--out", str(run), "--model", case.model, *MPP, "--min-tissue", "0"]
    common += ["--parallel", "single", "--validation", "0", "--lr", "1e-4", "--twin-steps=0"]
    _run("app.train", *common, *arguments)


def _run(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=True)


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return a line for each case that was measured."""
    lines = [
        [
            row["model"],
            row["norm"],
            f"{row['tile']:,}",
            str(row["stream"]),
            ", ".join(f"{step['loss']:.3f}" for step in row["steps"]),
            ", ".join(f"{step['seconds']:.0f}" for step in row["steps"]),
            *(f"{row[name] / 2**20:,.0f}" for name in ("device_bytes", "host_bytes")),
        ]
        for row in found.values()
    ]
    header = ["model", "norm", "tile px", "boxes px", "loss of each step", "seconds of each", "device MiB", "host MiB"]
    return markdown_table(header, lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--tile", type=int, help="px, instead of the case's")
    parser.add_argument("--stream", type=int, help="px of the boxes, instead of the case's")
    parser.add_argument("--steps", type=int, help="instead of the case's")
    asked = parser.parse_args()
    changed = {name: getattr(asked, name) for name in ("tile", "stream", "steps") if getattr(asked, name)}
    name = asked.case + "".join(f"_{value}" for value in changed.values())
    found = {**read_json("streaming_large"), name: measure(replace(CASES[asked.case], **changed), FOLDER / name)}
    write_json("streaming_large", found)
    text = results("python -m benchmarks.streaming.large --case CASE --write", table(found))
    publish(__file__, text, asked.write, "large")
    row = found[name]
    met = row["status"] == "completed" and row["device_bytes"] <= row["limit_bytes"]
    finish(() if met else [f"{name}: {row['status']}, {row['device_bytes']} bytes of {row['limit_bytes']}"])


if __name__ == "__main__":
    main()
