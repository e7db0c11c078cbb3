"""``--resume``: what may change between two starts of a run, what may not, and a run without a checkpoint."""

import errno
import math
import shutil
from pathlib import Path

import pytest
import torch

from app.checkpoint.file import load_checkpoint, random_state, save_checkpoint, set_random_state
from app.planning.auto import as_square
from app.settings.run import DataSettings, RunConfig
from app.training import run_folder
from app.training.loop import TrainingLoop
from app.training.outcome import HELP
from app.training.run_folder import RunFolder
from pipelines.stream.stream import TileStream
from pipelines.tiles.tile_table import TileTable
from pipelines.tiles.tiling import IndexSettings
from tests.app.conftest import CLASSIFIER, QUICK, interrupted, losses_of, rows_of, same_weights, summary_of

STEPS = 4
LONG, PROCESS = pytest.mark.long, pytest.mark.process


@pytest.fixture(scope="module")
def command(classify_slides):
    return "--slides", classify_slides, *QUICK, "--optimizer", "sgd", "--validation", "0", "--steps", str(STEPS)


@pytest.fixture(scope="module")
def whole(train, command, tmp_path_factory):
    """The run to its end, all in one go."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(*command, "--out", out)
    return out


@pytest.fixture(scope="module")
def half(train, command, tmp_path_factory):
    """A run that was stopped by a signal after two steps."""
    out = tmp_path_factory.mktemp("half") / "run"
    with interrupted(2):
        train(*command, "--out", out)
    assert summary_of(out)["steps"] == 2
    return out


@pytest.fixture
def run(half, tmp_path):
    """A copy of ``half``."""
    return shutil.copytree(half, tmp_path / "run")


@pytest.mark.parametrize(
    "changes",
    [
        ("--stream", "96"),
        pytest.param(("--stream", "auto"), marks=LONG),
        ("--offload", "overlap", "--offload-state=parameters"),
        pytest.param(("--no-channels-last",), marks=LONG),
        pytest.param(("--ranks", "2", "--parallel", "spatial", "--stream", "64"), marks=PROCESS),
    ],
    ids=" ".join,
)
def test_a_run_goes_on_in_another_way(changes, run, whole, command, train, train_ranks):
    """Under the default strategy, auto, unless another is named."""
    done = (train_ranks if "--ranks" in changes else train)(*command, *changes, "--resume", "--out", run)
    assert "warning" not in done.stderr
    assert losses_of(run) == pytest.approx(losses_of(whole), rel=1e-4)


def test_a_run_that_ran_out_of_memory_goes_on_in_boxes(whole, command, train, tmp_path, monkeypatch):
    def out_of_memory(loop, batch, step):
        if step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return compute(loop, batch, step)

    compute, run = TrainingLoop._step, tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_step", out_of_memory)
        failed = train(*command, "--checkpoint-every", "1", "--out", run, code=1)
        train(*command, "--microbatches", "1", "--resume", "--out", run, code=1)
    assert "all of these but --tile may be added to --resume" in failed.stderr
    assert summary_of(run)["status"] == "failed"
    assert RunFolder(run).settings()["microbatches"] == 2, "no checkpoint has 1"
    train(*command, "--stream", "128", "--resume", "--out", run)
    summary = summary_of(run)
    assert (summary["status"], summary["strategy"], summary["stream_px"]) == ("completed", "single", 128)
    assert RunFolder(run).settings()["stream"] == "128"
    assert losses_of(run) == pytest.approx(losses_of(whole), rel=1e-4)


def test_a_model_that_does_not_fit_is_refused_with_advice(command, train, tmp_path, monkeypatch):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("app.training.session.Session", out_of_memory)
    said = train(*command, "--out", tmp_path / "run", code=1).stderr
    assert f"Tried to allocate 2.00 GiB\n{HELP}" in said


@pytest.mark.parametrize("stopped", [2, STEPS])
def test_a_validation_that_a_signal_came_before_is_made_up_for(stopped, classify_slides, train, tmp_path):
    asked = "--slides", classify_slides, *QUICK, "--steps", str(STEPS), "--validate-every", "2", "--out", tmp_path
    with interrupted(stopped):
        train(*asked)
    assert summary_of(tmp_path)["status"] == "interrupted"
    train(*asked, "--resume")
    assert summary_of(tmp_path)["status"] == "completed"
    assert [row["step"] for row in rows_of(tmp_path / "validation.csv")] == ["2", "4"]


def test_a_run_is_not_shortened_in_another_unit(run, command, train):
    told = train(*command[:-2], "--epochs", "0.05", "--extend", "--resume", "--out", run, code=1).stderr
    assert "--extend makes a run longer, not shorter: it has 4 steps, asked are 3" in told
    train(*command, "--resume", "--out", shutil.copytree(run, run.with_name("as begun")))
    config = RunFolder(run).config
    config.write_text(config.read_text().replace("\nsteps: 4\n", "\nsteps: 3\n"))
    shorter = (*command[:-1], "3", "--resume", "--out", run)
    assert "longer, not shorter: it has 4 steps, asked are 3" in train(*shorter, code=1).stderr


def test_other_names_of_the_classes_are_refused(run, command, train, classify_slides, tmp_path):
    labels = tmp_path / "renamed.csv"
    labels.write_text((classify_slides / "labels.csv").read_text().replace("crowded", "close"))
    told = train(*command, "--labels", labels, "--resume", "--out", run, code=1).stderr
    assert "last.pt has classes crowded, sparse; now there are close, sparse: restore the labels" in told


def test_weights_that_expect_other_images_are_refused(run, command, train):
    """The file of ``--weights`` may have moved since the first start."""
    last = RunFolder(run).last
    state = load_checkpoint(last)
    state["normalisation"] = [[0.5] * 3, [0.25] * 3]
    save_checkpoint(last, state)
    told = train(*command, "--resume", "--out", run, code=1).stderr
    assert "images normalised by [[0.5, 0.5, 0.5], [0.25, 0.25, 0.25]]; the weights now expect [[" in told


def test_outputs_that_are_not_finite_end_a_run_before_it_is_saved(classify_slides, train, tmp_path, monkeypatch):
    def diverges(loop, batch, step):
        result = compute(loop, batch, step)
        for tensor in filter(torch.is_floating_point, loop._session.engine.on_device()):
            tensor.data.fill_(math.nan)
        return result

    compute = TrainingLoop._step
    monkeypatch.setattr(TrainingLoop, "_step", diverges)
    told = train("--slides", classify_slides, *QUICK, "--steps", "1", "--out", tmp_path, code=1).stderr
    assert "after 1 steps the model's outputs for validation tiles are not finite" in told
    assert not (tmp_path / "checkpoints" / "last.pt").exists()


def test_another_precision_is_taken_with_a_warning(run, command, train):
    done = train(*command, "--precision", "bf16", "--resume", "--out", run)
    assert "warning: precision bf16 from step 3 on, fp32 before" in done.stderr


def test_a_rank_sets_the_generator_of_its_own_gpu_alone(monkeypatch):
    device, given, seen = torch.device("cuda", 1), torch.zeros(16, dtype=torch.uint8), []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda where: given)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, where: seen.append((state, where)))
    state = random_state(device)
    for cuda in (state["cuda"], [given] * 8, []):  # the last of a run on the CPU
        set_random_state(state | {"cuda": cuda}, device)
    assert seen == [(given, device)] * 2


@PROCESS
def test_a_run_of_one_process_goes_on_under_ddp(command, train, train_ranks, tmp_path):
    """Two ranks cannot share one microbatch: one message says how to continue, and what that changes."""
    place, run = command.index("--microbatches"), tmp_path / "run"
    asked = (*command[:place], *command[place + 2 :], "--out", run)
    with interrupted(2):
        train(*asked, "--microbatches", "1")
    ddp = ("--parallel", "ddp", "--ranks", "2", "--resume")
    refused = train_ranks(*asked, *ddp, code=2)
    assert "the run computes each batch in 1 microbatch: add --microbatches 2" in refused.stderr
    done = train_ranks(*asked, *ddp, "--microbatches", "2")
    assert "microbatches 2 from step 3 on, 1 before: batch norm" in done.stdout + done.stderr
    assert len(losses_of(run)) == STEPS


def test_a_longer_run_has_the_rates_of_its_new_length(run, whole, command, train):
    longer = (*command[:-1], "8", "--resume", "--out", run)
    assert "--extend" in train(*longer, code=2).stderr
    assert "the run ends at step 8 instead of 4" in train(*longer, "--extend").stderr
    rates = losses_of(run, "lr")
    assert rates[:2] == losses_of(whole, "lr")[:2]
    assert rates[2:] == pytest.approx([0.005 * (1 + math.cos(k * math.pi / 8)) for k in range(2, 8)])
    train(*longer)  # that is its length from now on


@pytest.mark.parametrize(
    ("is_new", "resume"), [(True, ("--resume",)), (False, ())], ids=["new, resumed", "begun, started again"]
)
def test_a_run_without_a_checkpoint_starts_from_its_beginning_and_says_so(
    is_new, resume, whole, command, train, tmp_path
):
    """It was killed before its first checkpoint, or never began; the rows of its steps are written anew."""
    if not is_new:
        shutil.copytree(whole, tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert "starts from its beginning" in train(*command, *resume, "--out", tmp_path / "run").stdout
    assert same_weights(tmp_path / "run", whole)
    assert losses_of(tmp_path / "run") == losses_of(whole)


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_full_disk_names_the_file_and_advises_resume_only_with_a_checkpoint(
    has_checkpoint, command, train, tmp_path, monkeypatch
):
    """A write to an open file fails without the name of the file; the summary cannot be written either, and that of an
    earlier start is gone."""

    def write_rows(file, rows):
        if any(row and row[0] == 3 for row in rows):
            monkeypatch.setattr(RunFolder, "write_json", refused)
            refused()
        write(file, rows)

    def refused(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    write, summary = run_folder.write_rows, RunFolder(tmp_path / "run").summary
    summary.parent.mkdir()
    summary.write_text('{"status": "interrupted"}')
    monkeypatch.setattr(run_folder, "write_rows", write_rows)
    every = ("--checkpoint-every", "1" if has_checkpoint else "100")
    done = train(*command, *every, "--out", tmp_path / "run", code=1)
    assert f"{tmp_path / 'run' / 'metrics.csv'}: No space left on device" in done.stderr
    assert ("--resume" in done.stderr, "start again" in done.stderr) == (has_checkpoint, not has_checkpoint)
    assert not summary.exists()


def test_training_and_validation_share_the_memory_for_tiles_read_ahead(classify_slides, train, tmp_path, monkeypatch):
    """A validation leaves in memory what training has read ahead."""

    def prefetch(stream, max_bytes, *more):
        budgets.append(max_bytes)
        return read(stream, max_bytes, *more)

    budgets, read = [], TileStream.prefetch
    monkeypatch.setattr(TileStream, "prefetch", prefetch)
    limit = ("--slides", classify_slides, *QUICK, "--read-ahead=64MiB", "--steps", "1", "--out")
    train(*limit, tmp_path / "both")
    assert (len(budgets), sum(budgets)) == (2, 64 << 20)
    train(*limit, tmp_path / "alone", "--validation", "0")
    assert budgets[2:] == [64 << 20]


@LONG
def test_a_run_is_the_same_with_a_cache_and_resumed_with_a_full_one(classify_slides, train, tmp_path):
    common = ("--slides", classify_slides, *QUICK, "--mpp", "1", "--steps", "6")
    plain, out = tmp_path / "plain", tmp_path / "cached"
    train(*common, "--out", plain)
    assert summary_of(plain)["tile_cache"] is None
    cached = (*common, "--cache", tmp_path / "cache", "--out", out)
    with interrupted(2):
        train(*cached)
    first = summary_of(out)["tile_cache"]
    assert (summary_of(out)["steps"], first["damaged"]) == (2, 0)
    assert first["stored"] == 36, "every tile of the training slides, once"
    assert first["hits"] > 0 < first["slide_s"]
    done = train(*cached, "--cache-bytes", "1KiB", "--resume")
    assert same_weights(out, plain)
    assert summary_of(out)["metrics"] == summary_of(plain)["metrics"]
    last = summary_of(out)["tile_cache"]
    assert last["hits"] > 0 == last["stored"]
    assert last["full"] == "it has its 1024 bytes"
    assert f"{last['hits']} of {last['hits'] + last['misses']} tiles read from it" in done.stdout
    report = (out / "report.html").read_text()
    assert "Tiles read from the cache" in report
    assert "The cache takes no more tiles" in report


CUT = ("--tile", "slide", "--mpp", "4", "--stride", "8", "--parallel", "single", "--batch", "2", "--microbatches", "2")
CUT += ("--model", CLASSIFIER, "--norm", "frozen", "--head", "attention", "--twin-steps=0", "--validate-every=1000")


@LONG
def test_whole_slides_are_trained_in_boxes_and_resumed_bit_for_bit(classify_slides, train, tmp_path):
    common = ("--slides", classify_slides, *CUT, "--lr", "0.01", "--stream", "64", "--steps", "4", "--out")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert "whole slides as tiles: " in train(*common, whole).stdout
    table = TileTable.load(whole / "tiles.parquet")
    assert len(table) == len(table.slides) == 6
    summary = summary_of(whole)
    assert (summary["tile_px"], summary["images"], summary["tile_sides_px"][2]) == ("slide", 8, list(table.largest))
    per_image = summary["pixels_per_second"] / summary["images_per_second"]
    assert table.pixels.min() <= per_image <= table.pixels.max()
    assert all(row["tiles"] == "1" for row in rows_of(whole / "predictions.csv"))
    assert summary["metrics"]["slide_auc"] == summary["metrics"]["tile_auc"]
    assert "Whole slides: smallest, median, largest" in (whole / "report.html").read_text()
    with interrupted(2):
        train(*common, parts)
    assert summary_of(parts)["steps"] == 2
    train(*common, parts, "--resume")
    assert same_weights(parts, whole)


@pytest.mark.parametrize(("parallel", "memory"), [("single", "1MiB"), ("auto", "10KiB")])
def test_whole_slides_that_cannot_fit_are_refused_with_what_to_do(parallel, memory, classify_slides, train, tmp_path):
    asked = ("--parallel", parallel, "--memory", memory, "--steps", "1", "--out", tmp_path)
    said = train("--slides", classify_slides, *CUT, *asked, code=1).stderr
    assert "the largest slide has " in said
    assert "and --stream 512, or ask for a coarser --mpp" in said


def test_a_square_of_as_many_px_stands_for_the_largest_slide():
    config = RunConfig(DataSettings(Path()), IndexSettings(tile="slide"))
    assert (as_square(config, (4096, 1000)).index.side, as_square(config, (4096, 1000)).index.stride) == (2048, None)
