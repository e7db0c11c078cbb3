"""Slides of which few tiles show the class: labels for every tile, bags, and whole slides, by held-out slide AUC.

The same small network is trained by ``app.train`` in each way, for as many steps and tiles, on slides of noise and on
slides of real tissue (``slides.py``). Half of the slides are held out and scored once, after the last step. Runs are
forked from this process, which has imported torch.

    python -m benchmarks.bags.run noise [--slides 40] [--steps 240] [--seeds 5] [--write]
    python -m benchmarks.bags.run tissue [--images data/nuclei/images --masks data/nuclei/masks] [--write]
"""

from __future__ import annotations

import contextlib
import csv
import json
import multiprocessing
import os
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np
import sklearn.metrics  # noqa: F401  # for the forked runs, as is the session
import torch
from torch import nn

import app.train
import app.training.session
from app.prediction.trained_model import TrainedModel
from app.training.metrics import auc, slide_scores
from benchmarks.bags.slides import PX, TILES, make_noise_slides, make_tissue_slides
from benchmarks.results import OUT as BENCH_DATA
from benchmarks.results import ROOT, markdown_table, parser_of, results, write_results

OUT = BENCH_DATA / "bags"
NUCLEI = ROOT / "data" / "nuclei"
MODEL = "benchmarks.bags.run:Network"
TILE_LABELS, MAXIMUM = "labels for every tile, mean of tiles", "labels for every tile, maximum of tiles"
BAG, WHOLE = f"--bag {TILES}", "--tile slide --head attention"
FROZEN = f"--bag {TILES} --freeze trunk, encoder of labels for every tile"
WAYS: dict[str, tuple[str, ...]] = {
    TILE_LABELS: (),
    BAG: ("--bag", str(TILES)),
    WHOLE: ("--tile", "slide", "--head", "attention"),
    FROZEN: ("--bag", str(TILES), "--freeze", "trunk"),
}
COMMON = ("--model", MODEL, "--parallel", "single", "--lr", "0.001", "--warmup", "10", "--min-tissue", "0")
COMMON += ("--slide-mpp", "0.5", "--augment", "none", "--checkpoint-every", "100000")
COMMON += ("--validate-every=100000",)


class Network(nn.Sequential):
    """Three convolutions, global average pooling and a linear layer: (n, 3, h, w) -> (n, classes)."""

    def __init__(self, *, classes: int) -> None:
        layers: list[nn.Module] = []
        for channels, out in ((3, 12), (12, 16), (16, 16)):
            layers += [nn.Conv2d(channels, out, 3, 2, 1), nn.GroupNorm(4, out), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))


def train(given: Sequence[str], way: str, seed: int, steps: int) -> Path:
    """Train in a forked process; return the run folder. A step has the tiles of two slides.

    Args:
        given: ``--slides``, labels and split for ``app.train``.
    """
    runs = [Path(f"{given[1]}_run{k}") for k in range(len(WAYS))]
    out = runs[list(WAYS).index(way)]
    shutil.rmtree(out, ignore_errors=True)
    index = Path(f"{given[1]}_index") / ("slide" if way == WHOLE else "tiles")
    if index.exists():
        shutil.copytree(index, out)
    batch, microbatches = (2, 2) if way == WHOLE else (2 * TILES, 4)
    arguments = [*given, "--out", str(out), *COMMON, "--tile", str(PX), *WAYS[way], "--batch", str(batch)]
    arguments += ["--microbatches", str(microbatches), "--steps", str(steps), "--seed", str(seed)]
    if way == FROZEN:
        arguments += ["--weights", str(runs[0] / "checkpoints" / "last.pt")]
    run_forked(arguments, out, by_maximum=way == TILE_LABELS)
    if not index.exists():
        shutil.copytree(out / "tissue", index / "tissue")
        shutil.copy(out / "tiles.parquet", index)
    return out


def run_forked(arguments: list[str], out: Path, *, by_maximum: bool = False) -> None:
    """Run ``app.train`` with ``arguments``, whose run folder is ``out``, in a forked process.

    Args:
        by_maximum: writes ``maximum.json``, the AUC of held-out slides by the largest score of their tiles.
    """
    run = multiprocessing.get_context("fork").Process(target=_train, args=(arguments, out, by_maximum))
    run.start()
    run.join()
    if run.exitcode:
        log = out.with_suffix(".log")
        raise SystemExit(f"app.train ended with {run.exitcode}; {log} ends with\n{log.read_text()[-2000:]}")


def _train(arguments: list[str], out: Path, by_maximum: bool) -> None:
    log = out.with_suffix(".log").open("w")
    with log as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        code = app.train.main(arguments)
        if not code and by_maximum:
            (out / "maximum.json").write_text(json.dumps(_auc_of_maximum(out, Path(arguments[1]))))
    sys.exit(code)


def _auc_of_maximum(out: Path, slides: Path) -> float | None:
    """Return the AUC of held-out slides by the largest score of their tiles, of the run in ``out``."""
    model = TrainedModel(out / "checkpoints" / "last.pt", MODEL, torch.device("cpu"))
    with (out / "predictions.csv").open() as file:
        held_out = [row for row in csv.DictReader(file) if row["split"] == "val"]
    px, scores = model.tile, []
    for row in held_out:
        pixels = cv2.imread(str(slides / f"{row['slide']}.png"))
        assert pixels is not None
        pixels = pixels[..., ::-1]
        tiles = [pixels[y : y + px, x : x + px] for y in range(0, len(pixels), px) for x in range(0, len(pixels), px)]
        probabilities = model.probabilities(np.stack(tiles), (len(tiles), 3, px, px))
        assert probabilities is not None
        scores.append(slide_scores(probabilities.astype(np.float64), np.zeros(len(tiles), np.int64), "max", 1)[1][0])
    return auc(np.stack(scores), np.array([model.classes.index(row["label"]) for row in held_out]))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("kind", choices=("noise", "tissue"), help="what slides are made of")
    parser.add_argument("--slides", type=int, default=40, help="how many, half of them held out")
    parser.add_argument("--steps", type=int, default=240, help="of every run")
    parser.add_argument("--seeds", type=int, default=5, help="runs of every way: of weights, order and split")
    parser.add_argument("--images", type=Path, default=NUCLEI / "images", help="stained tissue, PNG files")
    parser.add_argument("--masks", type=Path, default=NUCLEI / "masks", help="nuclei, PNG files of the same names")
    arguments = parser.parse_args()
    slides = OUT / arguments.kind
    given = ["--slides", str(slides), "--labels", str(slides / "labels.csv"), "--validation", "0.5"]
    aucs: dict[str, list[float]] = {name: [] for name in (TILE_LABELS, MAXIMUM, BAG, WHOLE, FROZEN)}
    shutil.rmtree(f"{slides}_index", ignore_errors=True)
    if arguments.kind == "noise":
        make_noise_slides(slides, arguments.slides)
    for seed in range(arguments.seeds):
        if arguments.kind == "tissue":
            make_tissue_slides(slides, arguments.slides, arguments.images, arguments.masks, seed)
            shutil.rmtree(f"{slides}_index", ignore_errors=True)
            given[4:] = ["--splits", str(slides / "splits.csv")]
        for way in WAYS:
            out = train(given, way, seed, arguments.steps)
            aucs[way].append(json.loads((out / "summary.json").read_text())["metrics"]["slide_auc"])
            if way == TILE_LABELS:
                aucs[MAXIMUM].append(json.loads((out / "maximum.json").read_text()))
        text = table(aucs)
        print(text, flush=True)
        if arguments.write:
            write_results(Path(__file__).with_name("README.md"), results(text), arguments.kind)
    return 0


def table(aucs: Mapping[str, Sequence[float]]) -> str:
    """Return the slide AUC of each way, by seed."""
    rows = [
        [name, f"{statistics.mean(of_seeds):.2f}", ", ".join(f"{value:.2f}" for value in of_seeds)]
        for name, of_seeds in aucs.items()
    ]
    return markdown_table(["trained with", "slide AUC, mean", "each seed"], rows)


if __name__ == "__main__":
    sys.exit(main())
