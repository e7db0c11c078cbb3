"""A run that is started again goes on by itself, from its last checkpoint; one that is started anew does not."""

from __future__ import annotations

import csv
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml

from app import train as train_module
from app.settings.launcher import Attempts, Launcher, describe_restart, find_launcher, previous_attempts
from app.settings.run import DataSettings, RunConfig
from app.settings.strategy import StrategySettings
from app.training.run_folder import RunFolder
from tests.app.conftest import QUICK, ROOT, Train, summary_of, train_command, train_environment
from tests.helpers.forked import launched_here

NO_SIDES = SimpleNamespace(sides=None)
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


@pytest.mark.parametrize(
    ("record", "starter", "before"),
    [
        (None, Launcher(agent="node 7"), 0),
        (Attempts(2, ("node 7",), None), Launcher(agent="node 7"), 2),
        (Attempts(2, ("node 7",), None), Launcher(agent="node 8"), 0),
        # The agent of the first rank was lost, and another's rank is the first now.
        (Attempts(2, ("node 7", "node 8"), None), Launcher(agent="node 8"), 2),
        (Attempts(2, (), None), Launcher(), 0),
        (Attempts(1, (), "33"), Launcher(job="33", requeued=True), 1),
        (Attempts(1, ("node 7",), "33"), Launcher("node 8", "33", requeued=True), 1),
        # A second run in one allocation, and a job that was never requeued into the folder of another.
        (Attempts(1, ("node 7",), "33"), Launcher("node 8", "33"), 0),
        (Attempts(1, (), "33"), Launcher(job="34", requeued=True), 0),
    ],
)
def test_attempts_are_those_of_the_same_start(record: Attempts | None, starter: Launcher, before: int) -> None:
    assert previous_attempts(record, starter) == before


def test_starters_are_found() -> None:
    agent = f"{platform.node()} {os.getppid()}"
    assert find_launcher({}) == Launcher()
    assert find_launcher({"TORCHELASTIC_RUN_ID": "none"}) == Launcher(agent)
    assert find_launcher({"MEGATILE_RANK": "1"}) == Launcher(agent)
    # Each agent of several counts for itself: the number says nothing about this rank.
    assert find_launcher({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "3"}) == Launcher(agent)
    assert find_launcher({}, server=7) == Launcher(f"{platform.node()} 7")
    assert find_launcher({"SLURM_JOB_ID": "33"}) == Launcher(job="33")
    array = {"SLURM_JOB_ID": "35", "SLURM_ARRAY_JOB_ID": "33", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "1"}
    assert find_launcher(array) == Launcher(job="33_2", requeued=True)


def test_a_restart_is_told_with_the_work_that_is_lost() -> None:
    assert describe_restart(1, 40, 0) == "restarted (attempt 2): continuing from step 40"
    assert describe_restart(2, 40, 7).endswith(
        "(attempt 3): continuing from step 40; 7 more were done and must be done again"
    )
    assert "starting anew; 1 more was done" in describe_restart(1, 0, 1)
    assert describe_restart(1, 40, 0, (4, 3)).startswith("restarted (attempt 2 on 3 ranks in place of 4): continuing")
    assert describe_restart(2, 40, 0, (4, 3, 3)).startswith("restarted (attempt 3): continuing")


def test_a_further_attempt_leaves_settings_and_earlier_faults_as_they_are(tmp_path: Path) -> None:
    config = RunConfig(DataSettings(Path("slides")))
    folder = RunFolder(tmp_path)
    folder.fault_of(3).write_text("of a start long ago")
    folder.open(config)
    assert not folder.fault_of(3).exists()
    asked = folder.config.read_bytes()
    folder.fault_of(1).write_text("rank 1 was killed")
    folder.last.parent.mkdir()
    folder.last.write_bytes(b"checkpoint")
    with pytest.raises(ValueError, match="already holds a run"):
        folder.open(config, again=True)
    folder.open(replace(config, resume=True), again=True)
    assert (folder.config.read_bytes(), folder.fault_of(1).read_text()) == (asked, "rank 1 was killed")
    with pytest.raises(ValueError, match="seed: the run has 0, asked is 1"):
        folder.open(replace(config, resume=True, seed=1), again=True)


def test_the_number_of_restarts_is_checked() -> None:
    faults = RunConfig(DataSettings(Path("slides")), max_restarts=-1).validate()
    assert "--max-restarts must be at least 0; got -1" in faults


def test_ranks_that_a_run_may_come_down_to_are_checked() -> None:
    def faults(**settings: int) -> list[str]:
        strategy = StrategySettings(parallel="ddp", ranks=4, batch=12)
        return RunConfig(DataSettings(Path("slides")), strategy=strategy, **settings).validate()

    assert faults(min_ranks=3, max_restarts=1) == []
    for settings in ({"min_ranks": 3}, {"min_ranks": 5, "max_restarts": 1}, {"min_ranks": 0, "max_restarts": 1}):
        assert any("min-ranks" in fault for fault in faults(**settings))


@pytest.mark.parametrize(
    ("strategy", "least", "left"),
    [
        (StrategySettings(parallel="ddp", ranks=4, batch=12), None, 4),
        (StrategySettings(parallel="ddp", ranks=4, batch=12), 2, 3),
        # Three ranks make no groups of two.
        (StrategySettings(parallel="1f1b", ranks=4, stages=2, batch=12, microbatches=4), 2, 2),
        (StrategySettings(parallel="1f1b", ranks=4, stages=2, batch=12, microbatches=4), 3, 4),
    ],
)
def test_a_run_that_lost_a_rank_goes_on_with_as_many_as_can(
    strategy: StrategySettings, least: int | None, left: int, tmp_path: Path
) -> None:
    config = RunConfig(DataSettings(Path("slides")), strategy=strategy, out=tmp_path, max_restarts=1, min_ranks=least)
    folder = RunFolder(tmp_path)
    dataset = SimpleNamespace(classes=("a", "b"), task="classify", tiles=NO_SIDES, rows=lambda split: range(8))
    folder.open(replace(config, strategy=replace(strategy, microbatches=strategy.m)), again=False)
    assert train_module._fewer(config, folder, dataset, 4) == left  # type: ignore[arg-type]


def test_an_attempt_without_a_checkpoint_keeps_the_microbatches(tmp_path: Path) -> None:
    ddp = StrategySettings(parallel="ddp", ranks=4, batch=12)
    config = RunConfig(DataSettings(Path("slides")), strategy=ddp, out=tmp_path)
    folder = RunFolder(tmp_path)
    folder.open(train_module._with_microbatches(config, None))
    fewer = replace(config, strategy=replace(ddp, ranks=3))
    for before, microbatches in ((1, 4), (0, 3)):
        begun = train_module._begun(fewer, folder, before)
        assert train_module._with_microbatches(fewer, begun).strategy.microbatches == microbatches


STEPS, EVERY = 30, 4
DRILL = (*QUICK, "--parallel", "master", "--device", "cpu", "--checkpoint-every", str(EVERY), "--validation", "0")


def rows(run: Path) -> list[dict[str, str]]:
    if not (run / "metrics.csv").exists():
        return []
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def second_rank(process: psutil.Process, out: Path) -> psutil.Process:
    ranks = [child for child in process.children(recursive=True) if {"app.train", str(out)} <= set(child.cmdline())]
    return next(rank for rank in ranks if rank.environ().get("RANK") == "1" or rank.name() == "rank 1")


Command = Callable[..., list[str]]


def with_ranks(*arguments: str | Path) -> list[str]:
    return train_command(*arguments, "--ranks", "2", "--max-restarts", "1")


def with_torchrun(*arguments: str | Path) -> list[str]:
    return [TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1", *train_command(*arguments)[1:]]


@pytest.fixture(scope="module")
def undisturbed(classify_slides: Path, train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run to the same end, all in one go."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    with launched_here(tmp_path_factory.mktemp("ranks")):
        done = train("--slides", classify_slides, *DRILL, "--steps", str(STEPS), "--out", out, "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert summary_of(out)["restarts"] == 0
    return out


@pytest.mark.process
@pytest.mark.parametrize("command", [with_ranks, with_torchrun], ids=["ranks", "torchrun"])
def test_killed_rank_costs_steps_but_changes_nothing(
    command: Command, undisturbed: Path, classify_slides: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with (tmp_path / "printed.txt").open("w+") as printed:
        process = subprocess.Popen(
            command("--slides", classify_slides, *DRILL, "--steps", str(STEPS), "--out", out),
            cwd=ROOT,
            env=train_environment(),
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline_s = time.monotonic() + 150
            while len(rows(out)) < EVERY + 2 or not (out / "checkpoints" / "last.pt").exists():
                assert process.poll() is None, (tmp_path / "printed.txt").read_text()
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            second_rank(psutil.Process(process.pid), out).send_signal(signal.SIGKILL)
            code = process.wait(timeout=140)
        finally:
            process.kill()
    text = (tmp_path / "printed.txt").read_text()
    assert code == 0, text
    killed = int(re.findall(r"^rank 1 was killed \(signal 9\) at step (\d+)", (out / "fault.txt").read_text())[0])
    (kept, again), *_ = re.findall(r"restarted \(attempt 2\): continuing from step (\d+)(?:; (\d+) more)?", text)
    # The other rank ends the step where the killed one had already done its share of it.
    assert int(kept) % EVERY == 0
    assert int(kept) + int(again or 0) in (killed - 1, killed)
    assert f"continuing from step {kept}" in (out / "run.log").read_text()
    summary = summary_of(out)
    assert (summary["status"], summary["restarts"], summary["images"]) == ("completed", 1, 4 * STEPS)
    assert [int(row["step"]) for row in rows(out)] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in rows(out)] == [row["loss"] for row in rows(undisturbed)]
    found, expected = (torch.load(run / "checkpoints" / "last.pt", weights_only=True) for run in (out, undisturbed))
    assert found["model"].keys() == expected["model"].keys()
    assert [name for name, value in expected["model"].items() if not torch.equal(found["model"][name], value)] == []
    assert yaml.safe_load((out / "config.yaml").read_text())["resume"] is False
