"""``--bag`` as a user runs it: training, refusals, and the attention of a prediction."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile

from tests.app.conftest import Train, summary_of
from tests.helpers.in_process import call

PX, TILES = 64, 6
LOUD = ((1, 2), (4, 0), (3, 5))
"""Where, in tiles, the informative one is on each positive slide."""


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slides of 6 x 6 tiles; positive ones have a single tile with dark dots."""
    folder, rng = tmp_path_factory.mktemp("bags"), np.random.default_rng(0)
    rows = [("slide", "label", "patient")]
    for number in range(12):
        pixels = rng.integers(150, 190, (TILES * PX, TILES * PX, 3), np.uint8)
        if number % 2:
            row, column = LOUD[number // 2 % 3]
            tile = pixels[row * PX : (row + 1) * PX, column * PX : (column + 1) * PX]
            tile[::2] = 20
        cv2.imwrite(str(folder / f"s{number}.png"), pixels)
        rows.append((f"s{number}", ("plain", "dotted")[number % 2], f"p{number}"))
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder


BAGS = ("--model", "tests.helpers.tiny_models:classifier", "--tile", str(PX), "--bag", "36", "--batch", "72")
BAGS += ("--microbatches", "6", "--min-tissue", "0", "--slide-mpp", "0.5", "--lr", "0.03", "--augment", "none")
BAGS += ("--validation", "0.34", "--seed", "1")


@pytest.fixture(scope="module")
def run(slides: Path, train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bag") / "run"
    done = train(
        "--slides",
        slides,
        "--labels",
        slides / "labels.csv",
        *BAGS,
        "--steps",
        "30",
        "--validate-every=30",
        "--out",
        out,
    )
    assert done.returncode == 0, done.stderr
    return out


def test_bags_learn_from_labels_of_slides(run: Path) -> None:
    summary = summary_of(run)
    assert summary["images"] == 30 * 72
    assert summary["metrics"]["slide_auc"] == 1
    assert "tile_auc" not in summary["metrics"]
    shown = [example for example in summary["examples"] if example["truth"] == "dotted"]
    assert shown, "the report shows the tile of each slide that weighs most"
    for example in shown:
        row, column = LOUD[int(example["slide"][1:]) // 2 % 3]
        assert (example["l0_y"], example["l0_x"]) == (row * PX, column * PX)


def test_prediction_maps_attention(run: Path, slides: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "best.pt"
    out = tmp_path / "predicted"
    model = ("--model", "tests.helpers.tiny_models:classifier")
    few = tmp_path / "few"
    few.mkdir()
    for name in ("s0.png", "s1.png", "s2.png"):
        shutil.copy(slides / name, few)
    done = call("app.predict", "--slides", few, "--checkpoint", checkpoint, "--out", out, *model)
    assert done.returncode == 0, done.stderr
    with (out / "tiles" / "s1.csv").open() as file:
        tiles = list(csv.DictReader(file))
    weights = np.array([float(tile["attention"]) for tile in tiles])
    assert weights.mean() == pytest.approx(1)
    loudest = tiles[int(weights.argmax())]
    row, column = LOUD[0]
    assert abs(int(loudest["l0_y"]) - row * PX) < PX / 2  # windows overlap
    assert abs(int(loudest["l0_x"]) - column * PX) < PX / 2
    attention = tifffile.imread(out / "heat_maps" / "s1.attention_weights.tif")
    assert attention.max() == 255
    with (out / "slides.csv").open() as file:
        scores = {row["slide"]: float(row["score_dotted"]) for row in csv.DictReader(file)}
    assert all((score > 0.5) == int(slide[1:]) % 2 for slide, score in scores.items())


def test_what_bags_do_not_go_with_is_refused(slides: Path, train: Train, tmp_path: Path) -> None:
    given = ("--slides", slides, "--labels", slides / "labels.csv", "--out", tmp_path / "run")
    wrong = ("--sample", "class", "--slide-score", "max", "--parallel", "fsdp", "--ranks", "2")
    done = train(*given, "--bag", "12", "--batch", "16", *wrong)
    assert done.returncode == 2
    for text in ("--batch 16: use --batch 24", "leave out --sample class", "--slide-score max", "--parallel fsdp"):
        assert text in done.stderr


def test_slides_without_labels_of_their_own_are_refused(segment_slides: Path, train: Train, tmp_path: Path) -> None:
    """Annotations label tiles; the label of a bag's first tile would stand for all of it."""
    model = ("--model", "tests.helpers.tiny_models:classifier", "--task", "classify", "--tile", "64")
    done = train("--slides", segment_slides, *model, "--bag", "4", "--batch", "4", "--out", tmp_path / "run")
    assert done.returncode in (1, 2)
    assert "--bag gives the tiles of a slide one label, and these slides have none" in done.stderr
