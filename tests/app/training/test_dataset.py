"""A run prepares its split, tiles whose class is drawn on them, and the slides of a prediction."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from app.settings.run import DataSettings, RunConfig, SplitSettings
from app.training.dataset import class_counts, prepare
from app.training.run_folder import RunFolder
from app.training.run_slides import choose_splits, predicted_slides
from pipelines.catalog.catalog import find_slides
from pipelines.catalog.handles import SlideState
from pipelines.catalog.table import FailedSlides
from pipelines.labels.folds import read_split_file
from pipelines.labels.slide_labels import SlideLabels
from pipelines.slides.slide import SlideError
from pipelines.tiles.tiling import IndexSettings
from tests.app.conftest import rows_of
from tests.helpers.drawings import box, write_geojson
from tests.helpers.splits import slides_in

SLIDES = [f"s{i}" for i in range(12)]
LABELS = {slide: i % 2 for i, slide in enumerate(SLIDES)}


def chosen(folder, said=None, given=None, patient=None, **split):
    site = {slide: f"site{i // 3}" for i, slide in enumerate(SLIDES)}
    patient = {s: s for s in SLIDES} if patient is None else patient
    truth = SlideLabels(("a", "b"), LABELS, patient, "here", ("unlabelled",), site=site)
    folder.mkdir(exist_ok=True)
    config = RunConfig(DataSettings(folder), split=SplitSettings(**split), out=folder)
    told = (said if said is not None else []).append
    return choose_splits(config, RunFolder(folder), truth, SLIDES, LABELS, given or {}, told)


def test_folds_and_sites_are_told_and_saved(tmp_path):
    said = []
    runs = [chosen(tmp_path / str(k), said, folds=4, fold=k, split_by="site") for k in range(4)]
    assert sorted(slide for run in runs for slide in slides_in(run.split, "val")) == sorted(SLIDES)
    assert said[0].endswith("patients in more than one split: 0; sites in more than one split: 0")
    saved = tmp_path / "0" / "splits.csv"
    assert read_split_file(saved, runs[0].patient) == runs[0].split
    assert {row["slide"]: (row["site"], int(row["label"])) for row in rows_of(saved)} == {
        slide: (f"site{i // 3}", i % 2) for i, slide in enumerate(SLIDES)
    }
    chosen(tmp_path / "by patient", said, folds=4, fold=1)
    assert "sites in more than one split: 2" in said[-1]


def test_slides_added_to_a_run_with_a_checkpoint_are_to_be_taken_out(tmp_path):
    """It trains on no others: neither a line for them nor another split would let it go on."""
    chosen(tmp_path)
    folder = RunFolder(tmp_path)
    *lines, added = folder.splits.read_text().splitlines(keepends=True)
    folder.splits.write_text("".join(lines))
    without = f"slides that it does not name: {added.partition(',')[0]}; "
    with pytest.raises(ValueError, match=f"{without}add a line for each"):
        chosen(tmp_path)
    folder.last.parent.mkdir()
    folder.last.touch()
    with pytest.raises(ValueError, match=f"{without}the run has a checkpoint without them: take them out"):
        chosen(tmp_path)


def test_unknown_patients_are_said_and_saved(tmp_path):
    said = []
    none_known = chosen(tmp_path / "none", said, patient={})
    assert "patients unknown: slides are split one by one" in said[-1]
    assert "in more than one split: 0; sites" not in said[-1]
    assert {row["slide"] for row in rows_of(tmp_path / "none" / "splits.csv") if not row["patient"]} == set(SLIDES)
    assert none_known.unknown == frozenset(SLIDES)
    chosen(tmp_path / "some", said, patient=dict.fromkeys(SLIDES[:2], "p"))
    assert "patients in more than one split: 0; patients of 10 of 12 slides unknown: these are split one by" in said[-1]


def test_a_folder_with_another_split_is_refused(tmp_path):
    first = chosen(tmp_path, folds=3, fold=0)
    assert chosen(tmp_path, folds=3, fold=0) == first
    with pytest.raises(ValueError, match=r"splits\.csv holds another split than is asked for"):
        chosen(tmp_path, folds=3, fold=1)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").touch()  # resumed: its settings were compared before
    assert chosen(tmp_path, folds=3, fold=0).split == first.split


def test_a_file_decides_alone(tmp_path):
    lines = [f"{slide},{'val' if i < 2 else 'train'}" for i, slide in enumerate(SLIDES)]
    file = tmp_path / "own.csv"
    file.write_text("\n".join(["slide,split", *lines, "unlabelled,test"]))
    assert slides_in(chosen(tmp_path / "run", splits=file).split, "val") == ("s0", "s1")
    with pytest.raises(ValueError, match="folders called like splits, train, and --splits"):
        chosen(tmp_path / "other", given=dict.fromkeys(SLIDES, "train"), splits=file)


def test_a_column_split_of_the_labels_is_said_to_be_unused(tmp_path, caplog):
    table = tmp_path / "labels.csv"
    lines = [f"{slide},a,{'train' if k else 'val'}" for k, slide in enumerate(SLIDES)]
    table.write_text("\n".join(["slide,label,split", *lines]))
    chosen(tmp_path, splits=table)
    assert not caplog.messages
    (tmp_path / "splits.csv").unlink()
    chosen(tmp_path)
    assert caplog.messages == [f"labels {table}: its column split is not used; add --splits {table}"]


def test_fractions_beside_folders_called_like_splits_are_refused(tmp_path):
    # They were ignored without a word.
    train, both = dict.fromkeys(SLIDES, "train"), {slide: "train" if k else "val" for k, slide in enumerate(SLIDES)}
    with pytest.raises(ValueError, match=r"train, and --test 0\.2 asks for another split: leave that out"):
        chosen(tmp_path / "test", given=train, validation=0.3, test=0.2)
    with pytest.raises(ValueError, match=r"train, val, and --validation 0\.3 asks for another split"):
        chosen(tmp_path / "validation", given=both, validation=0.3)
    assert len(slides_in(chosen(tmp_path / "drawn", given=train, validation=0.5).split, "val")) == 6
    assert chosen(tmp_path / "benchmark", given=both, validation=0).split == both


def prepared(slides, out, said, *, tile=128, splits=None, **data):
    config = RunConfig(DataSettings(slides, **data), IndexSettings(tile=tile), SplitSettings(splits=splits), out=out)
    return prepare(config, RunFolder(out), lambda line: said.append(str(line)))


def test_folders_called_like_splits_are_the_split(classify_slides, tmp_path):
    """They were once two classes, train and val."""
    slides, said = tmp_path / "slides", []
    label = {row["slide"]: row["label"] for row in rows_of(classify_slides / "labels.csv")}
    paths = sorted(classify_slides.glob("*.tif"))
    for k, path in enumerate(paths):
        folder = slides / ("train" if k < 4 else "val") / label[path.stem.removesuffix(".ome")]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / path.name).symlink_to(path)
    dataset = prepared(slides, tmp_path / "run", said)
    assert set(dataset.classes) == set(label.values())
    assert slides_in(dataset.splits.split, "val") == tuple(path.stem for path in paths[4:])
    assert "split by the folders train, val" in said
    assert any(line.startswith("slides by split: train 4, val 2, test 0; patients unknown") for line in said)
    assert prepared(slides, tmp_path / "run", said).splits == dataset.splits


def test_a_quota_limits_the_processes_of_an_index(classify_slides, tmp_path, monkeypatch):
    """A pod with 4 of 96 cores once started 96 processes."""
    build = Mock(side_effect=SlideError)
    monkeypatch.setattr("app.training.dataset.usable_cores", lambda: 3)
    monkeypatch.setattr("app.training.dataset.build_index", build)
    with pytest.raises(SlideError):
        prepared(classify_slides, tmp_path, [])
    assert build.call_args.kwargs["workers"] == 3


HALF = 768


def drawn(slides, folder, said=None, more=(), **data):
    """Tiles labelled by a tumour on the left half and a quarter of the next tiles; a corner is to be ignored."""
    for spec in find_slides(slides):
        write_geojson(
            folder / "drawn" / f"{spec.slide_id}.geojson",
            box(0, 0, HALF + 64, 2 * HALF, "Tumor"),
            box(HALF, HALF, 2 * HALF, 2 * HALF, "Ignore*"),
            *more,
        )
    data = {"annotations": folder / "drawn", "task": "classify", **data}
    return prepared(slides, folder / "run", [] if said is None else said, tile=256, **data)


@pytest.mark.parametrize(("rule", "quarter"), [("any", 1), ("0.3", 0)])
def test_rules_and_ignored_tiles(segment_slides, tmp_path, rule, quarter):
    said = []
    dataset = drawn(segment_slides, tmp_path, said, tile_label=rule)
    tiles = [dataset.tiles.region(row) for row in range(len(dataset.tiles))]
    assert not any(tile.l0_x >= HALF and tile.l0_y >= HALF for tile in tiles)
    assert any("as all that is drawn there is to be ignored" in line for line in said)
    expected = [1 if tile.l0_x < HALF else quarter if tile.l0_x == HALF else 0 for tile in tiles]
    np.testing.assert_array_equal(dataset.tile_labels, expected)
    assert set(expected) == {0, 1}


def test_any_counts_a_single_pixel(segment_slides, tmp_path):
    dots = [box(x, 130, x + 1, 131, "Dot") for x in range(HALF + 256 + 101, 2 * HALF, 256)]
    dataset = drawn(segment_slides, tmp_path, more=dots, tile_label="any")
    tiles = [dataset.tiles.region(row) for row in range(len(dataset.tiles))]
    dotted = [tile.l0_y == 0 and tile.l0_x > HALF for tile in tiles]
    assert any(dotted)
    np.testing.assert_array_equal(dataset.tile_labels == dataset.classes.index("Dot"), dotted)


@pytest.mark.parametrize(
    ("slides", "data", "message"),
    [
        ("segment", {"class_map": ("tumor=x",)}, r"--class-map names tumor, .*; classes are Ignore"),
        ("segment", {"tile_label": "any", "task": "segment"}, "--tile-label any is for --task classify with annot"),
        ("classify", {"annotations": None, "task": "auto", "class_map": ("a=b",)}, "--class-map names a, which no"),
    ],
)
def test_settings_that_do_not_fit_are_refused(slides, data, message, tmp_path, request):
    with pytest.raises(ValueError, match=message):
        drawn(request.getfixturevalue(f"{slides}_slides"), tmp_path, **data)


def test_an_annotation_off_its_slide_costs_that_slide(segment_slides, tmp_path, caplog):
    """Such a slide was once learned as background, without a word."""
    off, *others = [spec.slide_id for spec in find_slides(segment_slides)]
    write_geojson(tmp_path / "drawn" / f"{off}.geojson", box(90_000, 90_000, 90_100, 90_100, "Tumor"))
    for slide in others:
        write_geojson(tmp_path / "drawn" / f"{slide}.geojson", box(0, 0, HALF, HALF, "Tumor"))
    dataset = prepared(segment_slides, tmp_path / "run", [], tile=256, annotations=tmp_path / "drawn")
    assert set(dataset.tiles.slides) == set(others)
    [(slide, step, error)] = FailedSlides(tmp_path / "run" / "failed_slides.csv").rows()
    assert (slide, step) == (off, "annotation")
    assert "completely outside" in error
    assert f"{off} is left out" in caplog.text


@pytest.mark.parametrize(("task", "unit"), [("segment", "slide"), ("classify", "tile")])
def test_classes_that_are_not_trained_or_not_scored_are_named(segment_slides, tmp_path, caplog, task, unit):
    """The model had an output for such a class without a word, or with its number alone."""
    parts = {spec.slide_id: ("val", "train")[k % 2] for k, spec in enumerate(find_slides(segment_slides))}
    for slide, part in parts.items():
        name = "Rare" if part == "val" else "Tumor"
        write_geojson(tmp_path / "drawn" / f"{slide}.geojson", box(0, 0, HALF, 2 * HALF, name))
    splits = tmp_path / "splits.csv"
    splits.write_text("\n".join(["slide,split", *(f"{slide},{part}" for slide, part in parts.items())]))
    data = {"annotations": tmp_path / "drawn", "task": task}
    prepared(segment_slides, tmp_path / "run", [], tile=256, splits=splits, **data)
    assert f"no training {unit} shows Rare: not learned in this run; move" in caplog.text
    assert f"no validation {unit} shows Tumor: scores of this run" in caplog.text


def test_pixels_of_a_class_that_a_sample_of_tiles_lacks_are_counted_on_all(monkeypatch, caplog):
    """Such a class had weight 0, and was never learned."""
    areas = np.zeros((1000, 3), np.int64)
    areas[:, 0], areas[1, 1] = 9, 4
    monkeypatch.setattr("app.training.dataset.class_areas", lambda dataset, rows: (areas[rows], 0))
    dataset = SimpleNamespace(tile_labels=None, classes=("background", "rare", "absent"))
    assert class_counts(dataset, np.arange(1000)).tolist() == [9000, 4, 0]
    assert "no training tile has absent on its grid of 64 points" in caplog.text


@pytest.mark.parametrize(
    ("labels", "given", "mpp"),
    [
        ("other,1", {}, {"as_file": 0.5, "by_table": 0.25, "new": 0.5}),
        ("as_file,4\nby_table,4\nnew,4", {}, {"as_file": 0.5, "by_table": 0.25, "new": 4}),
        ("other,1", {"slide_mpp": 2.0}, {"as_file": 2, "by_table": 2, "new": 2}),
    ],
)
def test_labels_beside_the_slides_of_a_prediction_give_mpp_to_new_slides_only(tmp_path, labels, given, mpp):
    for name in mpp:
        (tmp_path / f"{name}.svs").write_text(name)
    (tmp_path / "labels.csv").write_text(f"slide,mpp\n{labels}\n")
    digest = {name: SlideState.now(tmp_path / f"{name}.svs").digest for name in ("as_file", "by_table")}
    columns = {"digest": digest, "mpp": {"by_table": 0.25, "new": 1.0}}
    trained = DataSettings(Path("gone"), slide_mpp=0.5, mpp_table=Path("gone.csv"), scene=1)
    specs = predicted_slides(trained, IndexSettings(), columns, {"slides": tmp_path, **given})
    assert {spec.slide_id: spec.mpp for spec in specs} == mpp
    assert {spec.scene for spec in specs} == {1}, "that of the run"
    (other, *_) = predicted_slides(trained, IndexSettings(), columns, {"slides": tmp_path, "scene": 0, **given})
    assert other.scene == 0
