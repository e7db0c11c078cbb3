"""The process group of a run, joined within a time limit: the store, all ranks there, then connections between them.

Takes this rank, what it computes on, the number of ranks and the environment that says where they meet; leaves
torch.distributed's default group, whose backend follows from what all of them compute on. Every trouble on the way is
told in one message, within a minute by default.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from parallel.comm.communicator import CommunicationError
from parallel.comm.deadline import call_with_timeout
from parallel.comm.device_thread import on_current_device
from parallel.comm.kinds import RankKind
from parallel.comm.loopback import stay_on_host
from parallel.comm.torch_join import join_attempt
from parallel.comm.torch_kinds import exchange_kinds
from parallel.comm.torch_store import open_store

CONNECT_S = 10.0
"""Ranks that have all arrived connect in a second; together with the time to arrive in, a minute."""
CONNECT_RANK_S = 0.02
"""More for each rank, as each connects to all."""


def join_group(
    backend_of: Callable[[Sequence[RankKind]], str],
    own: RankKind,
    rank: int,
    world: int,
    timeout: timedelta,
    join_timeout_s: float,
) -> tuple[RankKind, ...]:
    """Make the default group of torch.distributed; return what each rank computes on.

    Args:
        backend_of: gives the group's backend, as ``init_process_group`` names them, from what the ranks compute on.
        own: what this rank computes on.
        timeout: how long its operations will wait.
        join_timeout_s: how long ranks wait for each other to arrive.

    Raises:
        CommunicationError: a port that is taken, an address that cannot be reached, ranks that did not come.
        ToldElsewhere: the same, told by another rank.
    """
    begun_s = time.monotonic()
    stay_on_host()
    store = open_store(rank, world, join_timeout_s)
    left_s = max(join_timeout_s / 10, join_timeout_s - (time.monotonic() - begun_s))
    store = join_attempt(store, rank, world, left_s)
    kinds = exchange_kinds(store, rank, own, world)
    connect = functools.partial(
        dist.init_process_group,
        backend_of(kinds),
        store=store,
        rank=rank,
        world_size=world,
        # Messages keep the limit that the group is made with, so that joining has another one around it.
        timeout=timeout,
    )
    try:
        call_with_timeout(on_current_device(lambda: connect() is None), CONNECT_S + CONNECT_RANK_S * world)
    except (RuntimeError, ValueError, TimeoutError) as fault:
        raise CommunicationError(
            f"rank {rank} of {world} on {socket.gethostname()} cannot connect to the others over Gloo: "
            f"{str(fault).splitlines()[0]}; all ranks have come, so that it is the way between their hosts: set "
            "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network interface that they share, see `ip addr`"
        ) from fault
    return kinds
