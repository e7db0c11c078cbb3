"""``--bag`` and ``--pictures resize`` as a user runs them: training, resume, prediction, attention and scores."""

import csv
import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score
from torchvision.transforms import v2

from app.evaluation import classification
from pipelines.catalog.table import FailedSlides
from tests.app.conftest import CLASSIFIER, checkpoint_of, interrupted, rows_of, same_weights, summary_of
from tests.helpers import tiny_models
from tests.helpers.in_process import call
from tests.helpers.real import SVS

PX, TILES = 64, 6
LOUD = ((1, 2), (4, 0), (3, 5))
"""Where, in tiles, the informative one is on each positive slide."""


@pytest.fixture(scope="module")
def bag_slides(tmp_path_factory):
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


BAGS = ("--model", CLASSIFIER, "--tile", str(PX), "--bag", "36", "--batch", "72", "--microbatches", "6", "--lr", "0.03")
BAGS += ("--min-tissue", "0", "--slide-mpp", "0.5", "--augment", "none", "--validation", "0.34", "--seed", "1")


@pytest.fixture(scope="module")
def bags(bag_slides, train, tmp_path_factory):
    out = tmp_path_factory.mktemp("bag") / "run"
    data = ("--slides", bag_slides, "--labels", bag_slides / "labels.csv")
    train(*data, *BAGS, "--steps", "30", "--validate-every=30", "--out", out)
    return out


def test_bags_learn_from_labels_of_slides(bags):
    summary = summary_of(bags)
    assert summary["images"] == 30 * 72
    assert summary["metrics"]["slide_auc"] == 1
    assert "tile_auc" not in summary["metrics"]
    shown = [example for example in summary["examples"] if example["truth"] == "dotted"]
    assert shown, "the report shows the tile of each slide that weighs most"
    for example in shown:
        row, column = LOUD[int(example["slide"][1:]) // 2 % 3]
        assert (example["l0_y"], example["l0_x"]) == (row * PX, column * PX)


def test_prediction_maps_attention(bags, bag_slides, tmp_path):
    out, few, checkpoint = tmp_path / "predicted", tmp_path / "few", bags / "checkpoints" / "best.pt"
    few.mkdir()
    for name in ("s0.png", "s1.png", "s2.png"):
        shutil.copy(bag_slides / name, few)
    call("app.predict", "--slides", few, "--checkpoint", checkpoint, "--out", out, "--model", CLASSIFIER, code=0)
    tiles = rows_of(out / "tiles" / "s1.csv")
    weights = np.array([float(tile["attention"]) for tile in tiles])
    assert weights.mean() == pytest.approx(1)
    loudest, (row, column) = tiles[int(weights.argmax())], LOUD[0]
    assert abs(int(loudest["l0_y"]) - row * PX) < PX / 2  # windows overlap
    assert abs(int(loudest["l0_x"]) - column * PX) < PX / 2
    assert tifffile.imread(out / "heat_maps" / "s1.attention_weights.tif").max() == 255
    scores = {row["slide"]: float(row["score_dotted"]) for row in rows_of(out / "slides.csv")}
    assert all((score > 0.5) == int(slide[1:]) % 2 for slide, score in scores.items())


def test_slides_without_labels_of_their_own_are_refused(segment_slides, train, tmp_path):
    """Annotations label tiles; the label of a bag's first tile would stand for all of it."""
    asked = ("--model", CLASSIFIER, "--task", "classify", "--tile", "64", "--bag", "4", "--batch", "4")
    done = train("--slides", segment_slides, *asked, "--out", tmp_path / "run", code=None)
    assert done.returncode in (1, 2)
    assert "--bag gives the tiles of a slide one label, and these slides have none" in done.stderr


RUN = ("--pictures", "resize", "--tile", "32", "--model", CLASSIFIER, "--batch", "4", "--lr", "0.01", "--steps", "4")
RUN += ("--parallel", "single", "--microbatches", "2", "--twin-steps=0", "--validate-every=1000")
BROKEN = {"train/ants/broken", "train/bees/CMU-1-Small-Region"}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Two classes whose pictures have the same names, of mixed sizes; a broken one, and a slide that is none."""
    root = tmp_path_factory.mktemp("pictures")
    numbers = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3)):
        for c, name in enumerate(("ants", "bees")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for k in range(count):
                width, height = ((50, 37), (24, 24), (33, 80))[k % 3]
                pixels = numbers.integers(0, 120, (height, width, 3)).astype(np.uint8)
                pixels[..., 2 * c] += 100
                cv2.imwrite(str(folder / f"{k}.{'png' if k % 2 else 'JPEG'}"), pixels)
    (root / "train" / "ants" / "broken.jpg").write_bytes((root / "train" / "ants" / "0.JPEG").read_bytes()[:300])
    shutil.copy(SVS, root / "train" / "bees")
    return root


@pytest.fixture(scope="module")
def run(pictures, tmp_path_factory, train):
    out = tmp_path_factory.mktemp("pictures") / "run"
    done = train("--slides", pictures, *RUN, "--out", out)
    assert "slides by split: train 12, val 6, test 0" in done.stdout
    return out


def assert_bad_ones_are_named(folder):
    failed = {slide: error for slide, _, error in FailedSlides(folder / "failed_slides.csv").rows()}
    assert set(failed) == BROKEN
    assert "this is a slide (read by tiled): leave out --pictures" in failed["train/bees/CMU-1-Small-Region"]


@pytest.mark.process
def test_bad_pictures_are_named_and_the_others_scored_as_torchvision_cuts_them(run, pictures):
    assert_bad_ones_are_named(run)
    model = tiny_models.classifier(2)
    model.load_state_dict(checkpoint_of(run)["model"])
    cut = v2.Compose([v2.Resize(37), v2.CenterCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    normal = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    rows = rows_of(run / "predictions.csv")
    assert len(rows) == 6
    for row in rows:
        (path,) = (pictures / row["slide"]).parent.glob(f"{Path(row['slide']).name}.*")
        assert row["label"] == path.parent.name
        with torch.no_grad():
            scores = model.eval()(normal(cut(Image.open(path)))[None]).softmax(1)[0]
        assert [float(row["score_ants"]), float(row["score_bees"])] == pytest.approx(scores.tolist(), abs=1e-5)


@pytest.mark.process
def test_predictions_are_those_of_validation_and_are_evaluated(run, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(classification, "RESAMPLES", 20)
    best, out = run / "checkpoints" / "best.pt", tmp_path / "out"
    words = ("app.predict", "--slides", pictures, "--checkpoint", best, "--model", CLASSIFIER, "--out", out)
    call(*words, code=0)
    assert_bad_ones_are_named(out)
    predicted, held_out = (
        {row["slide"]: row for row in rows_of(t)} for t in (out / "slides.csv", run / "predictions.csv")
    )
    assert (len(predicted), len(held_out)) == (18, 6)
    for slide, row in held_out.items():
        for score in ("score_ants", "score_bees"):
            assert float(predicted[slide][score]) == pytest.approx(float(row[score]), abs=1e-6)
    assert "already: 18 slides" in call(*words).stdout
    done = call("app.evaluate", "--predictions", out, "--labels", run / "predictions.csv", "--slides", pictures, code=0)
    right = [row["label"] == "bees" for row in held_out.values()]
    scores = [float(row["score_bees"]) for row in held_out.values()]
    value = json.loads((out / "evaluation.json").read_text())["slide_auc"]["value"]
    assert value == pytest.approx(roc_auc_score(right, scores))
    assert "whole pictures, resized to 32 px" in (out / "report.html").read_text()
    for said, name, other in (
        (done.stdout, "picture AUC", "slide AUC"),
        ((run / "run.log").read_text(), "picture_auc", "slide_auc"),
        ((run / "report.html").read_text(), "Picture AUC", "Slide AUC"),
    ):
        assert name in said
        assert other not in said


@pytest.mark.process
def test_a_resumed_run_ends_with_the_same_weights(run, pictures, tmp_path, train):
    shutil.copy(run / "tiles.parquet", tmp_path)
    resumed = ("--slides", pictures, *RUN, "--out", tmp_path)
    with interrupted(2):
        train(*resumed)
    assert summary_of(tmp_path)["steps"] == 2
    train(*resumed, "--resume")
    assert same_weights(tmp_path, run)


@pytest.mark.process
def test_pictures_are_indexed(pictures, tmp_path):
    words = ["--slides", str(pictures), "--out", str(tmp_path / "index"), "--pictures", "resize", "--tile", "32"]
    call("app.index", *words, code=0)
