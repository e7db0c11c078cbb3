"""``app.train``: what it leaves, resume, faults; and as a user starts it: kills, signals, ranks."""

from __future__ import annotations

import csv
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoint.file import load_checkpoint, save_checkpoint
from pipelines.tiles.tile_table import TileTable
from tests.app.conftest import QUICK, ROOT, Train, rank_process, summary_of, train_command, train_environment

SUMMARY_FIELDS = {
    *("status", "strategy", "ranks", "global_batch", "tile_px", "steps", "images", "images_per_second"),
    *("images_per_second_no_data", "pixels_per_second", "data_wait_fraction", "peak_memory_bytes", "final_loss"),
    *("metrics", "checkpoint"),
}
FILES = ("config.yaml", "env.json", "run.log", "tiles.parquet", "splits.csv", "metrics.csv", "validation.csv")
FILES += ("predictions.csv", "summary.json", "report.html", "checkpoints/last.pt", "checkpoints/best.pt")


def model_of(run: Path) -> dict[str, torch.Tensor]:
    state: dict[str, Any] = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    return state["model"]


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def reference(classify_slides: Path, train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve undisturbed steps."""
    out = tmp_path_factory.mktemp("reference") / "run"
    done = train("--slides", classify_slides, *QUICK, "--steps", "12", "--twin-steps=2", "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def test_run_leaves_everything_it_promises(reference: Path) -> None:
    for name in FILES:
        assert (reference / name).stat().st_size > 0, name
    assert len(list((reference / "tissue").glob("*.png"))) == 6
    assert list((reference / "tensorboard").glob("events*"))
    summary = summary_of(reference)
    assert summary.keys() >= SUMMARY_FIELDS
    assert summary["status"] == "completed"
    assert summary["strategy"] == "single"
    assert (summary["steps"], summary["images"]) == (12, 48)
    assert summary["images_per_second"] > 0
    assert summary["images_per_second_sustained"] > 0
    assert summary["images_per_second_no_data"] > 0
    assert 0 <= summary["data_wait_fraction"] <= 1
    assert summary["metrics"]["loss"] > 0
    with (reference / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    assert int(rows[-1]["images"]) == 48
    with (reference / "predictions.csv").open() as file:
        assert {row["split"] for row in csv.DictReader(file)} == {"val"}


@pytest.mark.process
def test_killed_and_resumed_is_bit_identical(
    reference: Path, classify_slides: Path, train: Train, tmp_path: Path
) -> None:
    """Somewhere; ``tests/app/checkpoint/test_kills.py`` has the points of a checkpoint one by one."""
    out = tmp_path / "run"
    kill_and_resume(("--slides", classify_slides, *QUICK, "--steps", "12", "--checkpoint-every", "3"), out, train)
    assert summary_of(out)["images"] == 48
    assert_identical(out, reference)


def kill_and_resume(arguments: tuple[str | Path, ...], out: Path, train: Train) -> None:
    """Some time after its first checkpoint."""
    process = subprocess.Popen(
        train_command(*arguments, "--out", out),
        cwd=ROOT,
        env=train_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_for(out / "checkpoints" / "last.pt", process)
    time.sleep(0.02)
    process.kill()
    process.communicate(timeout=60)
    done = train(*arguments, "--out", out, "--resume")
    assert done.returncode == 0, done.stderr


def assert_identical(run: Path, reference: Path) -> None:
    assert equal(model_of(reference), model_of(run))
    columns = ("step", "loss", "lr", "images")
    assert column(run, columns) == column(reference, columns)


@pytest.mark.process
def test_killed_with_tiles_in_boxes_and_resumed_is_bit_identical(
    classify_slides: Path, train: Train, tmp_path: Path
) -> None:
    """With augmentation, batch norm over boxes, and maps in a file, of which nothing is left."""
    arguments: tuple[str | Path, ...] = ("--slides", classify_slides, *QUICK, "--steps", "5", "--checkpoint-every", "1")
    arguments += ("--parallel", "single", "--stream", "96", "--offload-host=256KiB")
    done = train(*arguments, "--out", tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    assert summary_of(tmp_path / "whole")["file_bytes"][0] > 1 << 20
    kill_and_resume(arguments, tmp_path / "killed", train)
    assert_identical(tmp_path / "killed", tmp_path / "whole")
    assert not list((tmp_path / "killed").glob("maps*"))


def column(run: Path, names: tuple[str, ...]) -> list[tuple[str, ...]]:
    with (run / "metrics.csv").open() as file:
        return [tuple(row[name] for name in names) for row in csv.DictReader(file)]


def wait_for(path: Path, process: subprocess.Popen[bytes], timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


@pytest.mark.process
@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGTERM, 1), (signal.SIGUSR1, 2)])
def test_signal_saves_and_ends_well(
    number: signal.Signals, ranks: int, classify_slides: Path, train: Train, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    strategy = ("--ranks", str(ranks), "--parallel", "single" if ranks == 1 else "ddp")
    arguments = ("--slides", classify_slides, *QUICK, "--out", out, *strategy, "--checkpoint-every", "2")
    process = subprocess.Popen(
        train_command(*arguments, "--steps", "100000"),
        cwd=ROOT,
        env=train_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_for(out / "checkpoints" / "last.pt", process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output.decode()
    summary = summary_of(out)
    assert summary["status"] == "interrupted"
    assert torch.load(out / "checkpoints" / "last.pt", weights_only=True)["step"] == summary["steps"]
    assert summary["images"] == 4 * summary["steps"]


@pytest.mark.process
def test_two_ranks_equal_one_process_on_the_same_batch(
    classify_slides: Path, train: Train, train_ranks: Train, tmp_path: Path
) -> None:
    reference, out = tmp_path / "one", tmp_path / "two"
    # SGD: AdamW's first updates are the signs of the gradients, which rounding flips where they are almost 0.
    arguments = ("--slides", classify_slides, *QUICK, "--steps", "12", "--optimizer", "sgd")
    for run, start, strategy in (
        (reference, train, ()),
        (out, train_ranks, ("--ranks", "2", "--parallel", "ddp")),
    ):
        done = start(*arguments, "--out", run, *strategy)
        assert done.returncode == 0, done.stderr + done.stdout
    summary = summary_of(out)
    assert (summary["strategy"], summary["ranks"], summary["images"]) == ("ddp", 2, 48)
    assert len(summary["peak_memory_bytes"]) == 2
    losses = [[float(loss) for (loss,) in column(run, ("loss",))] for run in (reference, out)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    found = model_of(out)
    for name, tensor in model_of(reference).items():
        # Float32 rounding grown over twelve steps; one step is held to 1e-5 in test_data_parallel.py.
        assert (found[name] - tensor).abs().max() <= 1e-3 * max(1, tensor.abs().max()), name
    assert summary["metrics"]["loss"] == pytest.approx(summary_of(reference)["metrics"]["loss"], rel=1e-3)


def test_segmentation_end_to_end(segment_slides: Path, train: Train, tmp_path: Path) -> None:
    out = tmp_path / "run"
    model = ("--model", "tests.helpers.tiny_models:segmenter", "--class-weights", "balanced")
    model += ("--sample", "pixels")
    done = train("--slides", segment_slides, *QUICK, *model, "--steps", "8", "--out", out)
    assert done.returncode == 0, done.stderr
    summary = summary_of(out)
    assert summary["task"] == "segment"
    assert summary["classes"] == ["background", "gland"]
    assert 0 < summary["metrics"]["dice"] <= 1
    assert summary["metrics"]["dice"] == summary["metrics"]["dice_gland"]
    assert "--sample pixels: of the px shown, background " in (out / "run.log").read_text()


def test_segmentation_in_boxes_has_the_loss_and_scores_of_whole_tiles(
    segment_slides: Path, train: Train, tmp_path: Path
) -> None:
    model = ("--model", "tests.helpers.tiny_models:segmenter", "--steps", "1", "--parallel", "single", "--lr", "1e-6")
    model += ("--tile", "128")
    summaries = []
    for stream in ("none", "48"):
        if summaries:  # the index is the same
            (tmp_path / stream).mkdir()
            shutil.copy(tmp_path / "none" / "tiles.parquet", tmp_path / stream)
        done = train("--slides", segment_slides, *QUICK, *model, "--stream", stream, "--out", tmp_path / stream)
        assert done.returncode == 0, done.stderr
        summaries.append(summary_of(tmp_path / stream))
    whole, boxes = summaries
    assert boxes["final_loss"] == pytest.approx(whole["final_loss"], rel=1e-4)
    assert boxes["metrics"] == pytest.approx(whole["metrics"], rel=1e-3)


def test_tile_labels_from_annotations(segment_slides: Path, train: Train, tmp_path: Path) -> None:
    out = tmp_path / "run"
    tiles = ("--task", "classify", "--tile", "64", "--validation-tiles=100")
    done = train("--slides", segment_slides, *QUICK, *tiles, "--steps", "2", "--out", out)
    assert done.returncode == 0, done.stderr
    metrics = summary_of(out)["metrics"]
    assert metrics["tile_auc"] is not None
    assert metrics["slide_auc"] is None


def test_loss_that_is_not_finite_names_step_slide_and_tile(classify_slides: Path, train: Train, tmp_path: Path) -> None:
    out = tmp_path / "run"
    model = ("--model", "tests.helpers.tiny_models:overflowing", "--checkpoint-every", "1")
    done = train("--slides", classify_slides, *QUICK, *model, "--steps", "9", "--out", out)
    assert done.returncode == 1
    assert "loss is nan at step 3; tiles of that microbatch: slide_" in done.stderr
    assert "at level-0 (" in done.stderr
    assert "Traceback" not in done.stderr
    summary = summary_of(out)
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert torch.load(out / "checkpoints" / "last.pt", weights_only=True)["step"] == 2


def test_resuming_a_finished_run_leaves_it_as_it_is(reference: Path, classify_slides: Path, train: Train) -> None:
    before = (reference / "summary.json").read_text()
    arguments = ("--slides", classify_slides, *QUICK, "--steps", "12", "--twin-steps=2")
    done = train(*arguments, "--out", reference, "--resume")
    assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stdout
    assert (reference / "summary.json").read_text() == before


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.process)])
def test_killed_between_last_checkpoint_and_summary(
    ranks: int, classify_slides: Path, train: Train, train_ranks: Train, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    start, strategy = (train, ()) if ranks == 1 else (train_ranks, ("--ranks", "2", "--parallel", "gpipe"))
    arguments = ("--slides", classify_slides, *QUICK, "--steps", "2", "--out", out, *strategy)
    assert start(*arguments).returncode == 0
    whole = summary_of(out)
    for name in ("summary.json", "report.html", "checkpoints/best.pt"):
        (out / name).unlink()
    done = start(*arguments, "--resume")
    assert done.returncode == 0, done.stderr
    assert "completed: 2 steps" in done.stdout
    assert (out / "report.html").exists()
    assert (out / "checkpoints" / "best.pt").exists()
    for key in ("status", "steps", "images", "final_loss", "metrics", "best"):
        assert summary_of(out)[key] == whole[key]


@pytest.mark.parametrize("key", ["random", "optimizer", "model", "step", "stream"])
def test_resume_names_a_checkpoint_that_lacks_something(
    key: str, reference: Path, classify_slides: Path, train: Train, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    state = load_checkpoint(out / "checkpoints" / "last.pt")
    del state[key]
    save_checkpoint(out / "checkpoints" / "last.pt", state)
    (out / "summary.json").unlink()
    done = train("--slides", classify_slides, *QUICK, "--steps", "12", "--out", out, "--resume")
    assert done.returncode == 1
    assert "last.pt" in done.stderr
    assert key in done.stderr
    assert "Traceback" not in done.stderr


def test_resume_refuses_other_settings(reference: Path, classify_slides: Path, train: Train) -> None:
    done = train("--slides", classify_slides, *QUICK, "--steps", "12", "--out", reference, "--resume", "--seed", "5")
    assert done.returncode == 2
    assert "seed: the run has 0, asked is 5" in done.stderr


@pytest.mark.process
def test_killed_rank_ends_the_run_within_a_minute(classify_slides: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    strategy = ("--ranks", "2", "--parallel", "ddp")
    arguments = ("--slides", classify_slides, *QUICK, "--out", out, *strategy, "--checkpoint-every", "2")
    process = subprocess.Popen(
        train_command(*arguments, "--steps", "100000"),
        cwd=ROOT,
        env=train_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_for(out / "checkpoints" / "last.pt", process)
    rank = rank_process(process, 1)
    rank.kill()
    started = time.monotonic()
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 1, output.decode()
    assert time.monotonic() - started < 60
    assert b"a rank ended with exit code 137" in output
    assert torch.load(out / "checkpoints" / "last.pt", weights_only=True)["step"] > 0


@pytest.mark.process
def test_mpp_of_single_slides_is_used_and_kept_in_the_checkpoint(
    classify_slides: Path, train: Train, tmp_path: Path
) -> None:
    (tmp_path / "mpp.csv").write_text("slide,mpp\nslide_0000,0.4\nslide_0001.tif,0.45\nelsewhere,0.3\n")
    arguments = ("--slides", classify_slides, *QUICK, "--steps", "1", "--out", tmp_path / "run", "--mpp-table")
    done = train(*arguments, tmp_path / "mpp.csv")
    assert done.returncode == 0, done.stderr
    slides = torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)["slides"]
    assert slides["mpp"] == {"slide_0000": 0.4, "slide_0001": 0.45}
    sources = {source.slide_id: source.mpp for source in TileTable.load(tmp_path / "run" / "tiles.parquet").sources}
    assert (sources["slide_0000"], sources["slide_0001"], sources["slide_0002"]) == (0.4, 0.45, 0.5)
    (tmp_path / "other.csv").write_text("slide,mpp\nslide_0000,0.3\n")
    again = train(*arguments, tmp_path / "other.csv", "--resume")
    assert again.returncode == 2
    assert "slide-mpp of slide_0000 is 0.4 there, 0.3 was asked for" in again.stderr
