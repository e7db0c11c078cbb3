"""Tickets: every microbatch is drawn once, by whoever is free, step after step."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.comm.counters import MemoryCounters
from parallel.schedule.tickets import Tickets


def drawn(seconds: Sequence[float], m: int, steps: int = 3) -> list[list[list[int]]]:
    """Microbatches of each rank in each step, where one of rank r takes ``seconds[r]``; ranks draw in order of time."""
    world = len(seconds)
    counters = MemoryCounters(Tickets.counters_for(world))
    ranks = [Tickets(counters.add, rank, world, m) for rank in range(world)]
    taken = []
    for _ in range(steps):
        step: list[list[int]] = [[] for _ in range(world)]
        drawing = [rank.of_step() for rank in ranks]
        free = [(0.0, rank) for rank in range(world)]
        while free:
            now, rank = heapq.heappop(free)
            if (i := next(drawing[rank], None)) is not None:
                step[rank].append(i)
                heapq.heappush(free, (now + seconds[rank], rank))
        taken.append(step)
    return taken


@settings(max_examples=60, deadline=None)
@given(seconds=st.lists(st.floats(0.1, 5.0), min_size=1, max_size=5), extra=st.integers(0, 30))
def test_each_microbatch_is_drawn_once_and_nobody_rests(seconds: list[float], extra: int) -> None:
    m = len(seconds) + extra
    for step in drawn(seconds, m):
        assert sorted(i for rank in step for i in rank) == list(range(m))
        end = max(len(rank) * each for rank, each in zip(step, seconds, strict=True))
        # Whoever is last to be done began while all others were still busy.
        assert end <= m / sum(1 / each for each in seconds) + max(seconds) + 1e-9


def test_equal_ranks_compute_their_own_shares_in_order() -> None:
    assert drawn([1.0, 1.0, 1.0], 7) == [[[0, 1, 2], [3, 4], [5, 6]]] * 3


def test_a_slow_rank_keeps_the_first_of_its_own() -> None:
    fast, slow = drawn([1.0, 3.0], 8)[-1]
    assert fast == [0, 1, 2, 3, 7, 6]
    assert slow == [4, 5]


@pytest.mark.parametrize("world", [2, 5])
def test_threads_that_draw_at_once(world: int) -> None:
    m, steps = 40, 20
    counters = MemoryCounters(Tickets.counters_for(world))
    taken: list[list[list[int]]] = [[[] for _ in range(world)] for _ in range(steps)]
    over = threading.Barrier(world)

    def run(rank: int) -> None:
        tickets = Tickets(counters.add, rank, world, m)
        for step in range(steps):
            taken[step][rank].extend(tickets.of_step())
            over.wait(20)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(sorted(i for rank in step for i in rank) == list(range(m)) for step in taken)
