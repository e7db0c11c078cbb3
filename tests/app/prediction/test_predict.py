"""Whole slides predicted by a model that sees what is dark: maps, areas, tables, resuming, and slides that fail."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace

import cv2
import numpy as np
import openslide
import pytest
import tifffile
import torch
from shapely.geometry import shape

from app.prediction import computation, share, whole_slide
from app.prediction.prediction_folder import PredictionFolder
from app.prediction.trained_model import load_model
from pipelines.catalog.failures import FailedSlides
from pipelines.catalog.handles import SlideState
from pipelines.slides.geometry import Bounds, levels_from_sizes
from pipelines.slides.pyramid import PyramidSlide
from pipelines.slides.slide import TileReadError
from pipelines.tiles import windows
from pipelines.tiles.windows import WindowSettings, find_windows
from tests.helpers.forked import run_ranks
from tests.helpers.hand_made_checkpoint import CLASSIFIER, SEGMENTER, write_checkpoint
from tests.helpers.in_process import call

WIDTH, HEIGHT = 300, 260
DARK = {"a": (70, 40, 150, 120), "b": (10, 100, 290, 130)}
"""Left, top, right, bottom of what is dark on each slide."""


def picture(slide_id):
    pixels = np.full((HEIGHT, WIDTH, 3), 240, np.uint8)
    left, top, right, bottom = DARK[slide_id]
    pixels[top:bottom, left:right] = 20
    return pixels


@pytest.fixture(scope="module")
def slides(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slides")
    for slide_id in DARK:
        cv2.imwrite(str(folder / f"{slide_id}.png"), picture(slide_id))
    (folder / "broken.svs").write_text("no slide")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "best.pt"
    return write_checkpoint(path, SEGMENTER, tile=96, mpp=0.5, min_tissue=0, slide_mpp=0.5)


def predict(slides, checkpoint, out, *more, model=SEGMENTER):
    return call(
        "app.predict", "--slides", slides, "--checkpoint", checkpoint, "--out", out, "--model", model, *more,
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def predicted(slides, checkpoint, tmp_path_factory):
    """A run that was interrupted after its first slide, and started again."""
    out = tmp_path_factory.mktemp("predicted")
    predict_slide = whole_slide.predict_slide

    def interrupted(spec, *rest):
        if spec.slide_id != "a":
            raise KeyboardInterrupt
        return predict_slide(spec, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(share, "predict_slide", interrupted)
        assert predict(slides, checkpoint, out).returncode == 1
    first = (out / "overlays" / "a.png").stat().st_mtime_ns
    done = predict(slides, checkpoint, out)
    assert done.returncode == 0, done.stderr
    assert "already: 1 slide" in done.stdout
    assert (out / "overlays" / "a.png").stat().st_mtime_ns == first
    return out


def test_a_bad_slide_is_named_and_the_others_are_there(predicted):
    assert [slide for slide, _, _ in FailedSlides(predicted / "failed_slides.csv").rows()] == ["broken"]
    with (predicted / "slides.csv").open(newline="") as file:
        rows = {row["slide"]: row for row in csv.DictReader(file)}
    assert sorted(rows) == ["a", "b"]
    assert float(rows["a"]["area_um2_dark"]) == 80 * 80 * 0.25


def test_heat_maps_are_opened_by_both_libraries(predicted):
    path = predicted / "heat_maps" / "a.dark.tif"
    with openslide.OpenSlide(path) as slide:
        assert slide.dimensions == (WIDTH, HEIGHT)
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.5)
        assert slide.level_count == 2
    values = tifffile.imread(path)
    left, top, right, bottom = DARK["a"]
    assert (values[top:bottom, left:right] == 255).all()
    values[top:bottom, left:right] = 0
    assert values.max() == round(255 / (1 + np.exp(2)))  # of a bright px: a logit of -2


def test_areas_are_those_of_the_slide(predicted):
    for slide_id, (left, top, right, bottom) in DARK.items():
        (area,) = json.loads((predicted / "geojson" / f"{slide_id}.geojson").read_text())["features"]
        polygon = shape(area["geometry"])
        assert polygon.is_valid
        assert polygon.equals(shapely_box(left, top, right, bottom))
        assert area["properties"]["measurements"]["Area µm^2"] == polygon.area * 0.25
    mask = cv2.imread(str(predicted / "masks" / "a.png"), cv2.IMREAD_UNCHANGED)
    np.testing.assert_array_equal(mask == 1, picture("a")[..., 0] == 20)


def shapely_box(*corners):
    from shapely.geometry import box

    return box(*corners)


def test_tiles_have_the_mean_of_their_window(predicted):
    with (predicted / "tiles" / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 4
    for row in rows:
        x, y, side = (int(row[name]) for name in ("l0_x", "l0_y", "l0_width"))
        dark = (picture("a")[y : y + side, x : x + side, 0] == 20).mean()
        assert float(row["score_dark"]) == pytest.approx(dark + (1 - dark) / (1 + np.exp(2)), abs=1e-4)
        assert side == 96


def test_other_settings_are_refused_by_name(slides, checkpoint, predicted, tmp_path):
    refused = predict(slides, checkpoint, predicted, "--overlap", "0.5")
    assert refused.returncode == 2
    assert "overlap: made with 0.25, asked is 0.5" in refused.stderr
    unnamed = call("app.predict", "--slides", slides, "--checkpoint", checkpoint, "--out", tmp_path)
    assert unnamed.returncode == 2
    assert f"say so with --model {SEGMENTER}" in unnamed.stderr


def test_a_damaged_checkpoint_is_refused(slides, checkpoint, tmp_path):
    damaged = tmp_path / "best.pt"
    data = bytearray(checkpoint.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    refused = predict(slides, damaged, tmp_path / "out")
    assert refused.returncode == 1
    assert "damaged" in refused.stderr


class InBounds:
    """A spec of a slide whose scanned part does not begin at the corner of level 0."""

    slide_id, mpp, backend, scene = "a", None, "auto", None

    def __init__(self, path, damaged_from=10_000):
        """Windows that reach below level-0 row ``damaged_from`` cannot be read."""
        self.path = path
        self.damaged_from = damaged_from

    def open(self):
        l0_pixels, damaged_from = np.full((HEIGHT + 50, WIDTH + 90, 3), 255, np.uint8), self.damaged_from
        l0_pixels[30 : 30 + HEIGHT, 60 : 60 + WIDTH] = picture("a")

        class Reader:
            name = "memory"

            def read_level(self, level, l_x, l_y, out):
                if l_y + len(out) > damaged_from and out.shape[:2] == (96, 96):
                    raise TileReadError("a hole in the file")
                padded = np.pad(l0_pixels, ((400, 400), (400, 400), (0, 0)), constant_values=255)
                out[...] = padded[l_y + 400 : l_y + 400 + len(out), l_x + 400 : l_x + 400 + out.shape[1]]

            def close(self):
                pass

        levels = levels_from_sizes([(WIDTH + 90, HEIGHT + 50)], 0.5)
        return PyramidSlide(self.path, Reader(), levels, Bounds(60, 30, WIDTH, HEIGHT))


def test_a_slide_with_bounds_is_aligned_as_qupath_has_it(slides, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(whole_slide, "windows_of", lambda spec, settings: find_windows(spec, settings, 1))
    monkeypatch.setattr(whole_slide, "AREA_VALUES", 2 * WIDTH * HEIGHT // 4)  # areas are drawn on every second px
    model = load_model(checkpoint, SEGMENTER, torch.device("cpu"))
    folder = PredictionFolder(tmp_path)
    folder.open({})
    settings = WindowSettings(96, 0.5, 1, 72, 0.0, 8.0)
    row = whole_slide.predict_slide(InBounds(slides / "a.png"), model, settings, 3, folder)
    (area,) = json.loads((tmp_path / "geojson" / "a.geojson").read_text())["features"]
    assert shape(area["geometry"]).bounds == DARK["a"]
    assert row["area_um2_dark"] == 80 * 80 * 0.25
    with (tmp_path / "tiles" / "a.csv").open(newline="") as file:
        assert next(csv.DictReader(file))["l0_x"] == "60"


def test_windows_that_cannot_be_read_are_left_out_and_counted(slides, checkpoint, tmp_path, monkeypatch):
    # a sample of the windows is tried before: here none of those that are damaged
    monkeypatch.setattr(windows, "find_unreadable_tiles", lambda slide, x, *_: (np.zeros(len(x), bool), ""))
    monkeypatch.setattr(whole_slide, "windows_of", lambda spec, settings: find_windows(spec, settings, 1))
    model = load_model(checkpoint, SEGMENTER, torch.device("cpu"))
    folder = PredictionFolder(tmp_path)
    folder.open({})
    settings = WindowSettings(96, 0.5, 1, 72, 0.0, 8.0)
    row = whole_slide.predict_slide(InBounds(slides / "a.png", 30 + HEIGHT - 10), model, settings, 3, folder)
    assert (row["tiles"], row["tiles_unreadable"]) == (12, 4)
    ((slide, step, error),) = folder.failed.rows()
    assert (slide, step) == ("a", "windows")
    assert error.startswith("4 windows with tissue cannot be read and are left out: ")
    values = tifffile.imread(tmp_path / "heat_maps" / "a.dark.tif", key=0)
    assert (values[-20:] == 0).all()
    assert (values[40:120, 70:150] == 255).all()


def test_a_classifier_has_a_coarse_map(slides, tmp_path):
    checkpoint = write_checkpoint(tmp_path / "best.pt", CLASSIFIER, tile=96, mpp=0.5, min_tissue=0, slide_mpp=0.5)
    out = tmp_path / "out"
    done = predict(slides, checkpoint, out, "--overlap", "0.5", model=CLASSIFIER)
    assert done.returncode == 0, done.stderr
    with openslide.OpenSlide(out / "heat_maps" / "a.dark.tif") as slide:
        assert slide.dimensions == (25, 22)  # cells of 12 px
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(6)
    values = tifffile.imread(out / "heat_maps" / "a.dark.tif")
    with (out / "tiles" / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    # the corner is seen by the first window alone, the cell beside the middle of it by the first two
    assert values[0, 0] == round(255 * float(rows[0]["score_dark"]))
    assert values[0, 4] == pytest.approx(255 * np.mean([float(row["score_dark"]) for row in rows[:2]]), abs=0.51)


@pytest.mark.process
def test_ranks_share_the_slides_out(slides, checkpoint, tmp_path):
    (tmp_path / "ranks").mkdir()
    out = tmp_path / "out"
    words = ["--slides", slides, "--checkpoint", checkpoint, "--out", out, "--model", SEGMENTER]
    codes, printed = run_ranks(2, "app.predict", list(map(str, words)), tmp_path / "ranks")
    assert codes == [0, 0], printed
    for rank, own, other in ((0, "a", "b"), (1, "b", "a")):
        log = (out / f"run-{rank}.log").read_text()
        assert f"  {own}: " in log
        assert f"  {other}: " not in log
    with (out / "slides.csv").open(newline="") as file:
        assert [row["slide"] for row in csv.DictReader(file)] == ["a", "b"]


def test_a_model_of_whole_slides_gives_a_score_for_each(slides, tmp_path):
    checkpoint = write_checkpoint(tmp_path / "best.pt", CLASSIFIER, tile="slide", mpp=0.5, min_tissue=0, slide_mpp=0.5)
    out = tmp_path / "out"
    done = predict(slides, checkpoint, out, model=CLASSIFIER)
    assert done.returncode == 0, done.stderr
    assert [slide for slide, _, _ in FailedSlides(out / "failed_slides.csv").rows()] == ["broken"]
    with (out / "slides.csv").open(newline="") as file:
        rows = {row["slide"]: float(row["score_dark"]) for row in csv.DictReader(file)}
    # nothing is stained: all px of the tissue mask (16 px), widened to multiples of 32 px
    with (out / "tiles" / "a.csv").open(newline="") as file:
        (tile,) = csv.DictReader(file)
    x, y, width, height = (int(tile[name]) for name in ("l0_x", "l0_y", "l0_width", "l0_height"))
    assert (x, y, width, height) == (0, 0, 320, 256)
    model = load_model(checkpoint, CLASSIFIER, torch.device("cpu"))
    padded = np.pad(picture("a"), ((0, 200), (0, 200), (0, 0)), constant_values=255)
    pixels = np.ascontiguousarray(padded[y : y + height, x : x + width])[None]
    expected = model.probabilities(pixels, (1, 3, height, width))[0, 1]
    assert rows["a"] == pytest.approx(float(expected), abs=1e-6)
    assert (out / "overlays" / "b.png").stat().st_size > 100
    in_boxes = predict(slides, checkpoint, tmp_path / "boxes", "--stream", "32", model=CLASSIFIER)
    assert in_boxes.returncode == 0, in_boxes.stderr
    with (tmp_path / "boxes" / "slides.csv").open(newline="") as file:
        assert {row["slide"]: float(row["score_dark"]) for row in csv.DictReader(file)} == pytest.approx(rows, abs=1e-6)


def test_boxes_give_the_same_maps(slides, checkpoint, predicted, tmp_path):
    done = predict(slides, checkpoint, tmp_path, "--stream", "32")
    assert done.returncode == 0, done.stderr
    assert_same_maps(predicted, tmp_path)


def test_parameters_on_the_host_give_the_same_maps(slides, checkpoint, predicted, tmp_path):
    done = predict(slides, checkpoint, tmp_path, "--offload", "parameters")
    assert done.returncode == 0, done.stderr
    assert_same_maps(predicted, tmp_path)


@pytest.mark.process
def test_two_ranks_compute_a_slide_together(slides, checkpoint, predicted, tmp_path):
    (tmp_path / "ranks").mkdir()
    out = tmp_path / "out"
    words = ["--slides", slides, "--checkpoint", checkpoint, "--out", out, "--model", SEGMENTER, "--stages", "2"]
    codes, printed = run_ranks(2, "app.predict", list(map(str, words)), tmp_path / "ranks")
    assert codes == [0, 0], printed
    assert_same_maps(predicted, out)
    assert [slide for slide, _, _ in FailedSlides(out / "failed_slides.csv").rows()] == ["broken"]
    assert printed.count("2/3  b: 16 windows") == 1


def assert_same_maps(expected, out):
    for slide_id in DARK:
        ours, theirs = (tifffile.imread(folder / "heat_maps" / f"{slide_id}.dark.tif") for folder in (out, expected))
        assert np.abs(ours.astype(int) - theirs).max() <= 1  # of 255: rounding of the last bit of a float


def recorded(slides):
    """What a run knows of its slides, of which one has the name of a slide here and other content."""
    digests = {name: SlideState.of(slides / f"{name}.png").digest for name in DARK}
    return {
        "split": {"a": "train", "other": "val", "p1_x": "test"},
        "patient": {"p1_x": "p1"},
        "digest": {"a": digests["a"], "other": digests["b"], "b": "0", "p1_x": "1"},
        "mpp": {"a": 1.0, "b": 2.0},
    }


@pytest.mark.parametrize(
    ("words", "table", "mpp"),
    [
        ((), "", {"a": 1.0, "b": 0.25}),  # what the run read this slide at, and its --slide-mpp
        ((), "A.png,0.25", {"a": 0.25, "b": 0.25}),
        (("--slide-mpp", "0.5"), "b,1", {"a": 0.5, "b": 1.0}),
    ],
)
def test_slides_are_opened_as_in_the_run(slides, tmp_path, words, table, mpp):
    if table:
        words = (*words, "--mpp-table", tmp_path / "mpp.csv")
        (tmp_path / "mpp.csv").write_text(f"slide,mpp\n{table}\n")
    more = {"slides": recorded(slides), "slide_mpp": 0.25, "labels": "gone.csv"}
    checkpoint = write_checkpoint(tmp_path / "best.pt", SEGMENTER, tile=96, mpp=1.0, min_tissue=0, **more)
    done = predict(slides, checkpoint, tmp_path / "out", *words)
    assert done.returncode == 0, done.stderr
    records = PredictionFolder(tmp_path / "out").records()
    assert {r["row"]["slide"]: r["canvas"]["mpp"] for r in records} == mpp
    assert {r["row"]["slide"]: r["opening"]["mpp"] for r in records} == mpp
    with (tmp_path / "out" / "slides.csv").open(newline="") as file:
        assert {row["slide"]: row["split"] for row in csv.DictReader(file)} == {"a": "train", "b": "val"}


def test_a_table_gives_slides_their_mpp_after_the_first_start(slides, tmp_path):
    checkpoint = write_checkpoint(tmp_path / "best.pt", SEGMENTER, tile=96, mpp=0.5, min_tissue=0)
    table, out = tmp_path / "mpp.csv", tmp_path / "out"

    def start(rows, *words):
        table.write_text(f"slide,mpp\n{rows}\n")
        return predict(slides, checkpoint, out, *words)

    assert start("a,0.5", "--mpp-table", table).returncode == 0
    failed = {slide: error for slide, _, error in FailedSlides(out / "failed_slides.csv").rows()}
    assert "--mpp-table FILE" in failed["b"]
    gone_on = start("a,0.5\nb,0.25", "--mpp-table", table)
    assert gone_on.returncode == 0, gone_on.stderr
    assert "already: 1 slide" in gone_on.stdout
    records = PredictionFolder(out).records()
    assert {record["row"]["slide"]: record["canvas"]["mpp"] for record in records} == {"a": 0.5, "b": 0.25}
    for refused in (start("a,1\nb,0.25", "--mpp-table", table), start("")):
        assert refused.returncode == 2
        assert "a: mpp: made with 0.5, asked is " in refused.stderr


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "lower --batch (now 4)"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "--stream 512"),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), "app.doctor"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "app.doctor"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_fault_of_the_device_ends_the_run_and_makes_no_slide_bad(
    fault, advice, slides, checkpoint, tmp_path, monkeypatch
):
    def fail(*_):
        raise fault

    monkeypatch.setattr(share, "predict_slide", fail)
    done = predict(slides, checkpoint, tmp_path / "out")
    assert done.returncode == 1
    assert f"error: a: {fault}" in done.stderr
    assert advice in done.stderr
    assert not FailedSlides(tmp_path / "out" / "failed_slides.csv").rows()
    with pytest.raises(type(fault)), computation.rank_faults("a", SimpleNamespace(alone=False)):
        fail()  # of one of several ranks


def test_each_slide_has_its_split_and_patient(slides, checkpoint, tmp_path):
    cpu, new = torch.device("cpu"), SlideState(0, 0, "new")
    of_run = {"slides": recorded(slides), "patient_pattern": "^(p.)_"}
    model = load_model(write_checkpoint(tmp_path / "a.pt", SEGMENTER, tile=96, mpp=0.5, **of_run), SEGMENTER, cpu)
    for name, state, origin in (
        ("renamed", SlideState(0, 0, "1"), ("test", "p1")),
        ("a", SlideState.of(slides / "a.png"), ("train", None)),
        ("a", new, ("external", None)),  # the name of a slide of the run, and other content
        ("p1_new", new, ("test", "p1")),  # another slide of a patient of the run
        ("p2_new", new, ("external", "p2")),
    ):
        assert tuple(model.origin(name, state).values()) == origin
    assert load_model(checkpoint, SEGMENTER, cpu).origin("a", new) == {"split": "unknown", "patient": None}


@pytest.mark.parametrize(
    ("classes", "named", "shown"),
    [
        (("cancer", "normal"), None, ["cancer"]),
        (("Normal", "cancer"), None, ["cancer"]),
        (("luad", "lusc"), None, ["luad", "lusc"]),
        (("luad", "lusc"), "luad", ["luad"]),
        (("a", "b", "normal"), None, ["a", "b", "normal"]),
    ],
)
def test_the_heat_map_is_that_of_the_positive_class(tmp_path, classes, named, shown):
    path = write_checkpoint(tmp_path / "best.pt", CLASSIFIER, tile=96, mpp=0.5, classes=classes, positive_class=named)
    assert list(load_model(path, CLASSIFIER, torch.device("cpu")).shown.values()) == shown
