"""``--resume``: what may change between two starts of a run, what may not, and a run without a checkpoint."""

from __future__ import annotations

import csv
import errno
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoint.file import load_checkpoint, save_checkpoint
from app.launch.rank_guard import Interrupt
from app.training import run_folder
from app.training.loop import TrainingLoop, _random_state, _set_random_state
from app.training.run_folder import RunFolder
from pipelines.stream.stream import TileStream
from tests.app.conftest import QUICK, Train, summary_of
from tests.app.test_train import equal, model_of

STEPS = 4


def losses(run: Path, column: str = "loss") -> list[float]:
    with (run / "metrics.csv").open() as file:
        return [float(row[column]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def command(classify_slides: Path) -> tuple[str | Path, ...]:
    return "--slides", classify_slides, *QUICK, "--optimizer", "sgd", "--validation", "0", "--steps", str(STEPS)


def interrupted(train: Train, command: tuple[str | Path, ...], out: Path) -> None:
    """A run that is stopped by a signal after two steps."""
    asked = iter([False, True])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Interrupt, "requested", property(lambda _: next(asked), lambda _, value: None), raising=False)
        done = train(*command, "--out", out)
    assert (done.returncode, summary_of(out)["steps"]) == (0, 2), done.stderr


@pytest.fixture(scope="module")
def whole(train: Train, command: tuple[str | Path, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run to its end, all in one go."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = train(*command, "--out", out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def half(train: Train, command: tuple[str | Path, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("half") / "run"
    interrupted(train, command, out)
    return out


@pytest.mark.parametrize(
    "changes",
    [
        ("--stream", "96"),
        pytest.param(("--stream", "auto"), marks=pytest.mark.long),
        pytest.param(("--recompute", "block"), marks=pytest.mark.long),
        ("--offload", "overlap", "--offload-state=parameters"),
        pytest.param(("--offload-state=optimizer",), marks=pytest.mark.long),
        pytest.param(("--no-channels-last",), marks=pytest.mark.long),
        pytest.param(("--ranks", "2", "--parallel", "ddp"), marks=pytest.mark.process),
        pytest.param(("--ranks", "2", "--parallel", "spatial", "--stream", "64"), marks=pytest.mark.process),
    ],
    ids=lambda changes: " ".join(changes),
)
def test_a_run_goes_on_in_another_way(
    changes: tuple[str, ...],
    half: Path,
    whole: Path,
    command: tuple[str | Path, ...],
    train: Train,
    train_ranks: Train,
    tmp_path: Path,
) -> None:
    """Under the default strategy, auto, unless another is named."""
    shutil.copytree(half, tmp_path / "run")
    start = train_ranks if "--ranks" in changes else train
    done = start(*command, *changes, "--resume", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "warning" not in done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-4)


def test_a_run_that_ran_out_of_memory_goes_on_in_boxes(
    whole: Path, command: tuple[str | Path, ...], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(loop: TrainingLoop, batch: Any, step: int) -> Any:
        if step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return compute(loop, batch, step)

    compute = TrainingLoop._step
    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_step", out_of_memory)
        failed = train(*command, "--checkpoint-every", "1", "--out", tmp_path / "run")
    assert failed.returncode == 1
    assert "all of these but --tile may be added to --resume" in failed.stderr
    assert summary_of(tmp_path / "run")["status"] == "failed"
    done = train(*command, "--stream", "128", "--resume", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["strategy"], summary["stream_px"]) == ("completed", "single", 128)
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-4)


def test_another_precision_is_taken_with_a_warning(
    half: Path, command: tuple[str | Path, ...], train: Train, tmp_path: Path
) -> None:
    shutil.copytree(half, tmp_path / "run")
    done = train(*command, "--precision", "bf16", "--resume", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "warning: precision bf16 from step 3 on, fp32 before" in done.stderr


def test_a_checkpoint_with_states_of_eight_gpus_is_resumed_where_there_are_fewer(
    half: Path,
    whole: Path,
    command: tuple[str | Path, ...],
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checkpoints of earlier versions hold a state for each GPU of the host; the numbers do not depend on them."""
    shutil.copytree(half, tmp_path / "run")
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    state = load_checkpoint(last)
    state["random"]["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * 8
    save_checkpoint(last, state)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: [()[k] for k, _ in enumerate(states)])
    done = train(*command, "--device", "cpu", "--resume", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == losses(whole)
    assert equal(model_of(tmp_path / "run"), model_of(whole))


def test_a_rank_sets_the_generator_of_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    device, given, seen = torch.device("cuda", 1), torch.zeros(16, dtype=torch.uint8), []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda where: given)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, where: seen.append((state, where)))
    state = _random_state(device)
    _set_random_state(state, device)
    _set_random_state(state | {"cuda": [given] * 8}, device)
    _set_random_state(state | {"cuda": []}, device)  # of a run on the CPU
    assert seen == [(given, device)] * 2


@pytest.mark.process
def test_a_run_of_one_process_goes_on_under_ddp(
    command: tuple[str | Path, ...], train: Train, train_ranks: Train, tmp_path: Path
) -> None:
    """Of one microbatch, which two ranks cannot share: one message says how to go on, and what it changes."""
    one = ("--microbatches", "1")
    place = command.index("--microbatches")
    asked = (*command[:place], *command[place + 2 :], "--out", tmp_path / "run")
    interrupted(train, (*asked, *one), tmp_path / "run")
    ddp = ("--parallel", "ddp", "--ranks", "2", "--resume")
    refused = train_ranks(*asked, *ddp)
    assert refused.returncode == 2
    assert "the run computes each batch in 1 microbatch: add --microbatches 2" in refused.stderr
    assert "Traceback" not in refused.stderr
    done = train_ranks(*asked, *ddp, "--microbatches", "2")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "microbatches 2 from step 3 on, 1 before: batch norm" in done.stdout + done.stderr
    assert len(losses(tmp_path / "run")) == STEPS


def test_a_longer_run_has_the_rates_of_its_new_length(
    half: Path, whole: Path, command: tuple[str | Path, ...], train: Train, tmp_path: Path
) -> None:
    shutil.copytree(half, tmp_path / "run")
    longer = (*command[:-1], "8", "--resume", "--out", tmp_path / "run")
    refused = train(*longer)
    assert refused.returncode == 2
    assert "--extend" in refused.stderr
    done = train(*longer, "--extend")
    assert done.returncode == 0, done.stderr
    assert "the run ends at step 8 instead of 4" in done.stderr
    rates = losses(tmp_path / "run", "lr")
    assert rates[:2] == losses(whole, "lr")[:2]
    assert rates[2:] == pytest.approx([0.005 * (1 + math.cos(k * math.pi / 8)) for k in range(2, 8)])
    assert train(*longer).returncode == 0, "that is its length from now on"


@pytest.mark.parametrize(
    ("is_new", "resume"), [(True, ("--resume",)), (False, ())], ids=["new, resumed", "begun, started again"]
)
def test_a_run_without_a_checkpoint_starts_from_its_beginning_and_says_so(
    resume: tuple[str, ...], is_new: bool, whole: Path, command: tuple[str | Path, ...], train: Train, tmp_path: Path
) -> None:
    """Whether it was killed before its first checkpoint or never began; the rows of its steps are written anew."""
    if not is_new:
        shutil.copytree(whole, tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints")
    done = train(*command, *resume, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert ("starts from its beginning" in done.stdout) == (bool(resume) or not is_new)
    assert equal(model_of(tmp_path / "run"), model_of(whole))
    assert losses(tmp_path / "run") == losses(whole)


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_full_disk_names_the_file_and_advises_resume_only_with_a_checkpoint(
    has_checkpoint: bool, command: tuple[str | Path, ...], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write to an open file fails without the name of the file; the summary cannot be written either."""

    def write_rows(file: Any, rows: Any) -> None:
        if any(row and row[0] == 3 for row in rows):
            monkeypatch.setattr(RunFolder, "write_json", refused)
            refused()
        write(file, rows)

    def refused(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write = run_folder.write_rows
    monkeypatch.setattr(run_folder, "write_rows", write_rows)
    every = ("--checkpoint-every", "1" if has_checkpoint else "100")
    done = train(*command, *every, "--out", tmp_path / "run")
    assert done.returncode == 1
    assert f"{tmp_path / 'run' / 'metrics.csv'}: No space left on device" in done.stderr
    assert ("--resume" in done.stderr) == has_checkpoint
    assert ("start again" in done.stderr) != has_checkpoint


def test_training_and_validation_share_the_memory_for_tiles_read_ahead(
    classify_slides: Path, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What training has read ahead stays while a validation runs."""

    def prefetch(stream: TileStream, max_bytes: int, *more: Any) -> TileStream:
        budgets.append(max_bytes)
        return read(stream, max_bytes, *more)

    budgets: list[int] = []
    read = TileStream.prefetch
    monkeypatch.setattr(TileStream, "prefetch", prefetch)
    limit = ("--read-ahead=64MiB", "--steps", "1")
    assert train("--slides", classify_slides, *QUICK, *limit, "--out", tmp_path / "both").returncode == 0
    assert (len(budgets), sum(budgets)) == (2, 64 << 20)
    alone = train("--slides", classify_slides, *QUICK, *limit, "--validation", "0", "--out", tmp_path / "alone")
    assert (alone.returncode, budgets[2:]) == (0, [64 << 20])
