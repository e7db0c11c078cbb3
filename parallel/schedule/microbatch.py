"""How a global batch is cut into microbatches, and which rank computes which.

Letters as in the schedules: m microbatches, i one of them. The cut depends on the batch and m only, never on the number
of ranks, so that every strategy computes the same microbatches and draws the same random numbers in each.
"""

from __future__ import annotations

import hashlib
import itertools


def split_batch(batch: int, m: int) -> tuple[range, ...]:
    """The tiles of each of ``m`` microbatches: consecutive, sizes differing by at most one, larger ones first.

    Raises:
        ValueError: fewer tiles than microbatches.
    """
    if not 1 <= m <= batch:
        raise ValueError(
            f"{batch} tiles cannot be cut into {m} microbatches of at least one tile: "
            "raise --batch or lower --microbatches"
        )
    size, larger = divmod(batch, m)
    starts = [i * size + min(i, larger) for i in range(m + 1)]
    return tuple(range(a, b) for a, b in itertools.pairwise(starts))


def share_of(rank: int, world: int, m: int) -> range:
    """The microbatches that ``rank`` of ``world`` computes: consecutive, counts differing by at most one.

    Raises:
        ValueError: fewer microbatches than ranks, so that some rank would have nothing to do.
    """
    if m < world:
        raise ValueError(f"{m} microbatches cannot keep {world} ranks busy: raise --microbatches to {world} or more")
    return split_batch(m, world)[rank]


def microbatch_seed(seed: int, step: int, i: int) -> int:
    """A 63-bit seed for microbatch ``i`` of ``step``: dropout is the same whichever rank computes it."""
    digest = hashlib.blake2b(f"{seed}/{step}/{i}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
