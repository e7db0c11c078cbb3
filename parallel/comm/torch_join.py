"""From the store that a launcher keeps to one that holds only the ranks of this attempt.

Takes the rank, their number and the environment of torchrun; gives a store for ``init_process_group``. torchrun without
``--rdzv-backend`` keeps one store for all attempts, in which ranks that were started again would find the addresses of
those that died. Its count of restarts cannot tell attempts apart: each agent counts for itself.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed has them, too, but does not say so
from torch.distributed import DistStoreError

POLL_S = 0.02


def join_attempt(store: Store, rank: int, world: int, timeout_s: float) -> Store:
    """``store`` as the ranks see it that are here now, whatever earlier ones have left in it.

    Every rank asks under a name that it makes up; the first rank answers with the name of the attempt, anew whenever
    somebody asks who has not asked before, until everybody has said that the answer came.

    Raises:
        RuntimeError: not all came within ``timeout_s``; names those that did not, as far as this rank knows.
    """
    end_s = time.monotonic() + timeout_s
    if rank == 0:
        attempt = uuid.uuid4().hex
        _answer(store, attempt, range(1, world), end_s)
    else:
        attempt = _ask(store, rank, end_s)
    return PrefixStore(attempt, store)


def _ask(store: Store, rank: int, end_s: float) -> str:
    name = uuid.uuid4().hex
    store.set(f"asks/{rank}", name)
    try:
        store.wait([f"answer/{name}"], timedelta(seconds=max(POLL_S, end_s - time.monotonic())))
    except DistStoreError as fault:
        raise RuntimeError("rank 0 did not come") from fault
    attempt: str = store.get(f"answer/{name}").decode()
    store.set(f"{attempt}/came/{rank}", "")
    return attempt


def _answer(store: Store, attempt: str, others: Sequence[int], end_s: float) -> None:
    missing = list(others)
    answered: dict[int, bytes] = {}
    while missing:
        if time.monotonic() > end_s:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise RuntimeError(f"rank {shown} did not come" if len(missing) == 1 else f"ranks {shown} did not come")
        for rank in missing:
            if store.check([f"asks/{rank}"]) and (name := store.get(f"asks/{rank}")) != answered.get(rank):
                store.set(f"answer/{name.decode()}", attempt)
                answered[rank] = name
        missing = [rank for rank in missing if not store.check([f"{attempt}/came/{rank}"])]
        if missing:
            time.sleep(POLL_S)
