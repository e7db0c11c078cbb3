"""The table of what the ranks compute on, exchanged through the store in which they meet, before any group is made.

Takes a store that holds only the ranks of this attempt, all of which have come; gives the same table to each of them.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Store

from parallel.comm.communicator import CommunicationError
from parallel.comm.kinds import RankKind, from_text, to_text

WITHIN_S = 10.0
"""All ranks have come, and have only to write a line."""


def exchange_kinds(store: Store, rank: int, own: RankKind, world: int) -> tuple[RankKind, ...]:
    """Return what each rank computes on, in order. Every rank calls it.

    Args:
        own: of this rank.

    Raises:
        CommunicationError: one of them ended before it had said so.
    """
    described = f"rank {rank} of {world}"
    store.set(f"kind/{rank}", to_text([own]))
    if rank == 0:
        told = [from_text(_read(store, f"kind/{each}", described, f"rank {each}"))[0] for each in range(world)]
        store.set("kinds", to_text(told))
    return from_text(_read(store, "kinds", described, "rank 0"))


def _read(store: Store, key: str, described: str, whose: str) -> bytes:
    try:
        store.wait([key], timedelta(seconds=WITHIN_S))
        value: bytes = store.get(key)
    except RuntimeError as fault:  # what torch.distributed raises on time-outs and lost stores alike
        raise CommunicationError(
            f"{described}: {whose} came and has not said within {WITHIN_S:g} s which kind of device it computes on: it "
            "has ended or hangs, and its own message says why"
        ) from fault
    return value
