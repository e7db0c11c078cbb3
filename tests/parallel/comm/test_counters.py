"""Counters: additions of all ranks come one after the other, on every kind of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.comm.communicator import Communicator
from parallel.comm.local import LocalCommunicator
from tests.helpers.ranks import run_on_ranks

TIMES = 200


def sums(communicator: Communicator, _: Any) -> list[list[int]]:
    """What each addition gave: of two sets of counters, and of one of the first two ranks alone."""
    given = []
    for amount in (1, 3):
        counters = communicator.counters(2)
        given.append([counters.add(1, amount) for _ in range(TIMES)])
        communicator.barrier()
        assert counters.add(0, 0) == 0
        counters.close()
    if pair := communicator.subgroup([0, 1]):
        counters = pair.counters(1)
        given.append([counters.add(0, -1) for _ in range(TIMES)])
        counters.close()
    return given


@pytest.mark.parametrize(
    "launcher",
    ["threads", *(pytest.param(name, marks=pytest.mark.process) for name in ("forked", "torch", "mpi"))],
)
def test_every_sum_is_given_once(launcher: Any, tmp_path: Path) -> None:
    ranks = run_on_ranks(3, "tests.parallel.comm.test_counters:sums", tmp_path, launcher=launcher)
    first, second = (torch.tensor([rank[k] for rank in ranks]).flatten().sort().values for k in range(2))
    assert first.tolist() == list(range(1, 3 * TIMES + 1))
    assert second.tolist() == list(range(3, 9 * TIMES + 1, 3))
    of_pair = sorted(number for rank in ranks[:2] for number in rank[2])
    assert of_pair == list(range(-2 * TIMES, 0))
    assert len(ranks[2]) == 2


def test_one_rank_counts_alone() -> None:
    counters = LocalCommunicator().counters(1)
    assert [counters.add(0, amount) for amount in (2, -5, 0)] == [2, -3, -3]
