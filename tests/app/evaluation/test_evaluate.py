"""``app.evaluate`` on predictions whose worth is known: perfect areas, labels that are right and wrong."""

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest

from app.evaluation import classification
from app.evaluation.areas import true_mask
from app.prediction.prediction_folder import PredictionFolder
from pipelines.catalog.catalog import SlideSpec
from pipelines.labels.annotation_files import annotations_in
from pipelines.labels.annotations import read_annotations
from tests.helpers.drawings import box, write_geojson
from tests.helpers.hand_made_checkpoint import SEGMENTER, write_checkpoint
from tests.helpers.in_process import call

SIDE = 128


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Four slides with a dark square, larger from one to the next, predicted; true masks; the second's is twice as
    high as what is dark."""
    root = tmp_path_factory.mktemp("evaluate")
    for name in ("slides", "truth"):
        (root / name).mkdir()
    for k in range(4):
        pixels, mask = np.full((SIDE, SIDE, 3), 240, np.uint8), np.zeros((SIDE, SIDE), np.uint8)
        side = 10 + 10 * k
        pixels[20 : 20 + side, 30 : 30 + side] = 20
        mask[20 : 20 + side * (2 if k == 1 else 1), 30 : 30 + side] = 1
        cv2.imwrite(str(root / "slides" / f"s{k}.png"), pixels)
        cv2.imwrite(str(root / "truth" / f"s{k}.png"), mask)
    (root / "truth" / "classes.txt").write_text("1 dark\n")
    checkpoint = write_checkpoint(root / "best.pt", SEGMENTER, tile=64, mpp=0.5, min_tissue=0)
    call(
        "app.predict", "--slides", root / "slides", "--checkpoint", checkpoint, "--out", root / "out",
        "--model", SEGMENTER, "--slide-mpp", "0.5", env={"OMP_NUM_THREADS": "1"}, code=0)  # fmt: skip
    (root / "labels.csv").write_text(
        "slide,label,patient\ns0,background,p0\ns1,dark,p1\ns2,background,p2\ns3,dark,p3\n"
    )
    return root


def test_scores_and_the_page(folders, monkeypatch):
    monkeypatch.setattr(classification, "RESAMPLES", 50)
    done = call(
        "app.evaluate", "--predictions", folders / "out", "--labels", folders / "labels.csv",
        "--annotations", folders / "truth", "--slides", folders / "slides", code=0)  # fmt: skip
    figures = json.loads((folders / "out" / "evaluation.json").read_text())
    assert figures["slide_auc"]["value"] == figures["patient_auc"]["value"] == 0.75  # s1 below s2
    assert figures["dice"] == {"dark": pytest.approx((1 + 2 / 3 + 1 + 1) / 4)}
    assert figures["iou"] == {"dark": pytest.approx((1 + 1 / 2 + 1 + 1) / 4)}
    low, high = figures["dice_interval"]["dark"]
    assert 2 / 3 <= low < figures["dice"]["dark"] < high == pytest.approx(1)  # of the resamples, some are without s1
    assert "slide AUC 0.7500" in done.stdout
    assert "FROC 1.0000" not in done.stdout
    assert figures["detections"] == {"dark": 4}
    page = ElementTree.parse(folders / "out" / "report.html")
    sources = [image.get("alt") for image in page.iter("img")]
    shown = [alt for alt in sources if alt.startswith("areas of")]
    assert shown == ["areas of s1, Dice 0.667", *(f"areas of s{k}, Dice 1.000" for k in (0, 2, 3))]
    assert sum(alt.startswith("tile ") for alt in sources) == 12


def test_annotations_have_the_class_map_of_the_run(folders, tmp_path):
    shutil.copytree(folders / "out", tmp_path / "out")
    made_with = json.loads((folders / "out" / "predict.json").read_text())
    made_with["class_map"] = ["Dark=dark", "blurred=ignore", "on training slides only=ignore"]
    (tmp_path / "out" / "predict.json").write_text(json.dumps(made_with))
    shutil.copytree(folders / "truth", tmp_path / "truth")
    (tmp_path / "truth" / "classes.txt").write_text("1 Dark\n2 blurred\n3 DARK\n")
    mask = cv2.imread(str(folders / "truth" / "s1.png"), cv2.IMREAD_UNCHANGED)
    mask[40:] *= 2  # what is not dark
    mask[0, 0] = 3
    cv2.imwrite(str(tmp_path / "truth" / "s1.png"), mask)
    done = call("app.evaluate", "--predictions", tmp_path / "out", "--annotations", tmp_path / "truth", code=0)
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["dice"] == {"dark": 1.0}
    assert "count as background: DARK" in done.stdout


def test_what_is_found_where_annotations_do_not_count_is_no_false_alarm(folders, tmp_path):
    shutil.copytree(folders / "out", tmp_path / "out")
    shutil.copytree(folders / "truth", tmp_path / "truth")
    cv2.imwrite(str(tmp_path / "truth" / "s3.png"), np.full((SIDE, SIDE), 255, np.uint8))
    call("app.evaluate", "--predictions", tmp_path / "out", "--annotations", tmp_path / "truth", code=0)
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["detections"] == {"dark": 3}


def test_far_from_the_corner_the_truth_lies_where_it_was_drawn(tmp_path):
    write_geojson(tmp_path / "s.geojson", box(99_840, 512, 100_096, 768, "tumour"))
    specs = [SlideSpec("s", Path("s"))]
    truth = read_annotations(annotations_in(tmp_path, specs), specs, {})
    placed = {"l0_size": [100_096, 1024], "l0_bounds": [0, 0, 100_096, 1024], "mpp": 0.25}
    mask = true_mask(truth, "s", placed | {"l0_px": 256, "width": 391, "height": 4})
    assert np.argwhere(mask).tolist() == [[2, 390]]


def test_classes_that_nobody_annotated_do_not_shift_the_others(folders, tmp_path):
    """One that ``classes.txt`` names was scored, and had a Dice of 0."""
    shutil.copytree(folders / "out", tmp_path / "out")
    shutil.copytree(folders / "truth", tmp_path / "truth")
    (tmp_path / "truth" / "classes.txt").write_text("1 dark\n2 pale\n")
    made_with = json.loads((folders / "out" / "predict.json").read_text())
    made_with |= {"classes": ["background", "pale", "dark"], "shown": ["pale", "dark"], "positive_class": None}
    (tmp_path / "out" / "predict.json").write_text(json.dumps(made_with))
    for k in range(4):
        mask = str(PredictionFolder(tmp_path / "out").file("masks", f"s{k}"))
        cv2.imwrite(mask, 2 * cv2.imread(mask, cv2.IMREAD_UNCHANGED))
    done = call("app.evaluate", "--predictions", tmp_path / "out", "--annotations", tmp_path / "truth", code=0)
    figures = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert figures["dice"] == {"dark": pytest.approx((1 + 2 / 3 + 1 + 1) / 4)}
    assert "predicted classes that no annotation has are not scored: pale" in done.stdout


@pytest.mark.parametrize("suffix", ["geojson", "png"])
def test_all_that_is_predicted_on_slides_without_a_lesion_is_wrong(suffix, folders, tmp_path):
    shutil.copytree(folders / "out", tmp_path / "out")
    for k in range(4):
        path = write_geojson(tmp_path / "truth" / f"s{k}.geojson")
        if suffix == "png":
            path.unlink()
            cv2.imwrite(str(path.with_suffix(".png")), np.zeros((SIDE, SIDE), np.uint8))
    done = call("app.evaluate", "--predictions", tmp_path / "out", "--annotations", tmp_path / "truth", code=0)
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["dice"] == {"dark": 0.0}
    assert "no FROC (0 lesions, 4 detections: no lesion of 275 um or more)" in done.stdout


def test_what_does_not_fit_is_refused(folders, tmp_path):
    labels = tmp_path / "labels.csv"
    labels.write_text("slide,label\ns0,tumour\ns1,dark\n")
    refused = call("app.evaluate", "--predictions", folders / "out", "--labels", labels, code=2)
    assert "'tumour' is no class of the model (background, dark)" in refused.stderr


@pytest.mark.parametrize(("negative", "positive"), [("negative", "macro"), ("normal", "dark")])
def test_labels_that_are_no_classes_give_patients_alone_next_to_annotations(
    negative, positive, folders, tmp_path, monkeypatch
):
    """CAMELYON17 has ``negative`` and ``macro``; training took such a table, and the evaluation refused it."""
    monkeypatch.setattr(classification, "RESAMPLES", 20)
    labels = tmp_path / "labels.csv"
    labels.write_text(f"slide,label,patient\ns0,{negative},p\ns1,{positive},p\ns2,{positive},q\ns3,,q\n")
    words = ("--predictions", folders / "out", "--labels", labels, "--annotations", folders / "truth")
    done = call("app.evaluate", *words, "--out", tmp_path, code=0)
    figures = json.loads((tmp_path / "evaluation.json").read_text())
    strange = ", ".join(sorted({negative, positive} - {"dark"}))
    what = f"its labels are not all classes of the model (background, dark), but {strange}; only its patients are used"
    assert what in done.stdout
    assert (figures["patients_unknown"], figures["annotated_slides"], "slides" in figures) == ([], 4, False)
