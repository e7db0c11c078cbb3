"""The contract of communicators, on every implementation and number of ranks; what they say when a rank is silent."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from parallel.comm.communicator import CommunicationError
from parallel.comm.local import LocalCommunicator
from tests.contracts.communicator_contract import check_communicator
from tests.helpers.ranks import run_on_ranks

CONTRACT = "tests.contracts.communicator_contract:check_communicator"
SILENCE = "tests.contracts.communicator_contract:check_silence"
Launcher = Literal["forked", "mpi", "threads"]


def test_local_communicator_keeps_the_contract() -> None:
    assert check_communicator(LocalCommunicator())["world"] == 1


@pytest.mark.parametrize(
    ("launcher", "world"),
    [
        *(("threads", n) for n in (1, 2, 3)),
        pytest.param("threads", 4, marks=pytest.mark.long),
        pytest.param("forked", 2, marks=pytest.mark.process),
        pytest.param("forked", 3, marks=pytest.mark.process),
        *(pytest.param("mpi", n, marks=pytest.mark.process) for n in (1, 2, 3, 4)),
    ],
)
def test_communicator_keeps_the_contract(launcher: Launcher, world: int, tmp_path: Path) -> None:
    results = run_on_ranks(world, CONTRACT, tmp_path, launcher=launcher)
    assert [(result["rank"], result["world"]) for result in results] == [(rank, world) for rank in range(world)]
    assert all(result["bits"] == results[0]["bits"] for result in results)


@pytest.mark.parametrize(
    "launcher", ["threads", *(pytest.param(name, marks=pytest.mark.process) for name in ("forked", "mpi"))]
)
def test_silent_rank_is_named_after_the_time_given(launcher: Launcher, tmp_path: Path) -> None:
    said = r"rank 0 of 2: \w+ of \(2,\) float32 from rank 1, tag 3 failed: "
    # A thread's own error comes out; processes have printed it.
    with pytest.raises((AssertionError, CommunicationError), match=said):
        run_on_ranks(2, SILENCE, tmp_path, 4.0, launcher=launcher, patience_s=2)
