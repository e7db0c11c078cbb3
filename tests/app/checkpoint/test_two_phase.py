"""Checkpoints in two phases: the same files as written at once, and as often as is worth their cost."""

import logging
import math
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from app.checkpoint import two_phase
from app.checkpoint.file import load_checkpoint, save_checkpoint
from app.checkpoint.periodic import CHECKPOINTS, FIRST, STEPS, CheckpointInterval, CheckpointManager
from app.checkpoint.two_phase import TwoPhaseCheckpoints
from app.settings.cli import RunError
from app.settings.optimization import CheckpointSettings
from app.training.run_folder import RunFolder
from parallel.offload.copies import Copies
from parallel.offload.host_optimizer import nothing
from tests.helpers.sim_gpu import simulated

CPU = torch.device("cpu")


@pytest.fixture
def checkpoints():
    return TwoPhaseCheckpoints(CPU)


def awkward_state():
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


def test_file_is_that_of_a_blocking_write_to_the_last_bit(tmp_path, checkpoints):
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


def test_a_fault_of_the_device_is_not_one_of_the_disk(tmp_path, checkpoints, monkeypatch):
    def fail(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "save", fail)
    monkeypatch.setattr(two_phase, "copy_bytes", fail)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        save_checkpoint(tmp_path / "last.pt", {})
    state = {"model": {"w": torch.ones(1)}, "optimizer": {}}
    checkpoints.begin(state, frozenset({"w"}), tmp_path / "last.pt", None)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        checkpoints.finish()


def test_buffer_is_reused_and_grows(tmp_path, checkpoints):
    for size in (1000, 500, 200_000):
        state = {"model": {"w": torch.randn(size)}, "optimizer": {}, "step": size}
        checkpoints.begin(state, frozenset("w"), tmp_path / "last.pt", None)
        written = checkpoints.finish()
        assert written is not None
        assert torch.equal(load_checkpoint(tmp_path / "last.pt")["model"]["w"], state["model"]["w"])
    assert checkpoints.finish() is None


def test_an_update_may_follow_when_the_copy_is_complete(tmp_path, checkpoints):
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


def test_copies_of_a_gpu_are_awaited(tmp_path):
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

    def before_update(self, call):
        self.call = call


def checkpoints_of(folder, **settings):
    run = RunFolder(folder)
    return CheckpointManager(CheckpointSettings(**settings), run.last, run.best, Still(), CPU, 0)


def save(checkpoints, step, best=False, size=9, at_once=False):
    state = {"model": {"w": torch.full((size,), float(step))}, "optimizer": {}, "step": step}
    checkpoints.save(state, step, time.monotonic(), best=best, at_once=at_once)


@pytest.mark.parametrize("write", ["two-phase", "blocking"])
def test_unwritable_folder_ends_the_run_and_keeps_what_was(write, tmp_path):
    folder = RunFolder(tmp_path)

    def run():
        with checkpoints_of(tmp_path, checkpoint_write=write) as checkpoints:
            save(checkpoints, 1)
            checkpoints.finish()
            folder.last.with_suffix(".tmp").mkdir()  # what a file is to be written to is a folder
            save(checkpoints, 2)

    with pytest.raises(RunError) as told:
        run()
    kept = f"the previous one is kept: {folder.last}; remove the cause, then --resume"
    assert str(told.value) == f"checkpoint {folder.last} could not be written (Is a directory); {kept}"
    assert load_checkpoint(folder.last)["step"] == 1


def test_every_checkpoint_is_on_the_disk_when_the_run_is_left(tmp_path):
    folder = RunFolder(tmp_path)

    def run():
        with checkpoints_of(tmp_path) as checkpoints:
            for step in range(1, 4):
                save(checkpoints, step, best=step == 2)  # each waits for the one before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert (load_checkpoint(folder.last)["step"], load_checkpoint(folder.best)["step"]) == (3, 2)


def test_what_no_step_follows_is_written_at_once_behind_what_is_under_way(tmp_path):
    folder = RunFolder(tmp_path)
    with checkpoints_of(tmp_path) as checkpoints:
        save(checkpoints, 1, at_once=True)
        assert not checkpoints.busy
        assert load_checkpoint(folder.last)["step"] == 1
        save(checkpoints, 2)
        save(checkpoints, 3, at_once=True)
        assert load_checkpoint(folder.last)["step"] == 3


def test_without_memory_to_copy_to_it_is_written_at_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Copies, "empty_on_host", lambda self, size: torch.empty(1 << 60))
    with checkpoints_of(tmp_path) as checkpoints, caplog.at_level(logging.WARNING):
        for step in (1, 2):
            save(checkpoints, step)
            assert load_checkpoint(RunFolder(tmp_path).last)["step"] == step
    (record,) = caplog.records
    assert "written between two steps: they cannot be copied first (64 bytes" in record.getMessage()


def test_tuned_checkpoints_are_due_by_what_they_cost_and_never_while_one_is_written(tmp_path, monkeypatch):
    written = threading.Event()

    def save_later(*arguments):
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


def test_engines_wait_for_nothing_when_nothing_is_written_beside_them(tmp_path):
    engine = Still()
    engine.call = nothing
    settings = CheckpointSettings(checkpoint_write="blocking")
    run = RunFolder(tmp_path)
    CheckpointManager(settings, run.last, run.best, engine, CPU, 0)
    assert engine.call is nothing


def after(step_s, between_s=0.0, blocked_s=0.0, write_s=0.0, overhead=0.035):
    interval = CheckpointInterval(overhead)
    for _ in range(5):
        interval.add_step(step_s, overlapped=False)
    interval.add_checkpoint(between_s, blocked_s, write_s)
    return interval


def test_steps_that_ran_slower_beside_it_are_its_cost():
    interval = CheckpointInterval(0.1)
    for _ in range(5):
        interval.add_step(1.0, overlapped=False)
    assert (interval.every, interval.cost_s) == (FIRST, None)  # before the first checkpoint
    for _ in range(3):
        interval.add_step(1.5, overlapped=True)
    interval.add_checkpoint(0.5, blocked_s=0.2, write_s=4.0)
    assert interval.cost_s == pytest.approx(0.5 + 3 * 0.5)  # what updates waited is among the slower steps
    assert interval.every == 20
    interval.add_step(0.9, overlapped=True)
    interval.add_checkpoint(0.5, blocked_s=0.2, write_s=4.0)
    assert interval.cost_s == pytest.approx((2.0 + 0.7) / 2)  # a step that was quicker by chance earns nothing


def test_one_that_was_held_up_moves_nothing_and_a_change_that_stays_does():
    interval = after(1.0, between_s=0.35)
    for between_s in (0.35, 9.0):
        interval.add_checkpoint(between_s, 0.0, 0.0)
    assert interval.every == 10
    for _ in range(CHECKPOINTS):
        interval.add_checkpoint(0.70, 0.0, 0.0)
    assert interval.every == 20
    for _ in range(STEPS):
        interval.add_step(2.0, overlapped=False)
    assert interval.every == 10


@given(step_s=st.floats(1e-3, 1e3), cost_s=st.floats(0, 1e3), write_s=st.floats(0, 1e4), overhead=st.floats(0.001, 1))
def test_never_beyond_the_bound_and_never_rarer_than_needed(step_s, cost_s, write_s, overhead):
    k = after(step_s, cost_s / 2, cost_s / 2, write_s, overhead).every
    assert k >= 1
    assert cost_s <= overhead * k * step_s * (1 + 1e-9)
    assert write_s <= ((k - 1) * (1 + 1e-9) + 1e-9) * step_s
    if k > 1:
        needed = max(cost_s / (overhead * step_s), write_s / step_s + 1 if write_s else 1)
        assert k <= math.ceil(needed * (1 + 1e-9))
