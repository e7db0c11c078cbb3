"""``--parallel async`` as a user starts it: log, report, kill -9 and resume, replay, and what is refused."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from app.planning.auto import names_for
from app.planning.command import PlanCommand
from app.settings.strategy import StrategySettings
from app.settings.strategy_errors import strategy_errors
from app.training.metrics_log import PushLog, staleness_in
from parallel.schedule.pushes import Push, read_pushes
from parallel.strategy import DELAYED
from tests.app.conftest import QUICK, ROOT, Train, rank_process, summary_of, train_command, train_environment
from tests.app.test_train import equal, model_of, wait_for

HEAD = ",".join(Push._fields)


@pytest.mark.process
def test_killed_and_resumed_and_replayed_from_its_log(
    classify_slides: Path, train: Train, train_ranks: Train, tmp_path: Path
) -> None:
    """No update is lost or made twice: the log of a run that was killed replays to its last bit."""
    out, again = tmp_path / "run", tmp_path / "again"
    arguments = ("--slides", classify_slides, *QUICK, "--microbatches", "4", "--parallel", "async", "--steps", "40")
    run = (*arguments, "--out", out, "--ranks", "2", "--checkpoint-every", "3", "--shares", "3,1")
    process = subprocess.Popen(
        train_command(*run), cwd=ROOT, env=train_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_for(out / "checkpoints" / "last.pt", process)
    rank_process(process, 1).kill()
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 1, output.decode()
    assert b"a rank ended with exit code 137" in output
    assert torch.load(out / "checkpoints" / "last.pt", weights_only=True)["step"] < 40
    done = train_ranks(*run, "--resume")
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"async: {DELAYED}" in done.stdout
    pushes = read_pushes((out / "pushes.csv").read_text())
    assert len(pushes) == 40 * 4
    assert {push.worker for push in pushes} == {0, 1}
    summary = summary_of(out)
    assert (summary["images"], summary["gradients"], sum(summary["staleness"].values())) == (160, DELAYED, 160)
    page = (out / "report.html").read_text()
    assert DELAYED in page
    assert "Updates by staleness" in page

    replayed = train(*arguments, "--out", again, "--ranks", "1", f"--replay={out / 'pushes.csv'}")
    assert replayed.returncode == 0, replayed.stderr
    assert (again / "pushes.csv").read_text() == (out / "pushes.csv").read_text()
    assert equal(model_of(out), model_of(again))


def test_one_rank_is_the_plain_run_bit_for_bit(classify_slides: Path, train: Train, tmp_path: Path) -> None:
    common = ("--slides", classify_slides, *QUICK, "--microbatches", "1", "--steps", "3")
    for name, more in (("async", ("--ranks", "1")), ("single", ())):
        done = train(*common, "--out", tmp_path / name, "--parallel", name, *more)
        assert done.returncode == 0, done.stderr
    assert equal(model_of(tmp_path / "async"), model_of(tmp_path / "single"))
    again = train(*common, "--out", tmp_path / "async", "--parallel", "single", "--resume", "--steps", "4", "--extend")
    assert f"gradients of the step from step 4 on, {DELAYED} before" in again.stderr


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        ({"batch": 6, "microbatches": 4}, "--batch 6 is no multiple of --microbatches 4"),
        ({"staleness": -1}, "--staleness is at least 0 minibatches; got -1"),
        ({"device": "cuda"}, "--parallel async computes on CPUs; got --device cuda"),
        ({"recompute": "optimal", "memory": "1GiB"}, "--parallel async is not planned for"),
        ({"offload_state": "optimizer"}, "--offload-state=optimizer is not for --parallel async"),
        ({"norm_statistics": "deferred"}, "--norm-statistics deferred is about the batch of one update"),
        ({"compile": True}, "--compile is about a model split into stages"),
        ({"parallel": "ddp", "staleness": 1}, "--staleness is for --parallel async; got --parallel ddp"),
        ({"parallel": "ddp", "push_rate": "staleness"}, "--push-rate is for --parallel async"),
        ({"parallel": "ddp", "replay": Path("x.csv")}, "--replay is for --parallel async"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(asked: dict[str, Any], fault: str) -> None:
    settings: dict[str, Any] = {"parallel": "async", "ranks": 2, **asked}
    (found,) = strategy_errors(StrategySettings(**settings))
    assert fault in found


def test_no_plan_takes_it() -> None:
    assert not {"async", "pipedream"} & {*names_for(StrategySettings(ranks=2)), *PlanCommand().names}
    (fault,) = PlanCommand(parallel="async", ranks=2).validate()
    assert fault == "--parallel async has no schedule that could be planned: plan ddp in its place"


@pytest.mark.parametrize(("ranks", "batch", "m"), [(1, 8, 4), (2, 8, 8), (2, 24, 8), (3, 10, 10), (2, 7, 7)])
def test_minibatches_that_nobody_named_are_of_one_size(ranks: int, batch: int, m: int) -> None:
    settings = StrategySettings(parallel="async", ranks=ranks, batch=batch)
    assert settings.m == m
    assert strategy_errors(settings) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "log.csv is not a file"),
        ("step,loss\n0,1\n", f"its first line is {HEAD}; got step,loss"),
        (f"{HEAD}\n0,0,0,0,0,0\n", "a line is 7 numbers"),
        (f"{HEAD}\n0,0,0,0,0,0,x\n", "a line is 7 numbers"),
        (f"{HEAD}\n0,1,0,0,0,0,0.1\n", "pushes are logged in order, from step 0 on"),
        (f"{HEAD}\n0,0,0,0,1,0,0.1\n", "after what they pulled; got 0,0,0,0,1,0,0.1"),
        (f"{HEAD}\n", "it has no pushes"),
        (f"{HEAD}\n0,0,0,0,0,0,0.1\n", "has 1 updates a step, and --microbatches is 2: add --microbatches 1"),
    ],
)
def test_a_log_that_cannot_be_replayed_is_refused(text: str | None, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    if text is not None:
        path.write_text(text)
    (found,) = strategy_errors(StrategySettings(parallel="async", microbatches=2, replay=path))
    assert fault in found
    found_ranks = strategy_errors(StrategySettings(parallel="async", ranks=2, microbatches=2, replay=path))[0]
    assert "--replay repeats all updates on one rank; got --ranks 2" in found_ranks


def test_the_log_is_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "pushes.csv"
    assert staleness_in(path) is None
    pushes = [Push(step, push, 0, push, 0, push, 0.1 / 3) for step in range(3) for push in range(2)]
    PushLog(path, 0).add(pushes)
    assert read_pushes(path.read_text()) == tuple(pushes)
    PushLog(path, 2).add(pushes[4:])  # two steps were done
    assert read_pushes(path.read_text()) == tuple(pushes)
    assert staleness_in(path) == {0: 3, 1: 3}
    with path.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 6
