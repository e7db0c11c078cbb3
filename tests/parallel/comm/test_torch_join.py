"""Ranks find each other and nobody else, whatever earlier attempts have left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from parallel.comm.communicator import CommunicationError, ToldElsewhere
from parallel.comm.torch_join import join_attempt

WORLD = 3


def client(port: int, *, serves: bool = False) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=20))


@pytest.fixture
def agent() -> TCPStore:
    """The store of a launcher, which outlives its ranks."""
    return client(0, serves=True)


def attempt(agent: TCPStore, message: str, ranks: tuple[int, ...] = (0, 1, 2), timeout_s: float = 20) -> set[str]:
    """What each of ``ranks`` reads of all ranks' messages, when these are started at once."""

    def run(rank: int) -> str:
        store = join_attempt(client(agent.port), rank, WORLD, timeout_s)
        store.set(f"from {rank}", message)
        return " ".join(store.get(f"from {peer}").decode() for peer in range(WORLD))

    with ThreadPoolExecutor(len(ranks)) as threads:
        return set(threads.map(run, ranks))


def test_ranks_started_again_see_nothing_of_those_before(agent: TCPStore) -> None:
    for message in ("first", "second", "third"):
        assert attempt(agent, message) == {" ".join([message] * WORLD)}


def test_ranks_that_died_while_joining_are_not_waited_for(agent: TCPStore) -> None:
    # Rank 0 answers ranks 1 and 2 of its attempt although ranks of that number have asked before and are gone.
    with pytest.raises(RuntimeError, match=r"^rank [12] of 3 waited: rank 0 of 3 did not come"):
        attempt(agent, "first", ranks=(1, 2), timeout_s=0.3)
    assert attempt(agent, "second") == {"second second second"}


def test_missing_ranks_are_named(agent: TCPStore) -> None:
    with pytest.raises(RuntimeError, match=r"^ranks 1, 2 of 3 did not come within 0\.3 s"):
        attempt(agent, "first", ranks=(0,), timeout_s=0.3)
    with ThreadPoolExecutor(2) as threads:
        first, second = (threads.submit(join_attempt, client(agent.port), rank, WORLD, 1.0) for rank in (0, 1))
    assert isinstance(second.exception(), ToldElsewhere)
    with pytest.raises(
        CommunicationError, match=r"^rank 2 of 3 did not come within 1 s \(--developer join-timeout-s\)"
    ):
        first.result()
