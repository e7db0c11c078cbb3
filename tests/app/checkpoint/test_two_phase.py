"""Checkpoints in two phases: the same files as written at once, whatever happens to who writes them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from app.checkpoint import two_phase
from app.checkpoint.file import load_checkpoint, save_checkpoint
from app.checkpoint.periodic import CheckpointManager
from app.checkpoint.two_phase import TwoPhaseCheckpoints
from app.settings.cli import RunError
from app.settings.optimization import CheckpointSettings
from app.training.run_folder import RunFolder
from parallel.offload.copies import Copies
from parallel.offload.host_optimizer import nothing
from tests.helpers.sim_gpu import simulated

CPU = torch.device("cpu")


@pytest.fixture
def checkpoints() -> TwoPhaseCheckpoints:
    return TwoPhaseCheckpoints(CPU)


def awkward_state() -> dict[str, Any]:
    """Views, tied weights, odd strides, empty tensors, all kinds of numbers, and what is no tensor."""
    base = torch.arange(60, dtype=torch.float32)
    tied = nn.Linear(3, 3)
    model = nn.ModuleDict({"first": tied, "second": tied, "norm": nn.BatchNorm1d(3)})
    return {
        "model": model.state_dict(),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": base[7:19].view(3, 4).t()}}, "lr": 0.1},
        "more": {
            "rest of the same storage": base[30:],
            "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "empty": torch.empty(0, 3),
            "half": torch.randn(7).half(),
            "bfloat16": torch.randn(7, dtype=torch.bfloat16),
            "bool": torch.tensor([True, False]),
            "bytes": torch.get_rng_state(),
        },
        "step": 5,
        "best": {"step": 5, "value": None},
        "classes": ["a", "b"],
    }


def test_file_is_that_of_a_blocking_write_to_the_last_bit(tmp_path: Path, checkpoints: TwoPhaseCheckpoints) -> None:
    state = awkward_state()
    save_checkpoint(tmp_path / "blocking.pt", state)
    names = frozenset(name for name in state["model"] if "running" not in name)
    checkpoints.begin(state, names, tmp_path / "last.pt", tmp_path / "best.pt")
    state["classes"].append("changed later")
    state["best"]["value"] = 1.0
    checkpoints.finish()
    expected = (tmp_path / "blocking.pt").read_bytes()
    assert (tmp_path / "last.pt").read_bytes() == expected
    assert (tmp_path / "best.pt").samefile(tmp_path / "last.pt")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["best.pt", "blocking.pt", "last.pt"]


def test_a_fault_of_the_device_is_not_one_of_the_disk(
    tmp_path: Path, checkpoints: TwoPhaseCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "save", fail)
    monkeypatch.setattr(two_phase, "copy_bytes", fail)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        save_checkpoint(tmp_path / "last.pt", {})
    state = {"model": {"w": torch.ones(1)}, "optimizer": {}}
    checkpoints.begin(state, frozenset({"w"}), tmp_path / "last.pt", None)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        checkpoints.finish()


def test_buffer_is_reused_and_grows(tmp_path: Path, checkpoints: TwoPhaseCheckpoints) -> None:
    for size in (1000, 500, 200_000):
        state = {"model": {"w": torch.randn(size)}, "optimizer": {}, "step": size}
        checkpoints.begin(state, frozenset("w"), tmp_path / "last.pt", None)
        written = checkpoints.finish()
        assert written is not None
        assert torch.equal(load_checkpoint(tmp_path / "last.pt")["model"]["w"], state["model"]["w"])
    assert checkpoints.finish() is None


def test_an_update_may_follow_when_the_copy_is_complete(tmp_path: Path, checkpoints: TwoPhaseCheckpoints) -> None:
    base = torch.arange(6.0)
    state = {"model": {"a": base, "b": base[2:]}, "optimizer": {}}
    checkpoints.begin(state, frozenset({"a", "b"}), tmp_path / "last.pt", None)
    checkpoints.await_copy()
    base += 1
    checkpoints.finish()
    found = load_checkpoint(tmp_path / "last.pt")["model"]
    assert found["a"].tolist() == [0, 1, 2, 3, 4, 5]
    found["a"][2] = 9
    assert found["b"].tolist() == [9, 3, 4, 5]


def test_copies_of_a_gpu_are_awaited(tmp_path: Path) -> None:
    with simulated(1, late=0) as gpus:
        device = torch.device("cuda", 0)
        checkpoints, weight = TwoPhaseCheckpoints(device), torch.arange(8.0, device=device)
        state = {"model": {"w": weight, "mean": torch.ones(3, device=device)}, "optimizer": {}}
        checkpoints.begin(state, frozenset({"w"}), tmp_path / "last.pt", None)
        checkpoints.await_copy()
        weight += 1
        checkpoints.finish()
        assert not gpus.found
    found = load_checkpoint(tmp_path / "last.pt")["model"]
    assert (found["w"].tolist(), found["mean"].tolist()) == (list(range(8)), [1.0] * 3)


class Still:
    """An engine of which only its names are asked."""

    parameter_names = frozenset({"w"})

    def before_update(self, call: Callable[[], None]) -> None:
        self.call = call


def checkpoints_of(folder: Path, **settings: Any) -> CheckpointManager:
    run = RunFolder(folder)
    return CheckpointManager(CheckpointSettings(**settings), run.last, run.best, Still(), CPU, 0)  # type: ignore[arg-type]


def save(checkpoints: CheckpointManager, step: int, best: bool = False, size: int = 9, at_once: bool = False) -> None:
    state = {"model": {"w": torch.full((size,), float(step))}, "optimizer": {}, "step": step}
    checkpoints.save(state, step, time.monotonic(), best=best, at_once=at_once)


@pytest.mark.parametrize("write", ["two-phase", "blocking"])
def test_unwritable_folder_ends_the_run_and_keeps_what_was(write: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)

    def run() -> None:
        with checkpoints_of(tmp_path, checkpoint_write=write) as checkpoints:
            save(checkpoints, 1)
            checkpoints.finish()
            folder.last.with_suffix(".tmp").mkdir()  # what a file is to be written to is a folder
            save(checkpoints, 2)

    with pytest.raises(RunError) as told:
        run()
    kept = f"the previous one is kept: {folder.last}; free space, then --resume"
    assert str(told.value) == f"checkpoint {folder.last} could not be written (Is a directory); {kept}"
    assert load_checkpoint(folder.last)["step"] == 1


def test_every_checkpoint_is_on_the_disk_when_the_run_is_left(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)

    def run() -> None:
        with checkpoints_of(tmp_path) as checkpoints:
            for step in range(1, 4):
                save(checkpoints, step, best=step == 2)  # each waits for the one before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert (load_checkpoint(folder.last)["step"], load_checkpoint(folder.best)["step"]) == (3, 2)


def test_what_no_step_follows_is_written_at_once_behind_what_is_under_way(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with checkpoints_of(tmp_path) as checkpoints:
        save(checkpoints, 1, at_once=True)
        assert not checkpoints.busy
        assert load_checkpoint(folder.last)["step"] == 1
        save(checkpoints, 2)
        save(checkpoints, 3, at_once=True)
        assert load_checkpoint(folder.last)["step"] == 3


def test_without_memory_to_copy_to_it_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Copies, "empty_on_host", lambda self, size: torch.empty(1 << 60))
    with checkpoints_of(tmp_path) as checkpoints, caplog.at_level(logging.WARNING):
        for step in (1, 2):
            save(checkpoints, step)
            assert load_checkpoint(RunFolder(tmp_path).last)["step"] == step
    (record,) = caplog.records
    assert "written between two steps: they cannot be copied first (64 bytes" in record.getMessage()


def test_tuned_checkpoints_are_due_by_what_they_cost_and_never_while_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()

    def save_later(*arguments: Any) -> None:
        assert written.wait(60)
        save_checkpoint(*arguments)

    monkeypatch.setattr(two_phase, "save_checkpoint", save_later)
    with checkpoints_of(tmp_path, checkpoint_every=0) as checkpoints:
        for step in range(1, 10):
            checkpoints.add_step(100.0)
            assert checkpoints.due(step) == (step == 10)
        checkpoints.add_step(100.0)
        assert checkpoints.due(10)
        save(checkpoints, 10)
        assert not checkpoints.due(1000)
        written.set()
        while not checkpoints.due(12):  # it took far less than a step of 100 s: one step beside it, one without
            time.sleep(0.01)
            checkpoints.add_step(100.0)
        assert not checkpoints.due(11)


def test_engines_wait_for_nothing_when_nothing_is_written_beside_them(tmp_path: Path) -> None:
    engine = Still()
    engine.call = nothing
    settings = CheckpointSettings(checkpoint_write="blocking")
    run = RunFolder(tmp_path)
    CheckpointManager(settings, run.last, run.best, engine, CPU, 0)  # type: ignore[arg-type]
    assert engine.call is nothing
