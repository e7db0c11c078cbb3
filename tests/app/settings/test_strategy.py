"""The settings of a strategy: what is filled in, and what does not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from app.settings.launcher import find_launch
from app.settings.strategy import Parallel, StrategySettings
from app.settings.strategy_errors import strategy_errors
from parallel.schedule.registry import SCHEDULES
from parallel.strategy import STALE, WHOLE

LAUNCHERS = {
    "torchrun": {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "mpich": {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    "slurm": {
        "PMIX_RANK": "1",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_TASKS_PER_NODE": "2(x2)",
    },
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_are_recognised(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_launch() is None
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    launch = find_launch()
    assert launch is not None
    assert (launch.rank, launch.world, launch.local_rank, launch.local_world) == (1, 4, 1, 2)
    assert launch.mpi == (launcher != "torchrun")
    assert StrategySettings(ranks=1).world == 4


def test_what_is_torchs_own_does_not_talk_over_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in LAUNCHERS["mpich"].items():
        monkeypatch.setenv(variable, value)
    (fault,) = strategy_errors(StrategySettings(parallel="fsdp"))
    assert "--parallel fsdp is torch's own and talks over torch.distributed, not MPI" in fault
    assert "start them with torchrun or --ranks, or use --parallel ddp" in fault


def test_a_slurm_batch_script_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert find_launch() is None


def test_every_schedule_can_be_asked_for() -> None:
    assert set(get_args(Parallel)) == {"auto", *WHOLE, "spatial", "subgraph", *SCHEDULES, *STALE}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ("single", 1, 1, 1)),
        ({"ranks": 3}, ("ddp", 1, 3, 3)),
        ({"parallel": "fsdp", "ranks": 3}, ("fsdp", 1, 3, 3)),
        ({"parallel": "ddp", "ranks": 3, "zero": 3}, ("fsdp", 1, 3, 3)),
        ({"parallel": "mp-basic", "ranks": 2}, ("mp-basic", 2, 1, 1)),
        ({"parallel": "gpipe", "ranks": 2}, ("gpipe", 2, 1, 4)),
        ({"parallel": "gpipe", "ranks": 4, "stages": 2}, ("gpipe", 2, 2, 8)),
        ({"parallel": "1f1b", "ranks": 3, "batch": 5}, ("1f1b", 3, 1, 5)),
        ({"parallel": "mast", "ranks": 8, "stages": 4}, ("mast", 4, 2, 4)),
        ({"parallel": "bidirectional", "ranks": 2, "microbatches": 3}, ("bidirectional", 2, 1, 3)),
    ],
)
def test_what_is_not_asked_for_is_filled_in(asked: dict[str, Any], expected: tuple[str, int, int, int]) -> None:
    settings = StrategySettings(**asked)
    assert strategy_errors(settings) == []
    assert (settings.name, settings.depth, settings.groups, settings.m) == expected


@pytest.mark.parametrize(
    ("asked", "messages"),
    [
        ({"parallel": "gpipe"}, ["--parallel gpipe splits the model over 2 ranks or more; got --ranks 1"]),
        ({"parallel": "fsdp"}, ["--parallel fsdp keeps parts of the model on 2 ranks or more; got --ranks 1"]),
        (
            {"parallel": "fsdp", "ranks": 2, "cuts": "fc"},
            ["--cuts is about a model split into stages; --parallel fsdp"],
        ),
        (
            {"parallel": "fsdp", "ranks": 2, "recompute": "optimal", "memory": "1GiB"},
            ["--recompute optimal is not for --parallel fsdp, whose parameters come and go: use ddp"],
        ),
        ({"parallel": "gpipe", "ranks": 3, "stages": 2}, ["3 ranks cannot be divided into groups of --stages 2"]),
        ({"parallel": "gpipe", "ranks": 2, "stages": 3}, ["--stages must be 2 to the number of ranks, 2; got 3"]),
        ({"parallel": "gpipe", "ranks": 4, "stages": 2, "microbatches": 1}, ["each of 2 groups of 2 ranks needs a"]),
        ({"parallel": "mast", "ranks": 2, "microbatches": 3}, ["mast computes 2 microbatches per group, 2 in all"]),
        (
            {"parallel": "1f1b", "ranks": 2, "chunks": 2},
            ["--chunks is for --parallel interleaved; got"],
        ),
        ({"parallel": "interleaved", "ranks": 2, "chunks": 1}, ["--chunks must be at least 2; got 1"]),
        (
            {"parallel": "1f1b", "ranks": 2, "zero": 3, "schedule": Path("nowhere.csv")},
            [
                "--zero 3 divides a model that each rank computes whole: got --parallel 1f1b, use ddp",
                "nowhere.csv is not a file",
            ],
        ),
        (
            {"parallel": "1f1b", "ranks": 2, "zero": 1},
            ["--parallel 1f1b on 2 ranks with --zero 1: leave it out: each stage is on one rank alone"],
        ),
        (
            {"parallel": "ddp", "ranks": 2, "zero": 2, "gradient_buckets": "0", "offload_state": "parameters"},
            [
                "--parallel ddp on 2 ranks with --zero 2: use --offload-state=optimizer: parameters on the",
                "use --zero 1: with --gradient-buckets=0 gradients stay whole until all is computed",
            ],
        ),
        (
            {"parallel": "fsdp", "ranks": 2, "zero": 1},
            ["--parallel fsdp is --zero 3; got --zero 1: use --parallel ddp"],
        ),
        (
            {"parallel": "async", "ranks": 2, "zero": 1},
            ["--parallel async on 2 ranks with --zero 1: leave it out: a parameter server has the only optimizer"],
        ),
        (
            {"parallel": "ddp", "ranks": 2, "stages": 2, "cuts": "fc"},
            [
                "--stages is about a model split into stages; --parallel ddp does not split it",
                "--cuts is about",
            ],
        ),
        ({"ranks": 4, "stages": 3}, ["--stages must be 2 or more and divide the number of ranks, 4; got 3"]),
        ({"batch": 4, "microbatches": 5}, ["--microbatches must be 1 to --batch 4; got 5"]),
        ({"memory": "16G"}, ["--memory takes a size such as 512MiB or 16GiB; got '16G'"]),
        (
            {"ranks": 2, "stages": 2, "cuts": "fc", "recompute": "stage", "zero": 1, "compile": True},
            [
                "--cuts is about a model split into stages; --parallel auto chooses this itself",
                "--recompute stage is about",
                "--compile is about",
                "--parallel auto chooses --zero itself: leave --zero 1 out, or name the strategy",
            ],
        ),
        ({"stream": "0"}, ["--stream takes none, auto or the side of boxes in px, such as 512; got '0'"]),
        (
            {"stream": "512", "recompute": "block", "ranks": 2},
            [
                "--stream 512 computes a tile again box by box, and goes without --recompute block: leave that out",
                "--stream 512 is not for --parallel auto, which does not plan boxes yet: name another strategy",
            ],
        ),
        (
            {"stream": "auto", "parallel": "1f1b", "ranks": 2, "memory": "1GiB"},
            ["--stream auto is planned for --parallel single, ddp and spatial; got --parallel 1f1b: name the"],
        ),
        (
            {"stream": "512", "parallel": "zero-bubble", "ranks": 2, "norm_statistics": "deferred"},
            [
                "--stream 512 computes a tile again box by box, and goes without --norm-statistics deferred",
                "--stream 512 is not for --parallel zero-bubble, which splits a backward pass",
            ],
        ),
        (
            {"parallel": "pipedream", "ranks": 4, "stages": 2},
            ["--parallel pipedream updates the weights after every microbatch, which was not tried with data-parallel"],
        ),
        (
            {"parallel": "pipedream", "ranks": 2, "stream": "512", "norm_statistics": "per-microbatch"},
            ["--parallel pipedream updates the weights after every microbatch, which was not tried with --stream 512"],
        ),
        (
            {"parallel": "pipedream", "ranks": 4, "grid": "2x1"},
            ["--parallel pipedream updates the weights after every microbatch, which was not tried with --grid"],
        ),
        (
            {
                "parallel": "pipedream",
                "ranks": 2,
                "offload": "overlap",
                "offload_state": "optimizer",
                "norm_statistics": "deferred",
                "compile": True,
            },
            [
                f"--parallel pipedream updates the weights after every microbatch, which was not tried with {what}"
                for what in ("--compile", "--norm-stat", "--offload overlap", "--offload")
            ],
        ),
        (
            {"recompute": "block", "recompute_runs": "conv1:relu"},
            ["--recompute-runs goes with --recompute optimal; got --recompute block"],
        ),
        (
            {"recompute": "optimal", "offload": "overlap", "memory": "1GiB"},
            ["--recompute optimal is planned for what stays on the device: use --recompute block"],
        ),
        (
            {"recompute": "optimal", "recompute_runs": "conv1:relu,layer1"},
            ["--recompute-runs takes pairs of layers such as layer1_0_conv1:add_2; got 'conv1:relu,layer1'"],
        ),
        (
            {"offload": "overlap", "offload_ahead": "some", "offload_host": "-1GiB"},
            [
                "--offload-ahead takes a size such as 512MiB or 16GiB; got 'some'",
                "--offload-host takes a size such as 512MiB or 16GiB; got '-1GiB'",
            ],
        ),
        (
            {"offload_ahead": "1MiB", "offload_host": "1GiB"},
            [
                "--offload-ahead is about --offload overlap; got --offload none",
                "--offload-host is about --offload overlap; got --offload none",
            ],
        ),
        (
            {
                "parallel": "fsdp",
                "ranks": 2,
                "recompute": "block",
                "offload": "overlap",
                "offload_state": "parameters",
            },
            [
                "--offload overlap is not for --parallel fsdp",
                "--offload-state=parameters is not for --parallel fsdp",
            ],
        ),
    ],
)
def test_every_fault_is_named(asked: dict[str, Any], messages: list[str]) -> None:
    found = strategy_errors(StrategySettings(**asked))
    assert len(found) == len(messages)
    for message, fault in zip(messages, found, strict=True):
        assert message in fault


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"shares": "3,1", "microbatches": 6}, "gives 4 microbatches, and --microbatches is 6"),
        ({"shares": "2,1,1"}, "is of 3 shares, and there are 2 ranks"),
        ({"shares": "4,0"}, "every group computes a microbatch at least"),
        ({"shares": "nowhere.csv"}, "there is no file nowhere.csv"),
        (
            {"shares": "tickets"},
            "--shares takes equal, auto, counts such as 3,1, or a CSV file; there is no file tickets",
        ),
        ({"shares": "3,1", "parallel": "fsdp"}, "takes no --shares 3,1: use ddp"),
        ({"shares": "3,1", "parallel": "auto"}, "of a strategy that nothing is planned for"),
        ({"shares": "1,3", "parallel": "mast", "ranks": 4, "stages": 2}, "2 microbatches per group; got --shares 1,3"),
        ({"shares": "auto", "parallel": "mast", "ranks": 4, "stages": 2}, "2 microbatches per group, whatever its"),
        ({"shares": "auto", "parallel": "1f1b"}, "is between groups, and --parallel 1f1b has one of 2 ranks"),
        ({"shares": "auto", "parallel": "1f1b", "ranks": 4, "stages": 2, "stream": "64"}, "leave --shares auto out"),
        ({"shares": "auto", "parallel": "gpipe", "ranks": 4, "stages": 2, "memory": "1GiB"}, "exceeds --memory with"),
    ],
)
def test_shares_that_do_not_fit(given: dict[str, Any], said: str) -> None:
    asked = StrategySettings(**{"parallel": "ddp", "ranks": 2, **given})
    assert [fault for fault in strategy_errors(asked) if said in fault], strategy_errors(asked)
    assert not strategy_errors(StrategySettings(parallel="ddp", ranks=2, shares="3,1"))


@pytest.mark.parametrize(
    ("device", "given", "ahead"), [("cuda", None, None), ("cpu", None, 0), ("cuda", "3MiB", 3 << 20)]
)
def test_the_window_of_offloading_follows_the_largest_activation_on_a_gpu(
    device: str, given: str | None, ahead: int | None
) -> None:
    settings = StrategySettings("single", offload="overlap", offload_ahead=given)
    assert settings.to_strategy(device).policy.ahead == ahead
