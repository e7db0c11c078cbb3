"""Gradient buckets and device prefetch: what they take, where they go, and that they change no number."""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from app.settings.optimization import OptimizerSettings
from app.settings.run import DataSettings, RunConfig, StreamSettings
from app.settings.strategy import StrategySettings
from app.settings.strategy_errors import strategy_errors
from app.training.engines import build_engine, build_optimizer
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.engine import Engine
from tests.app.conftest import QUICK, Train
from tests.helpers.small_nets import drawn_once

MIB = 1 << 20


@pytest.mark.parametrize(
    ("asked", "size"), [(None, None), ("0", 0), ("4MiB", 4 * MIB), ("1.5KiB", 1536), ("none", None), ("", None)]
)
def test_sizes(asked: str | None, size: int | None) -> None:
    settings = StrategySettings(parallel="ddp", ranks=2, gradient_buckets=asked)
    assert settings.bucket_bytes == size
    assert bool(strategy_errors(settings)) == (asked in ("none", ""))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"ranks": 2, "gradient_buckets": "25 MB"},
            "--gradient-buckets takes a size such as 4MiB, or 0; got '25 MB'",
        ),
        ({"parallel": "single"}, "--parallel single on 1 rank sums none so: leave it out"),
        ({"parallel": "gpipe", "ranks": 2}, "--parallel gpipe on 2 ranks sums none so: leave it out"),
        ({"parallel": "fsdp", "ranks": 2}, "sums those of a unit at once: leave it out"),
    ],
)
def test_where_no_gradients_are_summed_their_buckets_have_no_size(asked: dict[str, Any], message: str) -> None:
    (fault,) = strategy_errors(StrategySettings(**{"gradient_buckets": "4MiB", **asked}))
    assert message in fault


@pytest.mark.parametrize(
    "asked",
    [
        {"parallel": "auto"},
        {"parallel": "auto", "ranks": 2},
        {"parallel": "ddp", "ranks": 2},
        {"parallel": "master", "ranks": 2},
        {"parallel": "gpipe", "ranks": 4, "stages": 2},
    ],
)
def test_where_some_are_they_have(asked: dict[str, Any]) -> None:
    assert strategy_errors(StrategySettings(**asked, gradient_buckets="4MiB")) == []


def test_microbatches_ahead_are_counted_from_none() -> None:
    (fault,) = RunConfig(DataSettings(Path("slides")), stream=StreamSettings(device_prefetch=-1)).validate()
    assert fault == "--device-prefetch must be at least 0 microbatches; got -1"


@pytest.mark.parametrize(("asked", "ddp", "master"), [(None, 1, 1), ("0", 1, 1), ("64KiB", 4, 2)])
def test_the_size_reaches_the_engine(asked: str | None, ddp: int, master: int) -> None:
    """Three layers of 64 KiB behind a small one; the second stage has the last two."""

    def made(communicator: Communicator, parallel: Any) -> Engine:
        model = drawn_once(
            ("gradient buckets",),
            3,
            lambda: torch.nn.Sequential(
                torch.nn.Conv2d(3, 128, 1, bias=False),
                *(torch.nn.Conv2d(128, 128, 1, bias=False) for _ in range(3)),
                torch.nn.AdaptiveAvgPool2d(1),
                torch.nn.Flatten(),
            ),
        )
        return build_engine(
            StrategySettings(
                parallel=parallel, ranks=2, batch=4, gradient_buckets=asked, cuts="2" * (parallel != "ddp")
            ).to_strategy("cpu"),
            model,
            F.cross_entropy,
            functools.partial(build_optimizer, OptimizerSettings()),
            communicator,
            batch=4,
            tile=8,
            seed=0,
            device=torch.device("cpu"),
        )

    for whole in run_on_threads(2, made, "ddp"):
        assert isinstance(whole, Engine)
        assert len(whole._work.reducers[0].buckets) == ddp
    for staged in run_on_threads(2, made, "master"):
        assert isinstance(staged, Engine)
        assert len(staged._work.reducers[1].buckets) == master
        (_, actions) = (staged.schedule[rank] for rank in range(2))
        sums = [str(action).endswith("REDUCE") for action in actions]
        assert sums[-2:] == [asked == "0", True]


@pytest.mark.process
def test_a_run_with_both_gives_the_same_losses(
    classify_slides: Path, train_ranks: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--slides", classify_slides, *QUICK, "--model", "tests.helpers.tiny_models:telling", "--steps", "3")
    arguments += ("--parallel", "ddp", "--ranks", "2")
    losses: list[list[str]] = []
    for name, more in (
        ("plain", ()),
        ("knobs", ("--gradient-buckets=0", "--device-prefetch=1")),
    ):
        told = tmp_path / f"told-{name}"
        told.mkdir()
        monkeypatch.setenv("TOLD", str(told))
        done = train_ranks(*arguments, *more, "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
        with (tmp_path / name / "metrics.csv").open() as file:
            losses.append([row["loss"] for row in csv.DictReader(file)])
        threads = [file.read_text() for file in told.iterdir()]
        assert len(threads) == 2
        assert all(("microbatch-maker" in names) == bool(more) for names in threads)
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
