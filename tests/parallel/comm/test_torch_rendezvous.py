"""Ranks find each other and nobody else; what prevents it is reported in time, whatever torch would do."""

from __future__ import annotations

import errno
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from parallel.comm.communicator import CommunicationError, SecondaryError
from parallel.comm.kinds import RankKind
from parallel.comm.torch_rendezvous import join_attempt, open_store

WORLD = 3


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where a program listens that never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch):
    def at(address: str, port: int) -> None:
        monkeypatch.setenv("MASTER_ADDR", address)
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    return at


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def refused(rank: int, timeout_s: float) -> str:
    begun_s = time.monotonic()
    with pytest.raises(CommunicationError) as told:
        open_store(rank, 2, timeout_s)
    assert time.monotonic() - begun_s < timeout_s + 3
    return str(told.value)


def test_ranks_meet_whoever_comes_first(meet) -> None:
    port = free_port()
    meet("127.0.0.1", port)
    stores = {}
    late = threading.Thread(target=lambda: stores.update({1: open_store(1, 2, 20)}))
    late.start()
    time.sleep(0.3)
    stores[0] = open_store(0, 2, 20)
    late.join(20)
    stores[1].set("from 1", "hello")
    assert stores[0].get("from 1") == b"hello"


@pytest.mark.parametrize(("ranks_here", "address"), [("2", "127.0.0.1"), ("1", "::")])
def test_ranks_of_one_host_keep_their_store_on_loopback(meet, monkeypatch, ranks_here: str, address: str) -> None:
    port = free_port()
    meet(socket.gethostname(), port)  # whatever that name leads to
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
    stores = [open_store(0, 2, 20)]
    connections = psutil.Process().net_connections("tcp")
    assert [each.laddr.ip for each in connections if each.laddr.port == port and not each.raddr] == [address]
    if ranks_here == "2":
        stores.append(open_store(1, 2, 20))
        stores[1].set("from 1", "hello")
        assert stores[0].get("from 1") == b"hello"


HERE = "127.0.0.1"
TIMED_OUT, NO_ROUTE = TimeoutError("timed out"), OSError(errno.EHOSTUNREACH, "No route to host")
REFUSALS: dict[str, tuple[int, str, float, str, OSError | None]] = {
    "a port that is taken": (0, HERE, 20, r"cannot listen on port {}, .*Address already in use.*MASTER_PORT", None),
    "a program that is not rank 0": (1, HERE, 1, r"at 127.0.0.1:{} .*MASTER_PORT. within 1 s.*not rank", None),
    "a port where nobody listens": (1, HERE, 0.5, "within 0.5 s: Connection refused; nothing listens there", None),
    "a name that nobody knows": (1, "no-such.invalid", 0.5, "knows no no-such.invalid: set MASTER_ADDR to", None),
    "no answer": (1, "192.0.2.1", 0.5, r"at 192.0.2.1:{} .* within 0.5 s: timed out; .*set MASTER_ADDR to", TIMED_OUT),
    "no way": (1, "192.0.2.1", 0.5, r"at 192.0.2.1:{} .* within 0.5 s: No route to host; .*MASTER_ADDR", NO_ROUTE),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_say_what_to_do(case: str, meet, silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, address, timeout_s, words, fault = REFUSALS[case]
    if fault:  # where tests run, every address may be answered by a proxy
        monkeypatch.setattr(socket, "create_connection", mock.Mock(side_effect=fault))
    port = silent if rank == 0 or timeout_s == 1 else free_port()
    meet(address, port)
    assert re.match(f"rank {rank} of 2 on {socket.gethostname()} .*" + words.format(port), refused(rank, timeout_s))


@pytest.mark.parametrize("port", [None, "abc"])
def test_an_address_that_is_not_set_is_asked_for(port: str | None, meet, monkeypatch: pytest.MonkeyPatch) -> None:
    meet(HERE, port)
    if port is None:
        monkeypatch.delenv("MASTER_PORT")
    assert re.search(f"{port or 'MASTER_PORT'}.*: set MASTER_ADDR and MASTER_PORT to", refused(0, 1))


def client(port: int, *, serves: bool = False) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=20))


@pytest.fixture
def agent() -> TCPStore:
    """The store of a launcher, which outlives its ranks."""
    return client(0, serves=True)


def kind_of(rank: int) -> RankKind:
    return RankKind("a", "cuda", str(rank)) if rank else RankKind("a", "cpu")


def attempt(agent: TCPStore, message: str, ranks: tuple[int, ...] = (0, 1, 2), timeout_s: float = 20) -> set[str]:
    """What each of ``ranks`` reads of all ranks' messages, when these are started at once."""

    def run(rank: int) -> str:
        store, kinds = join_attempt(client(agent.port), kind_of(rank), rank, WORLD, timeout_s)
        assert kinds == tuple(map(kind_of, range(WORLD)))
        store.set(f"from {rank}", message)
        return " ".join(store.get(f"from {peer}").decode() for peer in range(WORLD))

    with ThreadPoolExecutor(len(ranks)) as threads:
        return set(threads.map(run, ranks))


def test_ranks_started_again_see_nothing_of_those_before_and_wait_for_none_of_them(agent: TCPStore) -> None:
    for message in ("first", "second"):
        assert attempt(agent, message) == {" ".join([message] * WORLD)}
    # Rank 0 answers ranks 1 and 2 of its attempt although ranks of that number have asked before and are gone.
    with pytest.raises(RuntimeError, match=r"^rank [12] of 3 waited: rank 0 of 3 did not come"):
        attempt(agent, "third", ranks=(1, 2), timeout_s=0.3)
    assert attempt(agent, "fourth") == {"fourth fourth fourth"}


def test_missing_ranks_are_named(agent: TCPStore) -> None:
    with pytest.raises(RuntimeError, match=r"^ranks 1, 2 of 3 did not come within 0\.3 s"):
        attempt(agent, "first", ranks=(0,), timeout_s=0.3)
    with ThreadPoolExecutor(2) as threads:
        first, second = (
            threads.submit(join_attempt, client(agent.port), kind_of(rank), rank, WORLD, 1.0) for rank in (0, 1)
        )
    assert isinstance(second.exception(), SecondaryError)
    with pytest.raises(CommunicationError, match=r"^rank 2 of 3 did not come within 1 s \(--join-timeout-s\)"):
        first.result()
