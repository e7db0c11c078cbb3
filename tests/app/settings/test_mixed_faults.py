"""``--device mixed`` is refused by name where it would not be the plain step, or cannot be had."""

from __future__ import annotations

from typing import Any

import pytest

from app.settings.strategy import StrategySettings
from app.settings.strategy_errors import strategy_errors
from app.verify import VerifyCommand

MIXED = {"parallel": "ddp", "device": "mixed", "cpu_ranks": 1, "ranks": 3}


@pytest.mark.parametrize("changed", [{}, {"shares": "3,3,1"}, {"precision": "fp32"}])
def test_what_is_exact_is_taken(changed: dict[str, Any]) -> None:
    settings = StrategySettings(**{**MIXED, **changed})
    assert strategy_errors(settings) == []
    assert settings.computed_precision == "fp32"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cpu_ranks": 0}, "--cpu-ranks is 1 to 2 of the 3 ranks of a machine; got 0"),
        ({"cpu_ranks": 3}, "--cpu-ranks is 1 to 2 of the 3 ranks of a machine; got 3"),
        ({"cpu_ranks": -1}, "--cpu-ranks is 1 to 2 of the 3 ranks of a machine; got -1"),
        ({"ranks": 1}, "--device mixed needs a rank on the CPU and one on a GPU; got 1 rank: use --ranks 2 or more"),
        ({"parallel": "fsdp"}, "--device mixed is for --parallel ddp, whose ranks each compute the whole model; got"),
        ({"parallel": "auto"}, "--device mixed is for --parallel ddp, whose ranks each compute the whole model; got"),
        (
            {"parallel": "gpipe", "stages": 3},
            "--device mixed is for --parallel ddp, whose ranks each compute the whole",
        ),
        ({"recompute": "optimal"}, "--device mixed is not planned for: name what is computed again"),
        ({"precision": "bf16"}, "--precision bf16 rounds differently on a CPU and on a GPU"),
        ({"precision": "tf32"}, "--precision tf32 rounds differently on a CPU and on a GPU"),
        ({"offload_state": "optimizer"}, "--offload-state=optimizer is for ranks that are all on a GPU"),
        ({"device": "cuda"}, "--cpu-ranks is for --device mixed; got 1 with --device cuda: leave it out"),
        (
            {"device": "auto", "cpu_ranks": 0, "mixed_sums": "host"},
            "--mixed-sums is for --device mixed; got host with --device auto: leave it out",
        ),
    ],
)
def test_what_is_not_is_refused(changed: dict[str, Any], message: str) -> None:
    (fault,) = strategy_errors(StrategySettings(**{**MIXED, **changed}))
    assert message in fault


def test_ranks_of_a_machine_count_and_not_those_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in numbers.items():
        monkeypatch.setenv(name, value)
    assert strategy_errors(StrategySettings(**MIXED)) == []
    (fault,) = strategy_errors(StrategySettings(**{**MIXED, "cpu_ranks": 2}))
    assert "--cpu-ranks is 1 to 1 of the 2 ranks of a machine; got 2" in fault


def test_mpi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}.items():
        monkeypatch.setenv(name, value)
    (fault,) = strategy_errors(StrategySettings(**MIXED))
    assert "--device mixed talks over torch.distributed, and these ranks were started by an MPI launcher" in fault


def test_a_verification_is_of_processes() -> None:
    command = VerifyCommand(strategy=StrategySettings(**MIXED))
    assert command.talks_over == "gloo"
    assert command.validate() == []
    (fault,) = VerifyCommand(strategy=StrategySettings(**MIXED), communicator="threads").validate()
    assert "--device mixed is of processes: leave --communicator threads out, or use gloo" in fault
