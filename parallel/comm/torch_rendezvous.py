"""The ranks of a run find each other: from the environment of a rank to the default group of ``torch.distributed``.

``join_group`` opens a store, waits there until all ranks have come, and connects them over Gloo or NCCL. Ranks that are
all on one host use its loopback interface, where no other host reaches them. Every failure is reported in one message
within a time limit: torch itself waits without end for a program that has the port and says nothing.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent import futures
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError

from parallel.comm.communicator import CommunicationError, SecondaryError
from parallel.comm.device_thread import OrderedTasks
from parallel.comm.kinds import RankKind, backend_of, from_text, to_text
from parallel.comm.launch import KEY, PRIVATE_STORE, loopback_variables

Result = TypeVar("Result")

LOOPBACK = "127.0.0.1"
RETRY_S = 0.2
ANSWERS_WITHIN_S = 5.0
"""One attempt to connect; a host that is there answers much sooner."""
POLL_S = 0.02
VERDICT_S = 2.0
"""Rank 0 reports missing ranks a moment after the limit."""
MISSING = "missing"
READ_S = 0.5
"""Time for the others to read the verdict before rank 0 ends, and its store with it."""
NAMED = 8
"""Most missing ranks that are named."""
CONNECT_S, CONNECT_RANK_S = 10.0, 0.02
"""Limit for connecting ranks that have all arrived, and more for each rank: with the default limit, a minute in all."""


def join_group(own: RankKind, rank: int, world: int, timeout: timedelta, join_timeout_s: float) -> tuple[RankKind, ...]:
    """Make the default group of ``torch.distributed``; return what each rank computes on.

    Args:
        own: what this rank computes on.
        timeout: of the operations of the group.
        join_timeout_s: limit for all ranks to arrive.

    Raises:
        CommunicationError: a port is taken, an address cannot be reached, or ranks did not come.
        SecondaryError: the same, reported by another rank.
    """
    begun_s = time.monotonic()
    if all_on_one_host():
        for name, interface in loopback_variables().items():
            os.environ.setdefault(name, interface)
    store = open_store(rank, world, join_timeout_s)
    left_s = max(join_timeout_s / 10, join_timeout_s - (time.monotonic() - begun_s))
    store, kinds = join_attempt(store, own, rank, world, left_s)

    def connect() -> list[int]:
        # Operations keep the limit that the group is made with, so that connecting needs one of its own.
        dist.init_process_group(backend_of(kinds), store=store, rank=rank, world_size=world, timeout=timeout)
        return _impostors(rank, world, os.environ[KEY]) if KEY in os.environ else []

    try:
        impostors = call_with_timeout(connect, CONNECT_S + CONNECT_RANK_S * world)
    except (RuntimeError, ValueError, TimeoutError) as fault:
        raise CommunicationError(
            f"rank {rank} of {world} on {socket.gethostname()} cannot connect to the others over Gloo: "
            f"{str(fault).splitlines()[0]}; all ranks have come, so that it is the way between their hosts: set "
            "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network interface that they share, see `ip addr`"
        ) from fault
    for peer in impostors:
        raise CommunicationError(
            f"rank {rank}: what answers as rank {peer} does not know the key of this run: another process of this "
            "machine has connected in its place; see who else is on it, and start the run again"
        )
    return kinds


def _impostors(rank: int, world: int, key: str) -> list[int]:
    """Return the ranks that do not know ``key``: Gloo accepts any process that connects to its ports."""

    def proof(sender: int, receiver: int) -> bytes:
        return hmac.digest(key.encode(), f"{sender}>{receiver}".encode(), hashlib.sha256)

    peers = [peer for peer in range(world) if peer != rank]
    received = {peer: torch.zeros(hashlib.sha256().digest_size, dtype=torch.uint8) for peer in peers}
    works = [dist.irecv(tensor, peer) for peer, tensor in received.items()]
    works += [dist.isend(torch.tensor(list(proof(rank, peer)), dtype=torch.uint8), peer) for peer in peers]
    for work in works:
        assert work is not None
        work.wait()
    return [peer for peer in peers if not hmac.compare_digest(received[peer].numpy().tobytes(), proof(peer, rank))]


def all_on_one_host() -> bool:
    """Return whether the launcher says that no rank is on another host."""
    world = os.environ.get("WORLD_SIZE")
    return world is not None and os.environ.get("LOCAL_WORLD_SIZE") == world


def open_store(rank: int, world: int, timeout_s: float) -> Store:
    """Return the store in the launcher's file, or at MASTER_ADDR and MASTER_PORT: torchrun's, or one that rank 0 keeps.

    The port and the way to it are tried with plain sockets first, for errors that a reader understands.

    Raises:
        CommunicationError: no address is set, the port is taken, or the address cannot be reached within ``timeout_s``.
    """
    if PRIVATE_STORE in os.environ:
        return FileStore(os.environ[PRIVATE_STORE], world)
    name = f"rank {rank} of {world} on {socket.gethostname()}"
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as fault:
        raise CommunicationError(
            f"{name} cannot read where the ranks meet ({fault!r}): set MASTER_ADDR and MASTER_PORT to an address and a "
            "free port of rank 0's host, for all ranks, or use --ranks, srun or torchrun, which set them"
        ) from fault
    end_s = time.monotonic() + timeout_s
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if rank == 0:
            listener = _listen(port, name)
            # By the loopback address: others may know this host by a name that it does not know itself.
            return _tcp_store(LOOPBACK, port, end_s, f"{name} cannot keep a store on port {port}", listener)
        if all_on_one_host():
            address = LOOPBACK
    reason = f"{name} cannot reach rank 0 at {address}:{port} (MASTER_ADDR, MASTER_PORT) within {timeout_s:.3g} s"
    _await_listener(address, port, end_s, reason)
    return _tcp_store(address, port, end_s, reason)


def _listen(port: int, name: str) -> socket.socket:
    try:
        if all_on_one_host():  # whoever reaches the port reads and writes the store
            return socket.create_server((LOOPBACK, port))
        both = socket.has_dualstack_ipv6()
        return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
    except (OSError, OverflowError) as fault:
        raise CommunicationError(
            f"{name} cannot listen on port {port}, where the ranks are to meet (MASTER_PORT): {_reason(fault)}; "
            "end what has that port, or set MASTER_PORT to another, or leave it out: --ranks, srun and "
            "torchrun --standalone find one themselves"
        ) from fault


def _await_listener(address: str, port: int, end_s: float, reason: str) -> None:
    while True:
        left_s = end_s - time.monotonic()
        try:
            socket.create_connection((address, port), min(max(left_s, RETRY_S), ANSWERS_WITHIN_S)).close()
            return
        except (OSError, OverflowError) as fault:
            if left_s < RETRY_S:
                raise CommunicationError(f"{reason}: {_reason(fault)}; {_advice(fault, address)}") from fault
        time.sleep(RETRY_S)


def _advice(fault: Exception, address: str) -> str:
    if isinstance(fault, socket.gaierror):
        return f"this host knows no {address}: set MASTER_ADDR to an address of rank 0's host"
    if isinstance(fault, ConnectionRefusedError):
        return (
            "nothing listens there: rank 0 has not started, or has ended, which its own message tells; otherwise see "
            "that MASTER_ADDR and MASTER_PORT are the same for all ranks; if it starts slowly, raise "
            "--join-timeout-s"
        )
    return (
        "there is no way to that host: set MASTER_ADDR to an address of a network that all hosts share, and see "
        "that no firewall closes the port"
    )


def _reason(fault: Exception) -> str:
    return (fault.strerror if isinstance(fault, OSError) else None) or str(fault) or type(fault).__name__


def _tcp_store(address: str, port: int, end_s: float, reason: str, listener: socket.socket | None = None) -> Store:
    """Return the store at that address; this process keeps it on ``listener`` if there is one."""
    left_s = max(RETRY_S, end_s - time.monotonic())
    connect = functools.partial(
        TCPStore,
        address,
        port,
        timeout=timedelta(seconds=left_s),
        wait_for_workers=False,
        is_master=listener is not None,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    try:
        return call_with_timeout(connect, left_s)
    except (RuntimeError, TimeoutError) as fault:  # RuntimeError: what torch.distributed raises for all of it
        raise CommunicationError(
            f"{reason}: {str(fault).splitlines()[0]}; what listens there is not rank 0 of this run: set MASTER_PORT to "
            "another port, for all ranks"
        ) from fault


def join_attempt(
    store: Store, own: RankKind, rank: int, world: int, timeout_s: float
) -> tuple[Store, tuple[RankKind, ...]]:
    """Return a store that only the ranks of this attempt use, and what each of them computes on; all have come then.

    torchrun without ``--rdzv-backend`` keeps one store for all attempts, in which ranks that were started again would
    find the addresses of those that died; its count of restarts cannot tell attempts apart, as each agent counts for
    itself. So every rank asks under a random name. Rank 0 answers with the name of the attempt, again whenever a rank
    asks under another name, until all ranks have confirmed the answer; then it publishes the verdict.

    Raises:
        CommunicationError: not all came within ``timeout_s``; names the missing ranks, as far as this rank knows them.
        SecondaryError: the same, reported by rank 0.
    """
    end_s = time.monotonic() + timeout_s
    if rank:
        attempt, verdict = _ask(store, own, rank, world, end_s, timeout_s)
    else:
        attempt = uuid.uuid4().hex
        kinds = _answer(store, attempt, own, world, end_s)
        missing = [peer for peer, kind in enumerate(kinds) if kind is None]
        verdict = MISSING if missing else to_text([kind for kind in kinds if kind is not None])
        store.set(f"{attempt}/verdict", verdict)
        if missing:
            time.sleep(READ_S)
            raise CommunicationError(_describe(missing, world, timeout_s))
    return PrefixStore(attempt, store), from_text(verdict)


def _ask(store: Store, own: RankKind, rank: int, world: int, end_s: float, timeout_s: float) -> tuple[str, str]:
    """Return the name of the attempt and the verdict of rank 0."""
    name = uuid.uuid4().hex
    try:
        store.set(f"asks/{rank}", name)
        attempt = _wait(store, f"answer/{name}", end_s)
    except RuntimeError as fault:  # torch has types for most of them, not for a file that waits in vain
        raise CommunicationError(
            f"rank {rank} of {world} waited: " + _describe([0], world, timeout_s, isinstance(fault, DistNetworkError))
        ) from fault
    try:
        store.set(f"{attempt}/came/{rank}", to_text([own]))
        verdict = _wait(store, f"{attempt}/verdict", end_s + VERDICT_S)
    except RuntimeError as fault:
        raise SecondaryError(
            f"rank {rank} of {world}: rank 0 was here and ended before all had come; its own message says why"
        ) from fault
    if verdict == MISSING:
        raise SecondaryError(f"rank {rank} of {world}: ranks are missing; rank 0 says which")
    return attempt, verdict


def _wait(store: Store, key: str, end_s: float) -> str:
    store.wait([key], timedelta(seconds=max(POLL_S, end_s - time.monotonic())))
    value: bytes = store.get(key)
    return value.decode()


def _answer(store: Store, attempt: str, own: RankKind, world: int, end_s: float) -> list[RankKind | None]:
    """Return what each rank computes on; None of ranks that did not come."""
    kinds: list[RankKind | None] = [own, *[None] * (world - 1)]
    answered: dict[int, bytes] = {}
    while None in kinds and time.monotonic() < end_s:
        for rank in [rank for rank, kind in enumerate(kinds) if kind is None]:
            if store.check([f"asks/{rank}"]) and (name := store.get(f"asks/{rank}")) != answered.get(rank):
                store.set(f"answer/{name.decode()}", attempt)
                answered[rank] = name
            if store.check([f"{attempt}/came/{rank}"]):
                kinds[rank] = from_text(store.get(f"{attempt}/came/{rank}"))[0]
        if None in kinds:
            time.sleep(POLL_S)
    return kinds


def _describe(missing: Sequence[int], world: int, timeout_s: float, ended: bool = False) -> str:
    if ended:
        return "rank 0 ended while the ranks were meeting; its own message says why"
    shown = ", ".join(map(str, missing[:NAMED])) + (", ..." if len(missing) > NAMED else "")
    who = f"rank {shown}" if len(missing) == 1 else f"ranks {shown}"
    return (
        f"{who} of {world} did not come within {timeout_s:.3g} s (--join-timeout-s): look for what they "
        f"say, and whether the launcher started {world} ranks; where starting takes longer, raise the limit"
    )


def call_with_timeout(call: Callable[[], Result], limit_s: float) -> Result:
    """Return what ``call()`` returns, or raise what it raises; it must release Python's lock while it waits. A
    TimeoutError says that it did not return within ``limit_s``; its thread ends with the process."""
    thread = OrderedTasks("call with timeout")
    task = thread.add(call)
    thread.close(wait=False)
    if not futures.wait([task], limit_s).done:
        raise TimeoutError(f"no answer for {limit_s:.0f} s")
    result: Result = task.result()
    return result
