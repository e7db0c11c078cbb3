"""Whole slides predicted by a model that sees what is dark: maps, areas, tables, resuming, and slides that fail."""

import json
from types import SimpleNamespace

import cv2
import numpy as np
import openslide
import pytest
import tifffile
import torch
from shapely.geometry import box, shape

from app.launch import host
from app.prediction import computation, share, whole_slide
from app.prediction.prediction_folder import PredictionFolder
from app.prediction.trained_model import TrainedModel
from pipelines.catalog.handles import SlideState
from pipelines.catalog.table import FailedSlides
from pipelines.slides.geometry import Bounds, levels_from_sizes
from pipelines.slides.pyramid import PyramidSlide
from pipelines.slides.slide import SlideError, TileReadError
from pipelines.tiles import windows
from pipelines.tiles.windows import WindowSettings, find_windows
from tests.app.conftest import rows_of
from tests.helpers.forked import run_ranks
from tests.helpers.hand_made_checkpoint import CLASSIFIER, SEGMENTER, write_checkpoint
from tests.helpers.in_process import call

CPU = torch.device("cpu")
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


def written(path, model=SEGMENTER, **more):
    return write_checkpoint(path, model, **{"tile": 96, "mpp": 0.5, "min_tissue": 0, "slide_mpp": 0.5, **more})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return written(tmp_path_factory.mktemp("run") / "best.pt")


def words_of(slides, checkpoint, out, *more, model=SEGMENTER):
    return ("--slides", slides, "--checkpoint", checkpoint, "--out", out, "--model", model, *more)


def predict(*given, code=0, **more):
    return call("app.predict", *words_of(*given, **more), env={"OMP_NUM_THREADS": "1"}, code=code)


def failed(out):
    return {slide: error for slide, _, error in FailedSlides(out / "failed_slides.csv").rows()}


@pytest.fixture(scope="module")
def predicted(slides, checkpoint, tmp_path_factory):
    """A run that was interrupted after its first slide, and started again."""
    out, predict_slide = tmp_path_factory.mktemp("predicted"), whole_slide.predict_slide

    def interrupted(spec, *rest):
        if spec.slide_id != "a":
            raise KeyboardInterrupt
        return predict_slide(spec, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(share, "predict_slide", interrupted)
        predict(slides, checkpoint, out, code=1)
    first = (out / "overlays" / "a.png").stat().st_mtime_ns
    assert "already: 1 slide" in predict(slides, checkpoint, out).stdout
    assert (out / "overlays" / "a.png").stat().st_mtime_ns == first
    return out


def test_a_bad_slide_is_named_and_the_others_are_there(predicted):
    assert [*failed(predicted)] == ["broken"]
    rows = {row["slide"]: row for row in rows_of(predicted / "slides.csv")}
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
    for slide_id, corners in DARK.items():
        (area,) = json.loads((predicted / "geojson" / f"{slide_id}.geojson").read_text())["features"]
        polygon = shape(area["geometry"])
        assert polygon.is_valid
        assert polygon.equals(box(*corners))
        assert area["properties"]["measurements"]["Area µm^2"] == polygon.area * 0.25
    mask = cv2.imread(str(predicted / "masks" / "a.png"), cv2.IMREAD_UNCHANGED)
    np.testing.assert_array_equal(mask == 1, picture("a")[..., 0] == 20)


def test_tiles_have_the_mean_of_their_window(predicted):
    rows = rows_of(predicted / "tiles" / "a.csv")
    assert len(rows) == 4 * 4
    for row in rows:
        x, y, side = (int(row[name]) for name in ("l0_x", "l0_y", "l0_width"))
        dark = (picture("a")[y : y + side, x : x + side, 0] == 20).mean()
        assert float(row["score_dark"]) == pytest.approx(dark + (1 - dark) / (1 + np.exp(2)), abs=1e-4)
        assert side == 96


def test_other_settings_and_damaged_checkpoints_are_refused_by_name(slides, checkpoint, predicted, tmp_path):
    refused = predict(slides, checkpoint, predicted, "--overlap", "0.5", code=2)
    assert "overlap: made with 0.25, asked is 0.5" in refused.stderr
    unnamed = call("app.predict", "--slides", slides, "--checkpoint", checkpoint, "--out", tmp_path, code=2)
    assert f"say so with --model {SEGMENTER}" in unnamed.stderr
    data = bytearray(checkpoint.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "best.pt").write_bytes(data)
    assert "damaged" in predict(slides, tmp_path / "best.pt", tmp_path / "out", code=1).stderr


HOLE = TileReadError("a hole in the file")


class InBounds:
    """A spec of a slide whose scanned part does not begin at the corner of level 0; windows that reach below level-0
    row ``damaged_from`` cannot be read."""

    slide_id, mpp, backend, scene = "a", None, "auto", None

    def __init__(self, path, damaged_from=10_000, fault=HOLE):
        self.path, self.damaged_from, self.fault = path, damaged_from, fault

    def open(self):
        l0_pixels = np.full((HEIGHT + 50, WIDTH + 90, 3), 255, np.uint8)
        damaged_from, fault = self.damaged_from, self.fault
        l0_pixels[30 : 30 + HEIGHT, 60 : 60 + WIDTH] = picture("a")

        class Reader:
            name = "memory"

            def read_level(self, level, l_x, l_y, out):
                if l_y + len(out) > damaged_from and out.shape[:2] == (96, 96):
                    raise fault
                padded = np.pad(l0_pixels, ((400, 400), (400, 400), (0, 0)), constant_values=255)
                out[...] = padded[l_y + 400 : l_y + 400 + len(out), l_x + 400 : l_x + 400 + out.shape[1]]

            def close(self):
                pass

        levels = levels_from_sizes([(WIDTH + 90, HEIGHT + 50)], 0.5)
        return PyramidSlide(self.path, Reader(), levels, Bounds(60, 30, WIDTH, HEIGHT))


@pytest.fixture
def predict_in_bounds(slides, checkpoint, tmp_path, monkeypatch):
    """Predicts a slide in bounds: the folder, and the row of the slide."""

    def predict(*damage):
        monkeypatch.setattr(whole_slide, "windows_of", lambda spec, settings: find_windows(spec, settings, 1))
        folder, settings = PredictionFolder(tmp_path), WindowSettings(96, 0.5, 1, 72, 0.0, 8.0)
        folder.open({})
        model = TrainedModel(checkpoint, SEGMENTER, CPU)
        spec = InBounds(slides / "a.png", *damage)
        return folder, whole_slide.predict_slide(spec, model, settings, 3, folder)

    return predict


def test_a_slide_with_bounds_is_aligned_as_qupath_has_it(predict_in_bounds, tmp_path, monkeypatch):
    monkeypatch.setattr(whole_slide, "AREA_VALUES", 2 * WIDTH * HEIGHT // 4)  # areas are drawn on every second px
    _, row = predict_in_bounds()
    (area,) = json.loads((tmp_path / "geojson" / "a.geojson").read_text())["features"]
    assert shape(area["geometry"]).bounds == DARK["a"]
    assert row["area_um2_dark"] == 80 * 80 * 0.25
    assert rows_of(tmp_path / "tiles" / "a.csv")[0]["l0_x"] == "60"


def test_windows_that_cannot_be_read_are_left_out_and_counted(predict_in_bounds, tmp_path, monkeypatch):
    # a sample of the windows is tried before: here none of those that are damaged
    monkeypatch.setattr(windows, "find_unreadable_tiles", lambda slide, grid, rows, *_: (np.zeros(len(rows), bool), ""))
    folder, row = predict_in_bounds(30 + HEIGHT - 10)
    assert (row["tiles"], row["tiles_unreadable"]) == (12, 4)
    ((slide, step, error),) = folder.failed.rows()
    assert (slide, step) == ("a", "windows")
    assert error.startswith("4 windows with tissue cannot be read and are left out: ")
    values = tifffile.imread(tmp_path / "heat_maps" / "a.dark.tif", key=0)
    assert (values[-20:] == 0).all()
    assert (values[40:120, 70:150] == 255).all()


def test_a_share_that_fails_leaves_no_prediction_without_its_windows(predict_in_bounds, monkeypatch):
    monkeypatch.setattr(windows, "find_unreadable_tiles", lambda slide, grid, rows, *_: (np.zeros(len(rows), bool), ""))
    with pytest.raises(SlideError, match="check the share"):
        predict_in_bounds(30 + HEIGHT - 10, SlideError("check the share"))


def test_a_classifier_has_a_coarse_map(slides, tmp_path):
    checkpoint, out = written(tmp_path / "best.pt", CLASSIFIER), tmp_path / "out"
    predict(slides, checkpoint, out, "--overlap", "0.5", model=CLASSIFIER)
    with openslide.OpenSlide(out / "heat_maps" / "a.dark.tif") as slide:
        assert slide.dimensions == (25, 22)  # cells of 12 px
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(6)
    values = tifffile.imread(out / "heat_maps" / "a.dark.tif")
    scores = [float(row["score_dark"]) for row in rows_of(out / "tiles" / "a.csv")]
    # the corner is seen by the first window alone, the cell beside the middle of it by the first two
    assert values[0, 0] == round(255 * scores[0])
    assert values[0, 4] == pytest.approx(255 * np.mean(scores[:2]), abs=0.51)


def test_a_slide_that_was_replaced_and_fails_is_done_no_longer(slides, checkpoint, tmp_path):
    folder, out = tmp_path / "slides", tmp_path / "out"
    folder.mkdir()
    (folder / "a.png").write_bytes((slides / "a.png").read_bytes())
    predict(folder, checkpoint, out)
    (folder / "a.png").write_bytes(b"no picture")
    assert "none of 1 slide could be predicted" in predict(folder, checkpoint, out, code=1).stderr
    assert [*failed(out)] == ["a"]
    assert [*out.rglob("a.*"), *out.glob("slides.csv")] == []


def test_a_model_of_whole_slides_gives_a_score_for_each(slides, tmp_path):
    checkpoint, out = written(tmp_path / "best.pt", CLASSIFIER, tile="slide"), tmp_path / "out"
    predict(slides, checkpoint, out, model=CLASSIFIER)
    assert [*failed(out)] == ["broken"]
    rows = {row["slide"]: float(row["score_dark"]) for row in rows_of(out / "slides.csv")}
    # nothing is stained: all px of the tissue mask (16 px), widened to multiples of 32 px
    (tile,) = rows_of(out / "tiles" / "a.csv")
    x, y, width, height = (int(tile[name]) for name in ("l0_x", "l0_y", "l0_width", "l0_height"))
    assert (x, y, width, height) == (0, 0, 320, 256)
    padded = np.pad(picture("a"), ((0, 200), (0, 200), (0, 0)), constant_values=255)
    pixels = np.ascontiguousarray(padded[y : y + height, x : x + width])[None]
    expected = TrainedModel(checkpoint, CLASSIFIER, CPU).probabilities(pixels, (1, 3, height, width))[0, 1]
    assert rows["a"] == pytest.approx(float(expected), abs=1e-6)
    assert (out / "overlays" / "b.png").stat().st_size > 100
    predict(slides, checkpoint, tmp_path / "boxes", "--stream", "32", model=CLASSIFIER)
    in_boxes = {row["slide"]: float(row["score_dark"]) for row in rows_of(tmp_path / "boxes" / "slides.csv")}
    assert in_boxes == pytest.approx(rows, abs=1e-6)


def assert_same_maps(expected, out):
    for slide_id in DARK:
        ours, theirs = (tifffile.imread(folder / "heat_maps" / f"{slide_id}.dark.tif") for folder in (out, expected))
        assert np.abs(ours.astype(int) - theirs).max() <= 1  # of 255: rounding of the last bit of a float


@pytest.mark.parametrize("how", [("--stream", "32"), ("--offload", "parameters")])
def test_boxes_and_parameters_on_the_host_give_the_same_maps(how, slides, checkpoint, predicted, tmp_path):
    predict(slides, checkpoint, tmp_path, *how)
    assert_same_maps(predicted, tmp_path)


@pytest.mark.process
@pytest.mark.parametrize("how", [(), ("--stages", "2")], ids=["slides each", "a slide together"])
def test_two_ranks_share_the_slides_or_compute_one_together(how, slides, checkpoint, predicted, tmp_path):
    out = tmp_path / "out"
    words = [str(word) for word in words_of(slides, checkpoint, out, *how)]
    codes, printed = run_ranks(2, "app.predict", words, tmp_path)
    assert codes == [0, 0], printed
    assert [*failed(out)] == ["broken"]
    assert [row["slide"] for row in rows_of(out / "slides.csv")] == ["a", "b"]
    assert_same_maps(predicted, out)
    assert ("so far)" in printed) == (not how)
    if how:
        assert printed.count("2/3  b: 16 windows") == 1
    for rank, own, other in () if how else ((0, "a", "b"), (1, "b", "a")):
        log = (out / f"run-{rank}.log").read_text()
        assert f"  {own}: " in log
        assert f"  {other}: " not in log


@pytest.mark.process
def test_a_rank_whose_slides_are_all_bad_ends_no_other(slides, checkpoint, tmp_path):
    few = tmp_path / "slides"
    few.mkdir()
    (few / "a.png").symlink_to(slides / "a.png")
    (few / "b.svs").write_text("not a slide")
    words = [str(word) for word in words_of(few, checkpoint, tmp_path / "out")]
    codes, printed = run_ranks(2, "app.predict", words, tmp_path)
    assert codes == [0, 0], printed
    assert [row["slide"] for row in rows_of(tmp_path / "out" / "slides.csv")] == ["a"]
    (few / "a.png").unlink()
    (tmp_path / "none").mkdir()
    words = [str(word) for word in words_of(few, checkpoint, tmp_path / "none")]
    codes, printed = run_ranks(1, "app.predict", words, tmp_path)
    assert codes == [1]
    assert "none of 1 slide could be predicted" in printed


def test_the_first_rank_of_a_launcher_keeps_others_out_of_the_folder(slides, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "PATIENCE_S", 0.3)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with host.lock_folder(tmp_path):
        assert "is in use by" in predict(slides, checkpoint, tmp_path, code=1).stderr


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
    predict(slides, written(tmp_path / "best.pt", mpp=1.0, **more), tmp_path / "out", *words)
    records = PredictionFolder(tmp_path / "out").records()
    for part in ("canvas", "opening"):
        assert {record["row"]["slide"]: record[part]["mpp"] for record in records} == mpp
    assert {row["slide"]: row["split"] for row in rows_of(tmp_path / "out" / "slides.csv")} == {
        "a": "train",
        "b": "val",
    }


def test_a_table_gives_slides_their_mpp_after_the_first_start(slides, tmp_path):
    checkpoint, table, out = written(tmp_path / "best.pt", slide_mpp=None), tmp_path / "mpp.csv", tmp_path / "out"

    def start(rows, *words, code=0):
        table.write_text(f"slide,mpp\n{rows}\n")
        return predict(slides, checkpoint, out, *words, code=code)

    start("a,0.5", "--mpp-table", table)
    assert "--mpp-table FILE" in failed(out)["b"]
    assert "already: 1 slide" in start("a,0.5\nb,0.25", "--mpp-table", table).stdout
    records = PredictionFolder(out).records()
    assert {record["row"]["slide"]: record["canvas"]["mpp"] for record in records} == {"a": 0.5, "b": 0.25}
    for refused in (start("a,1\nb,0.25", "--mpp-table", table, code=2), start("", code=2)):
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
    done = predict(slides, checkpoint, tmp_path / "out", code=1)
    assert f"error: a: {fault}" in done.stderr
    assert advice in done.stderr
    assert not failed(tmp_path / "out")
    with pytest.raises(type(fault)), computation.rank_faults("a", SimpleNamespace(alone=False)):
        fail()  # of one of several ranks
