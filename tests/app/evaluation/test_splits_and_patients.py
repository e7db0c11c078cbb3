"""Which slides ``app.evaluate`` scores, and whose they are, on predictions that are written by hand."""

import csv
import json

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score

from app.evaluation import classification
from app.evaluation.classification import ScoredSplit, labelled_slides, patients_of
from app.evaluation.report_page import SHOWN, extreme_tiles
from app.prediction.prediction_folder import PredictionFolder
from pipelines.catalog.handles import SlideState
from pipelines.catalog.table import read_table, write_rows
from pipelines.labels.class_names import ClassMap
from tests.helpers.in_process import call

CLASSES = ("cancer", "normal")
SPLITS = {"train": 12, "val": 8, "test": 10, "external": 6}


def write_predictions(path, splits=SPLITS, classes=CLASSES, name="{split}{k}", patient=None, positive="cancer"):
    """Scores drawn at random, half of the slides of each class; two slides are of one patient where ``patient`` is a
    format."""
    random = np.random.default_rng(3)
    folder = PredictionFolder(path)
    made_with = {"model": "m", "task": "classify", "tile": 64, "mpp": 0.5, "classes": list(classes)}
    made_with |= {"shown": [], "class_map": [], "whole_pictures": False, "positive_class": positive}
    folder.open(made_with)
    rows = []
    for split, count in splits.items():
        for k in range(count):
            label = k % len(classes)
            score = random.dirichlet(np.ones(len(classes)) + np.eye(len(classes))[label])
            row = {
                "slide": name.format(split=split, k=k, half=k // 2),
                "split": split,
                "patient": patient and patient.format(split=split, half=k // 2),
                **{f"score_{c}": float(s) for c, s in zip(classes, score, strict=True)},
            }
            folder.finish(row, SlideState.of(folder.path / "predict.json"), {}, {})
            rows.append({**row, "label": classes[label]})
    with (path / "labels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["slide", "label"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return rows


def evaluate(path, *words, labels="labels.csv", code=0):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classification, "RESAMPLES", 20)
        done = call("app.evaluate", "--predictions", path, "--labels", path / labels, *words, code=code)
    return done, {} if code else json.loads((path / "evaluation.json").read_text())


@pytest.fixture(scope="module")
def predictions(tmp_path_factory):
    path = tmp_path_factory.mktemp("predictions")
    return path, write_predictions(path)


@pytest.mark.parametrize(
    ("words", "scored"),
    [
        ((), ["test"]),
        (("--split", "val"), ["val"]),
        (("--split", "train"), ["train"]),
        (("--split", "external"), ["external"]),
        (("--split", "all"), list(SPLITS)),
    ],
)
def test_scores_are_of_one_split_and_those_of_scikit_learn(predictions, words, scored):
    path, rows = predictions
    done, figures = evaluate(path, *words)
    own = [row for row in rows if row["split"] in scored]
    label = np.array([row["label"] == "cancer" for row in own])
    score = np.array([row["score_cancer"] for row in own])
    assert figures["split"] == (scored[0] if len(scored) == 1 else "all")
    assert figures["slides"] == len(own)
    expected = {
        "slide_auc": roc_auc_score(label, score),
        "slide_auprc": average_precision_score(label, score),
        "slide_balanced_accuracy": balanced_accuracy_score(label, score > 0.5),
    }
    assert {name: figures[name]["value"] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert f"scored split: {figures['split']}, {len(own)} slides" in done.stdout
    trained = sorted(row["slide"] for row in own if row["split"] == "train")
    assert figures["training_slides"] == trained
    assert ("training slides: train0" in done.stdout) == bool(trained)
    assert ("training slides: train0" in (path / "report.html").read_text()) == bool(trained)
    assert "patients unknown: slides are resampled one by one" in done.stdout
    assert "patient_auc" not in figures


@pytest.mark.parametrize(
    ("counts", "scored"),
    [
        ({"train": 1, "val": 1, "external": 1}, "val"),
        ({"train": 1, "external": 1}, "external"),
        ({"train": 1}, None),
    ],
)
def test_the_default_split(counts, scored):
    rows = [{"slide": f"{split}{k}", "split": split} for split, count in counts.items() for k in range(count)]
    if scored is None:
        with pytest.raises(ValueError, match=r"all predicted slides are training slides.*--split train"):
            ScoredSplit(rows, None)
    else:
        split = ScoredSplit(rows, None)
        assert (split.name, [row["split"] for row in split.rows]) == (scored, [scored])
    with pytest.raises(ValueError, match=f"--split test has no predicted slide.* with --split {min(counts)}$"):
        ScoredSplit(rows, "test")


@pytest.mark.parametrize(
    ("written", "words", "patients"),
    [
        ({"name": "{split}_{k}"}, (), None),
        ({"name": "{split}_{k}"}, ("--patient-pattern", "^(test)_[0-4]$"), 6),  # one of five slides, and five others
        ({"name": "{split}-{half}-{k}"}, ("--patient-pattern", "^[a-z]+-[0-9]"), 5),
        ({"name": "{split}_{k}", "patient": "{split}p{half}"}, (), 5),
    ],
)
def test_patients_are_known_or_unknown(tmp_path, written, words, patients):
    write_predictions(tmp_path, {"train": 4, "test": 10}, **written)
    done, figures = evaluate(tmp_path, *words)
    assert figures["patients"] == patients
    assert ("patient_auc" in figures) == (patients is not None)
    assert ("patients unknown: slides are resampled" in done.stdout) == (patients is None)
    assert ("patients of 5 of 10 slides unknown" in done.stdout) == (patients == 6)


def test_a_table_names_patients(tmp_path):
    write_predictions(tmp_path, {"test": 4})
    (tmp_path / "own.csv").write_text(
        "slide,label,patient\ntest0,cancer,p\ntest1,normal,p\ntest2,cancer,q\ntest3,normal,r\n"
    )
    _, figures = evaluate(tmp_path, labels="own.csv")
    assert (figures["patients"], figures["patients_unknown"]) == (3, [])
    (tmp_path / "own.csv").write_text("slide,label,patient\ntest0,cancer,p\ntest0,cancer,q\n")
    done, _ = evaluate(tmp_path, labels="own.csv", code=2)
    assert "'test0' has two patients" in done.stderr


def test_external_slides_of_a_training_patient_are_named(tmp_path):
    """The table may name patients that the run did not know."""
    write_predictions(tmp_path, {"train": 2, "external": 4}, patient="{split}p{half}")
    (tmp_path / "own.csv").write_text(
        "slide,label,patient\nexternal0,cancer,trainp0\nexternal1,normal,q\nexternal2,cancer,r\nexternal3,normal,s\n"
    )
    done, figures = evaluate(tmp_path, labels="own.csv")
    assert "1 of 4 scored slides have the names of training patients: external0" in done.stdout
    assert (figures["training_slides"], figures["slides_of_training_patients"]) == ([], ["external0"])


def test_training_patients_are_known_without_a_predicted_training_slide(tmp_path):
    write_predictions(tmp_path, {"external": 4}, patient="p{half}")
    made_with = tmp_path / "predict.json"
    made_with.write_text(json.dumps(json.loads(made_with.read_text()) | {"training_patients": ["p1"]}))
    figures = evaluate(tmp_path)[1]
    assert figures["slides_of_training_patients"] == ["external2", "external3"]
    assert "training_patients" not in figures["predictions"]


@pytest.mark.parametrize(
    ("classes", "slides", "note"),
    [
        ("abc", 2, "no scored slide is c: AUC, AUPRC and balanced accuracy are means over the other classes"),
        ("ab", 1, "no scored slide is b: AUC and AUPRC need two classes, and balanced accuracy is that of the other"),
    ],
)
def test_classes_without_a_slide_are_named(classes, slides, note, tmp_path):
    write_predictions(tmp_path, {"test": slides}, tuple(classes), positive=None)
    assert note in evaluate(tmp_path)[0].stdout


def test_slides_with_a_label_that_failed_are_named(tmp_path):
    write_predictions(tmp_path, {"test": 2})
    failed = PredictionFolder(tmp_path).failed
    for slide, step in (("lost", "predict"), ("unlabelled", "predict"), ("test0", "stain")):
        failed.add(slide, step, "cut short")
    (tmp_path / "own.csv").write_text("slide,label\ntest0,cancer\ntest1,normal\nlost.svs,normal\nunlabelled,\n")
    note = f"no score of 1 slide with a label that could not be predicted (see {failed.path}): lost\n"
    assert note in evaluate(tmp_path, labels="own.csv")[0].stdout


def test_patients_of_two_classes_without_names_need_the_positive_one(tmp_path):
    write_predictions(tmp_path, {"test": 8}, ("luad", "lusc"), patient="p{half}", positive=None)
    assert "--positive-class luad" in evaluate(tmp_path, code=2)[0].stderr
    assert evaluate(tmp_path, "--positive-class", "lusc")[1]["patients"] == 4


def test_auprc_without_a_positive_class_is_said_to_be_a_mean(tmp_path):
    write_predictions(tmp_path, {"test": 8}, ("luad", "lusc"), positive=None)
    note = "AUPRC is the mean of both classes: give --positive-class luad or --positive-class lusc"
    assert note in evaluate(tmp_path)[0].stdout
    assert note in (tmp_path / "report.html").read_text()
    assert note not in evaluate(tmp_path, "--positive-class", "lusc")[0].stdout


def test_few_tiles_are_held():
    tiles = [[((7 * k + 3 * s) % 101 / 101, f"s{s}", k, 0, "a") for k in range(30)] for s in range(20)]
    held = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("nsmallest", "nlargest"):
            of_heap = getattr(extreme_tiles.__globals__["heapq"], name)
            patch.setattr(
                f"heapq.{name}", lambda n, given, of_heap=of_heap: held.append(len(given)) or of_heap(n, given)
            )
        found = extreme_tiles(iter(tiles))
    everything = sorted(tile for of_slide in tiles for tile in of_slide)
    assert found == [*everything[:SHOWN], *everything[: -SHOWN - 1 : -1]]
    assert max(held) == 30 + SHOWN


def test_missing_labels_take_no_part_and_names_are_mapped(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("slide,label\nd,blurred\nb,normal\na,Tumor\nc,nan\n")
    rows = [{"slide": slide, "score_normal": 0.5, "score_tumour": 0.5} for slide in "abcd"]
    class_map = ClassMap.parse(("Tumor=tumour", "blurred=ignore"))
    found = labelled_slides(rows, ("normal", "tumour"), read_table(path, ("slide", "label")), {}, 1, class_map)
    assert found.slides == ("a", "b")
    assert found.cases.label.tolist() == [1, 0]
    assert "2 predicted slides without a label: c, d" in found.left_out[0]


def test_another_spelling_of_the_positive_class_is_refused(tmp_path):
    """The star of the run's class map took it for a negative."""
    path = tmp_path / "labels.csv"
    path.write_text("slide,label\na,Tumour\nb,normal\n")
    rows = [{"slide": slide, "score_normal": 0.5, "score_tumour": 0.5} for slide in "ab"]
    class_map = ClassMap.parse(("T=tumour", "*=normal"))
    with pytest.raises(ValueError, match="would take other spellings of tumour: Tumour"):
        labelled_slides(rows, ("normal", "tumour"), read_table(path, ("slide", "label")), {}, 1, class_map)


def test_names_that_our_tables_mark_are_read_without_the_mark(tmp_path):
    """``predictions.csv`` of a run, in which a spreadsheet shall not run names."""
    path, classes = tmp_path / "predictions.csv", ("normal", "+(tumour)")
    with path.open("w", newline="") as file:
        write_rows(file, [("slide", "label", "patient"), ("-1 (2)", "+(tumour)", "p"), ("b", "normal", "q")])
    assert "'-1 (2),'+(tumour)" in path.read_text()
    table = read_table(path, ("slide", "label"))
    scores = {f"score_{name}": 0.5 for name in classes}
    rows = [{"slide": slide, "patient": None, **scores} for slide in ("-1 (2)", "b")]
    found = labelled_slides(rows, classes, table, {}, 1)
    assert (found.slides, found.cases.label.tolist(), found.left_out) == (("-1 (2)", "b"), [1, 0], ())
    assert patients_of(rows, table, None) == {"-1 (2)": "p", "b": "q"}
