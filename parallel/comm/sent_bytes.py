"""What a rank sends in collective operations, were they rings: the least that any way of doing them sends.

Takes bytes and the number of ranks; gives bytes that each rank sends (Patarasuk and Yuan 2009, Bandwidth optimal
all-reduce algorithms). What a library really sends may be more; it tells nobody.
"""

from __future__ import annotations


def sum_bytes(size: int, ranks: int) -> int:
    """Return the bytes of a sum of ``size`` bytes that every rank ends up with.

    >>> sum_bytes(100, 4), sum_bytes(100, 1)
    (150, 0)
    """
    return 2 * part_bytes(size, ranks)


def part_bytes(size: int, ranks: int) -> int:
    """Return the bytes of gathering ``size`` bytes of which each rank has a part, or of a sum that leaves each one."""
    return size * (ranks - 1) // ranks
