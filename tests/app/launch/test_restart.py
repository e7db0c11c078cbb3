"""A run that is started again goes on by itself, from its last checkpoint; one that is started anew does not."""

import os
import platform
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import yaml

from app import train as train_module
from app.settings.cli import RunError
from app.settings.launcher import Attempts, Launcher, describe_restart, find_launcher, previous_attempts
from app.settings.run import DataSettings, RunConfig
from app.settings.strategy import StrategySettings
from app.training.run_folder import RunFolder
from tests.app.conftest import QUICK, ROOT, begin_train, losses_of, rank_process, rows_of, same_weights, summary_of
from tests.helpers.forked import run_ranks

NO_SIDES = SimpleNamespace(sides=None)


@pytest.mark.parametrize(
    ("record", "starter", "before"),
    [
        (Attempts(0, (), None), Launcher(agent="node 7"), 0),
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
def test_attempts_are_those_of_the_same_start(record, starter, before):
    assert previous_attempts(record, starter) == before


def agent_of(pid):
    """With the start of the process, as names and numbers repeat in containers."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{platform.node()} {pid} {ticks}"


def test_starters_are_found():
    agent = agent_of(os.getppid())
    assert find_launcher({}) == Launcher()
    assert find_launcher({"TORCHELASTIC_RUN_ID": "none"}) == Launcher(agent)
    assert find_launcher({"MEGATILE_RANK": "1"}) == Launcher(agent)
    # Each agent of several counts for itself: the number says nothing about this rank.
    assert find_launcher({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "3"}) == Launcher(agent)
    assert find_launcher({}, server=os.getpid()) == Launcher(agent_of(os.getpid()))
    assert find_launcher({"SLURM_JOB_ID": "33"}) == Launcher(job="33")
    array = {"SLURM_JOB_ID": "35", "SLURM_ARRAY_JOB_ID": "33", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "1"}
    assert find_launcher(array) == Launcher(job="33_2", requeued=True)


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_CPUS_ON_NODE": "1",
    "SLURM_CPUS_PER_TASK": "1",
}
SAVE = 'if [ -n "$SAVES" ]; then sleep 0.05; mkdir -p "$RUN/checkpoints"; touch "$RUN/checkpoints/last.pt"; fi'


@pytest.fixture
def run_killed(tmp_path):
    """Runs a batch script whose ranks are killed, with an srun and an scontrol that print how they are called."""
    for name, then in (("srun", f"{SAVE}\nexit 137"), ("scontrol", "")):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n{then}\n')
        (tmp_path / name).chmod(0o755)

    def run(script, restarts=0, saves=False):
        own = {"RUN": str(tmp_path / "run"), "SLURM_RESTART_COUNT": str(restarts), "SAVES": "1" * saves}
        environment = SLURM | own | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = ["bash", ROOT / "configs" / "slurm" / script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (137, "")
        return done.stdout

    return run


@pytest.mark.process
@pytest.mark.parametrize("script", ["hybrid.sbatch", "preemptible.sbatch"])
def test_ranks_that_srun_starts_use_no_mpi(script, run_killed):
    """Where MPI is the default of the cluster, they tried to."""
    assert "srun --mpi=none " in run_killed(script)


@pytest.mark.process
def test_a_killed_job_is_requeued_three_times_without_a_new_checkpoint(run_killed):
    """Requeues after which a checkpoint was written were counted, too."""
    saves = [False, False, True, False, False, False, False]
    printed = [run_killed("preemptible.sbatch", restarts, each) for restarts, each in enumerate(saves)]
    assert ["scontrol requeue 7" in text for text in printed] == [True] * 6 + [False]
    assert "scontrol requeue 7" in run_killed("preemptible.sbatch"), "a new job begins anew"


def test_a_restart_is_told_with_the_work_that_is_lost():
    assert describe_restart(1, 40, 0) == "restarted (attempt 2): continuing from step 40"
    assert describe_restart(2, 40, 7).endswith(
        "(attempt 3): continuing from step 40; 7 more were done and must be done again"
    )
    assert "starting anew; 1 more was done" in describe_restart(1, 0, 1)
    assert describe_restart(1, 40, 0, (4, 3)).startswith("restarted (attempt 2 on 3 ranks in place of 4): continuing")
    assert describe_restart(2, 40, 0, (4, 3, 3)).startswith("restarted (attempt 3): continuing")


def test_a_further_attempt_leaves_settings_and_earlier_faults_as_they_are(tmp_path):
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


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"min_ranks": 3, "max_restarts": 1}, None),
        ({"max_restarts": -1}, "--max-restarts"),
        ({"min_ranks": 3}, "min-ranks"),
        ({"min_ranks": 5, "max_restarts": 1}, "min-ranks"),
        ({"min_ranks": 0, "max_restarts": 1}, "min-ranks"),
    ],
)
def test_the_number_of_restarts_and_of_ranks_left_is_checked(settings, fault):
    strategy = StrategySettings(parallel="ddp", ranks=4, batch=12)
    found = RunConfig(DataSettings(Path("slides")), strategy=strategy, **settings).validate()
    assert any(fault in each for each in found) if fault else found == []


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
def test_a_run_that_lost_a_rank_goes_on_with_as_many_as_can(strategy, least, left, tmp_path):
    config = RunConfig(DataSettings(Path("slides")), strategy=strategy, out=tmp_path, max_restarts=1, min_ranks=least)
    folder = RunFolder(tmp_path)
    dataset = SimpleNamespace(classes=("a", "b"), task="classify", tiles=NO_SIDES, rows=lambda split: range(8))
    folder.open(replace(config, strategy=replace(strategy, microbatches=strategy.m)), again=False)
    assert train_module._fewer(config, folder, dataset, 4) == left


@pytest.mark.parametrize(("code", "error"), [(2, ValueError), (1, RunError), (137, RunError)])
def test_wrong_usage_that_only_a_rank_finds_is_wrong_usage(code, error, tmp_path, monkeypatch):
    """``app.bench`` wrote "failed" for it, not "cannot"."""
    server = mock.MagicMock()
    started = server.return_value.__enter__.return_value
    started.pid, started.launch.return_value = os.getpid(), code
    monkeypatch.setattr(train_module, "RankServer", server)
    monkeypatch.setattr(train_module, "_prepare", lambda *_: None)
    config = RunConfig(DataSettings(tmp_path), strategy=StrategySettings(parallel="ddp", ranks=2), out=tmp_path)
    with pytest.raises(error, match=f"a rank ended with exit code {code}; its message stands above"):
        train_module._start_ranks(config, RunFolder(tmp_path), [])


def test_an_attempt_without_a_checkpoint_keeps_the_microbatches(tmp_path):
    ddp = StrategySettings(parallel="ddp", ranks=4, batch=12)
    config = RunConfig(DataSettings(Path("slides")), strategy=ddp, out=tmp_path)
    folder = RunFolder(tmp_path)
    folder.open(train_module._with_microbatches(config, None))
    fewer = replace(config, strategy=replace(ddp, ranks=3))
    for before, microbatches in ((1, 4), (0, 3)):
        begun = train_module._begun(fewer, folder, before)
        assert train_module._with_microbatches(fewer, begun).strategy.microbatches == microbatches


@pytest.mark.process
def test_the_fault_of_an_earlier_start_silences_no_rank(tmp_path):
    """The first start computed a batch in one microbatch, and two ranks of ddp cannot continue that."""
    folder, ddp = RunFolder(tmp_path / "run"), StrategySettings("ddp", microbatches=1)
    folder.open(RunConfig(DataSettings(tmp_path), strategy=ddp, out=folder.path))
    folder.last.parent.mkdir()
    folder.last.write_bytes(b"checkpoint")
    folder.fault_of(1).write_text("rank 0 was killed")
    words = ("--slides", tmp_path, "--out", folder.path, "--parallel", "ddp", "--device", "cpu", "--resume")
    codes, printed = run_ranks(2, "app.train", [str(word) for word in words], tmp_path)
    assert 1 in codes, printed  # of a rank that does not wait for the others at its end
    assert printed.count("add --microbatches 2 to go on") == 1
    assert "add --microbatches 2" in folder.fault_of(1).read_text()


STEPS, EVERY = 24, 4
DRILL = (*QUICK, "--parallel", "master", "--device", "cpu", "--checkpoint-every", str(EVERY), "--validation", "0")
DRILL += ("--steps", str(STEPS))


@pytest.mark.process
def test_killed_rank_costs_steps_but_changes_nothing(classify_slides, train_ranks, tmp_path):
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "run"
    command = ("--slides", classify_slides, *DRILL, "--ranks", "2", "--out")
    train_ranks(*command, undisturbed)
    process = begin_train(*command, out, "--max-restarts", "1")
    while len(rows_of(out / "metrics.csv")) < EVERY + 2:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    rank_process(process, 1).send_signal(signal.SIGKILL)
    text, _ = process.communicate(timeout=140)
    assert process.returncode == 0, text
    killed = int(re.findall(r"^rank 1 was killed \(signal 9\) at step (\d+)", (out / "fault.txt").read_text())[0])
    (kept, again), *_ = re.findall(r"restarted \(attempt 2\): continuing from step (\d+)(?:; (\d+) more)?", text)
    # The other rank ends the step where the killed one had already done its share of it.
    assert int(kept) % EVERY == 0
    assert int(kept) + int(again or 0) in (killed - 1, killed)
    assert f"continuing from step {kept}" in (out / "run.log").read_text()
    summary = summary_of(out)
    assert (summary["status"], summary["restarts"], summary["images"]) == ("completed", 1, 4 * STEPS)
    assert losses_of(out, "step") == [*range(1, STEPS + 1)]
    assert losses_of(out) == losses_of(undisturbed)
    assert same_weights(out, undisturbed)
    assert yaml.safe_load((out / "config.yaml").read_text())["resume"] is False
