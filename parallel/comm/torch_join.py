"""From the store that a launcher keeps to one that holds only the ranks of this attempt.

Takes the rank, their number and the launcher's store; gives a store for ``init_process_group``. torchrun without
``--rdzv-backend`` keeps one store for all attempts, in which ranks that were started again would find the addresses of
those that died. Its count of restarts cannot tell attempts apart: each agent counts for itself.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed has them, too, but does not say so
from torch.distributed import DistNetworkError

from parallel.comm.communicator import CommunicationError, ToldElsewhere

POLL_S = 0.02
VERDICT_S = 2.0
"""Rank 0 says a moment after the time is up who is missing."""
READ_S = 0.5
"""Time for the others to read it, before rank 0 ends and takes its store with it."""
NAMED = 8
"""As many missing ranks are named."""


def join_attempt(store: Store, rank: int, world: int, timeout_s: float) -> Store:
    """``store`` as the ranks see it that are here now, whatever earlier ones have left in it; all are here then.

    Every rank asks under a name that it makes up; the first rank answers with the name of the attempt, anew whenever
    somebody asks who has not asked before, until everybody has said that the answer came. Then it tells all of them.

    Raises:
        CommunicationError: not all came within ``timeout_s``; names those that did not, as far as this rank knows.
        ToldElsewhere: the same, and rank 0 tells it.
    """
    end_s = time.monotonic() + timeout_s
    if rank == 0:
        attempt = uuid.uuid4().hex
        missing = _answer(store, attempt, range(1, world), end_s)
        store.set(f"{attempt}/verdict", "missing" if missing else "all came")
        if missing:
            time.sleep(READ_S)
            raise CommunicationError(_describe(missing, world, timeout_s))
    else:
        attempt = _ask(store, rank, world, end_s, timeout_s)
    return PrefixStore(attempt, store)


def _ask(store: Store, rank: int, world: int, end_s: float, timeout_s: float) -> str:
    name = uuid.uuid4().hex
    try:
        store.set(f"asks/{rank}", name)
        _wait(store, f"answer/{name}", end_s)
    except RuntimeError as fault:  # torch has types for most of them, not for a file that waits in vain
        raise CommunicationError(
            f"rank {rank} of {world} waited: " + _describe([0], world, timeout_s, isinstance(fault, DistNetworkError))
        ) from fault
    attempt: str = store.get(f"answer/{name}").decode()
    try:
        store.set(f"{attempt}/came/{rank}", "")
        _wait(store, f"{attempt}/verdict", end_s + VERDICT_S)
        verdict = store.get(f"{attempt}/verdict").decode()
    except RuntimeError as fault:
        raise ToldElsewhere(
            f"rank {rank} of {world}: rank 0 was here and ended before all had come; its own message says why"
        ) from fault
    if verdict == "missing":
        raise ToldElsewhere(f"rank {rank} of {world}: ranks are missing; rank 0 says which")
    return attempt


def _wait(store: Store, key: str, end_s: float) -> None:
    store.wait([key], timedelta(seconds=max(POLL_S, end_s - time.monotonic())))


def _answer(store: Store, attempt: str, others: Sequence[int], end_s: float) -> list[int]:
    """Ranks that did not come."""
    missing = list(others)
    answered: dict[int, bytes] = {}
    while missing and time.monotonic() < end_s:
        for rank in missing:
            if store.check([f"asks/{rank}"]) and (name := store.get(f"asks/{rank}")) != answered.get(rank):
                store.set(f"answer/{name.decode()}", attempt)
                answered[rank] = name
        missing = [rank for rank in missing if not store.check([f"{attempt}/came/{rank}"])]
        if missing:
            time.sleep(POLL_S)
    return missing


def _describe(missing: Sequence[int], world: int, timeout_s: float, ended: bool = False) -> str:
    if ended:
        return "rank 0 ended while the ranks were meeting; its own message says why"
    shown = ", ".join(map(str, missing[:NAMED])) + (", ..." if len(missing) > NAMED else "")
    who = f"rank {shown}" if len(missing) == 1 else f"ranks {shown}"
    return (
        f"{who} of {world} did not come within {timeout_s:.3g} s (--developer join-timeout-s): look for what they "
        f"say, and whether the launcher started {world} ranks; where starting takes longer, raise the limit"
    )
