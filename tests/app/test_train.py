"""``app.train`` on one rank: what it leaves, resume, and faults."""

import shutil
import signal

import pytest

from app.checkpoint.file import load_checkpoint, save_checkpoint
from app.settings.cli import RunError
from parallel.engine.recorded import DeviceClock
from pipelines.tiles.tile_table import TileTable
from tests.app.conftest import (
    QUICK,
    SEGMENTER,
    begin_train,
    checkpoint_of,
    losses_of,
    rows_of,
    same_weights,
    summary_of,
)

POSITIVE = ("images_per_second", "images_per_second_sustained", "images_per_second_no_data", "pixels_per_second")
FILES = ("config.yaml", "env.json", "run.log", "tiles.parquet", "splits.csv", "metrics.csv", "validation.csv")
FILES += ("predictions.csv", "summary.json", "report.html", "checkpoints/last.pt", "checkpoints/best.pt")
STEPS = ("--steps", "4", "--twin-steps=1")


@pytest.fixture(scope="module")
def reference(classify_slides, train, tmp_path_factory):
    """Four undisturbed steps."""
    out = tmp_path_factory.mktemp("reference") / "run"
    train("--slides", classify_slides, *QUICK, *STEPS, "--out", out)
    return out


def test_run_leaves_everything_it_promises(reference):
    for name in FILES:
        assert (reference / name).stat().st_size > 0, name
    assert len(list((reference / "tissue").glob("*.png"))) == 6
    assert list((reference / "tensorboard").glob("events*"))
    summary = summary_of(reference)
    expected = {"status": "completed", "strategy": "single", "steps": 4, "images": 16, "ranks": 1, "global_batch": 4}
    expected |= {"tile_px": 256, "checkpoint": str(reference / "checkpoints" / "last.pt")}
    assert summary.items() >= expected.items()
    assert all(summary[name] > 0 for name in (*POSITIVE, "final_loss"))
    assert 0 <= summary["data_wait_fraction"] <= 1
    assert summary["peak_memory_bytes"][0] > 0 < summary["metrics"]["loss"]
    assert [(row["step"], row["images"]) for row in rows_of(reference / "metrics.csv")] == [
        (str(step), str(4 * step)) for step in range(1, 5)
    ]
    assert {row["split"] for row in rows_of(reference / "predictions.csv")} == {"val"}


def test_time_in_which_the_device_still_computes_is_no_wait_for_tiles(classify_slides, train, tmp_path, monkeypatch):
    class BusyClock(DeviceClock):
        def durations(self, pairs):
            return [0.0 for _ in pairs]

    monkeypatch.setattr("app.training.loop.DeviceClock", BusyClock)
    train("--slides", classify_slides, *QUICK, "--steps", "2", "--out", tmp_path)
    assert {row["data_wait_s"] for row in rows_of(tmp_path / "metrics.csv")} == {"0.0"}


@pytest.mark.process
def test_killed_with_tiles_in_boxes_and_resumed_is_bit_identical(classify_slides, train, tmp_path):
    """With augmentation, batch norm over boxes, and maps in a file, of which nothing is left.

    ``checkpoint/test_file.py`` has the points of a checkpoint one by one, ``launch/test_restart.py`` several ranks.
    """
    arguments = ("--slides", classify_slides, *QUICK, "--steps", "5", "--checkpoint-every", "1")
    arguments += ("--parallel", "single", "--stream", "96", "--offload-host=256KiB")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(*arguments, "--out", whole)
    assert summary_of(whole)["file_bytes"][0] > 1 << 20
    process = begin_train(*arguments, "--out", killed)
    process.kill()
    process.communicate(timeout=60)
    train(*arguments, "--out", killed, "--resume")
    assert summary_of(killed)["images"] == 20
    assert same_weights(killed, whole)
    for column in ("step", "loss", "lr", "images"):
        assert losses_of(killed, column) == losses_of(whole, column)
    assert not list(killed.glob("maps*"))


def test_a_signal_ends_a_run_whose_slides_are_still_prepared(classify_slides, train, tmp_path, monkeypatch):
    """It was remembered until the first step, for the hours that an index takes."""
    before, seen = signal.getsignal(signal.SIGTERM), []

    def prepare(*_):
        seen.append(signal.getsignal(signal.SIGTERM))
        raise RunError("far enough")

    monkeypatch.setattr("app.train.prepare", prepare)
    train("--slides", classify_slides, *QUICK, "--out", tmp_path / "run", code=1)
    assert seen == [before]


def test_segmentation_end_to_end(segment_slides, train, tmp_path):
    model = ("--model", SEGMENTER, "--sample", "pixels")
    train("--slides", segment_slides, *QUICK, *model, "--steps", "4", "--out", tmp_path / "run")
    summary = summary_of(tmp_path / "run")
    assert (summary["task"], summary["classes"]) == ("segment", ["background", "gland"])
    assert 0 < summary["metrics"]["dice"] == summary["metrics"]["dice_gland"] <= 1
    assert "--sample pixels: of the px shown, background " in (tmp_path / "run" / "run.log").read_text()


def test_segmentation_in_boxes_has_the_loss_and_scores_of_whole_tiles(segment_slides, train, tmp_path):
    model = ("--model", SEGMENTER, "--steps", "1", "--parallel", "single", "--lr", "1e-6", "--tile", "128")
    for stream in ("none", "48"):
        train("--slides", segment_slides, *QUICK, *model, "--stream", stream, "--out", tmp_path / stream)
    whole, boxes = (summary_of(tmp_path / stream) for stream in ("none", "48"))
    assert boxes["final_loss"] == pytest.approx(whole["final_loss"], rel=1e-4)
    assert boxes["metrics"] == pytest.approx(whole["metrics"], rel=1e-3)


def test_tile_labels_from_annotations(segment_slides, train, tmp_path):
    tiles = ("--task", "classify", "--tile", "64", "--validation-tiles=100")
    train("--slides", segment_slides, *QUICK, *tiles, "--steps", "2", "--out", tmp_path / "run")
    metrics = summary_of(tmp_path / "run")["metrics"]
    assert metrics["tile_auc"] is not None
    assert metrics["slide_auc"] is None


def test_loss_that_is_not_finite_names_step_slide_and_tile(classify_slides, train, tmp_path):
    model = ("--model", "tests.helpers.tiny_models:overflowing", "--checkpoint-every", "1", "--steps", "9")
    done = train("--slides", classify_slides, *QUICK, *model, "--out", tmp_path / "run", code=1)
    assert "loss is nan at step 3; tiles of that microbatch: slide_" in done.stderr
    assert "at level-0 (" in done.stderr
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["steps"], checkpoint_of(tmp_path / "run")["step"]) == ("failed", 2, 2)


def test_resuming_a_finished_run_leaves_it_as_it_is(reference, classify_slides, train):
    before = (reference / "summary.json").read_text()
    arguments = ("--slides", classify_slides, *QUICK, *STEPS, "--out", reference, "--resume")
    assert "nothing to do" in train(*arguments).stdout
    assert "seed: the run has 0, asked is 5" in train(*arguments, "--seed", "5", code=2).stderr
    assert (reference / "summary.json").read_text() == before


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.process)])
def test_killed_between_last_checkpoint_and_summary(ranks, classify_slides, train, train_ranks, tmp_path):
    out = tmp_path / "run"
    start, strategy = (train, ()) if ranks == 1 else (train_ranks, ("--ranks", "2", "--parallel", "gpipe"))
    arguments = ("--slides", classify_slides, *QUICK, "--steps", "2", "--out", out, *strategy)
    start(*arguments)
    whole = summary_of(out)
    for name in ("summary.json", "report.html", "checkpoints/best.pt"):
        (out / name).unlink()
    assert "completed: 2 steps" in start(*arguments, "--resume").stdout
    assert (out / "report.html").exists()
    assert (out / "checkpoints" / "best.pt").exists()
    for key in ("status", "steps", "images", "final_loss", "metrics", "best"):
        assert summary_of(out)[key] == whole[key]


@pytest.mark.parametrize("key", ["random", "optimizer", "model", "step", "stream"])
def test_resume_names_a_checkpoint_that_lacks_something(key, reference, classify_slides, train, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    state = load_checkpoint(out / "checkpoints" / "last.pt")
    del state[key]
    save_checkpoint(out / "checkpoints" / "last.pt", state)
    (out / "summary.json").unlink()
    done = train("--slides", classify_slides, *QUICK, *STEPS, "--out", out, "--resume", code=1)
    assert "last.pt" in done.stderr
    assert key in done.stderr


@pytest.mark.long
def test_mpp_of_single_slides_is_used_and_kept_in_the_checkpoint(classify_slides, train, tmp_path):
    (tmp_path / "mpp.csv").write_text("slide,mpp\nslide_0000,0.4\nslide_0001.tif,0.45\nelsewhere,0.3\n")
    arguments = ("--slides", classify_slides, *QUICK, "--steps", "1", "--out", tmp_path / "run", "--mpp-table")
    train(*arguments, tmp_path / "mpp.csv")
    assert checkpoint_of(tmp_path / "run")["slides"]["mpp"] == {"slide_0000": 0.4, "slide_0001": 0.45}
    sources = {source.slide_id: source.mpp for source in TileTable.load(tmp_path / "run" / "tiles.parquet").sources}
    assert (sources["slide_0000"], sources["slide_0001"], sources["slide_0002"]) == (0.4, 0.45, 0.5)
    (tmp_path / "other.csv").write_text("slide,mpp\nslide_0000,0.3\n")
    again = train(*arguments, tmp_path / "other.csv", "--resume", code=2)
    assert "slide-mpp of slide_0000 is 0.4 there, 0.3 was asked for" in again.stderr
