"""From a rank's environment to the store in which the ranks of a run find each other.

Takes the file of ranks that ``--ranks`` has started, MASTER_ADDR and MASTER_PORT of others; gives a store, or says
within a time limit what stands in the way. Asked directly, torch waits without end for a program that has the port and
says nothing, and buries the rest under traces of its C++ half: so the port and the way to it are tried with plain
sockets first. Whoever reaches the port reads and writes the store, so ranks of one host keep it on loopback.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from datetime import timedelta

from torch._C._distributed_c10d import FileStore, Store, TCPStore

from parallel.comm.communicator import CommunicationError
from parallel.comm.deadline import call_with_timeout
from parallel.comm.loopback import all_on_one_host

PRIVATE_STORE = "MEGATILE_STORE"
"""A file in a folder that only this user can enter: the store of ranks that ``torch_launch`` has started."""

LOOPBACK = "127.0.0.1"
RETRY_S = 0.2
ANSWERS_WITHIN_S = 5.0
"""One try to connect; a host that is there answers much sooner."""


def open_store(rank: int, world: int, timeout_s: float) -> Store:
    """The store of the file that the launcher says, or at MASTER_ADDR and MASTER_PORT: that of torchrun's agent, or one
    that rank 0 keeps.

    Raises:
        CommunicationError: the port is taken, or the address cannot be reached within ``timeout_s``.
    """
    if PRIVATE_STORE in os.environ:
        return FileStore(os.environ[PRIVATE_STORE], world)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    name = f"rank {rank} of {world} on {socket.gethostname()}"
    end_s = time.monotonic() + timeout_s
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if rank == 0:
            listener = _listen(port, name)
            # Its own way to itself: others may know this host by a name that it does not know.
            return _made(LOOPBACK, port, end_s, f"{name} cannot keep a store on port {port}", listener)
        if all_on_one_host():
            address = LOOPBACK
    reason = f"{name} cannot reach rank 0 at {address}:{port} (MASTER_ADDR, MASTER_PORT) within {timeout_s:.3g} s"
    _check_reachable(address, port, end_s, reason)
    return _made(address, port, end_s, reason)


def _listen(port: int, name: str) -> socket.socket:
    try:
        if all_on_one_host():
            return socket.create_server((LOOPBACK, port))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except (OSError, OverflowError) as fault:
        raise CommunicationError(
            f"{name} cannot listen on port {port}, where the ranks are to meet (MASTER_PORT): {_plain(fault)}; "
            "end what has that port, or set MASTER_PORT to another, or leave it out: --ranks, srun and "
            "torchrun --standalone find one themselves"
        ) from fault


def _check_reachable(address: str, port: int, end_s: float, reason: str) -> None:
    """Return once something listens there."""
    while True:
        left_s = end_s - time.monotonic()
        try:
            socket.create_connection((address, port), min(max(left_s, RETRY_S), ANSWERS_WITHIN_S)).close()
            return
        except (OSError, OverflowError) as fault:
            if left_s < RETRY_S:
                raise CommunicationError(f"{reason}: {_plain(fault)}; {_advice(fault, address)}") from fault
        time.sleep(RETRY_S)


def _advice(fault: Exception, address: str) -> str:
    if isinstance(fault, socket.gaierror):
        return f"this host knows no {address}: set MASTER_ADDR to an address of rank 0's host"
    if isinstance(fault, ConnectionRefusedError):
        return (
            "nothing listens there: rank 0 has not started, or has ended, which its own message tells; otherwise see "
            "that MASTER_ADDR and MASTER_PORT are the same for all ranks; if it starts slowly, raise "
            "--developer join-timeout-s"
        )
    return (
        "there is no way to that host: set MASTER_ADDR to an address of a network that all hosts share, and see "
        "that no firewall closes the port"
    )


def _plain(fault: Exception) -> str:
    return (fault.strerror if isinstance(fault, OSError) else None) or str(fault) or type(fault).__name__


def _made(address: str, port: int, end_s: float, reason: str, listener: socket.socket | None = None) -> Store:
    """The store at that address; kept by this process when there is a ``listener``, which then is the store's."""
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
