"""Counters: additions of all ranks come one after the other, on every kind of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from parallel.comm.communicator import CommunicationError, Communicator
from parallel.comm.local import LocalCommunicator
from parallel.comm.torch_counters import torch_counters
from parallel.comm.torch_store import PRIVATE_STORE
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


def test_a_store_at_an_address_counts_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRIVATE_STORE, raising=False)
    store = HashStore()
    one, same, other = (torch_counters(store, name, 2, "rank 0 of 2", True) for name in ("a", "a", "b"))
    assert [one.add(1, 2), same.add(1, 3), other.add(1, -1), one.add(0, 0)] == [2, 5, -1, 0]


def test_a_store_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRIVATE_STORE, raising=False)
    store = TCPStore("127.0.0.1", 0, is_master=True)
    client = TCPStore("127.0.0.1", store.port, is_master=False)
    counters = torch_counters(client, "a", 1, "rank 1 of 2", False)
    assert counters.add(0, 1) == 1
    del store
    with pytest.raises(CommunicationError, match=r"rank 1 of 2: drawing a microbatch failed: .*rank 0, which keeps"):
        counters.add(0, 1)


def test_one_rank_counts_alone() -> None:
    counters = LocalCommunicator().counters(1)
    assert [counters.add(0, amount) for amount in (2, -5, 0)] == [2, -3, -3]
