"""The strategies that a planner chooses from: every schedule on every mesh, with every number of microbatches.

Takes the number of ranks and the global batch; gives all that a schedule allows. What they cost and whether they fit is
for others to say. No torch here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from parallel.schedule.registry import SCHEDULES
from parallel.space.team import Grid
from parallel.strategy import WHOLE, Strategy

MAX_TEAM = 8
"""Members of a team at most in a search; of more, each has little to compute between two exchanges."""
MAX_DEPTH = 32
"""Ranks that a model is spread over at most in a search; deeper pipelines have stages of a layer or two."""


def candidates(
    ranks: int,
    batch: int,
    *,
    names: Sequence[str],
    most_stages: int,
    depth: int | None = None,
    m: int | None = None,
) -> Iterator[Strategy]:
    """Yield all without recomputation and without a sharded optimizer, which are for those that do not fit.

    Microbatches are of 1, 2, 4, ... tiles, up to a group's share of the batch.

    Args:
        names: strategies to choose from.
        most_stages: that the model can be cut into.
        depth, m: given by the user; None leaves them free.
    """
    for name in names:
        if name == "spatial":  # of teams alone
            continue
        if name in WHOLE:
            if depth is None and (ranks == 1) == (name == "single"):
                yield from (Strategy(name, ranks, 1, n) for n in _microbatches(name, ranks, batch, m))
            continue
        chunks = 2 if SCHEDULES[name].chunks else 1
        for ranks_of_group in _depths(ranks, depth):
            if ranks_of_group * chunks > most_stages:
                continue
            for n in _microbatches(name, ranks // ranks_of_group, batch, m):
                least = ranks_of_group if chunks > 1 else SCHEDULES[name].replicas
                if n // (ranks // ranks_of_group) < least:
                    continue  # too few for all chunks or replicas to be at work: slower than without them
                yield Strategy(name, ranks, ranks_of_group, n, chunks)


def in_teams(
    ranks: int,
    batch: int,
    *,
    names: Sequence[str],
    most_stages: int,
    most_members: int,
    depth: int | None = None,
    m: int | None = None,
) -> Iterator[Strategy]:
    """Yield those of ``candidates`` with teams in place of ranks, which divide each tile among them.

    Args:
        most_members: of a team.
    """
    for members in range(2, min(ranks, most_members, MAX_TEAM) + 1):
        if ranks % members:
            continue
        seats = ranks // members
        for grid in grids_of(members):
            if "spatial" in names and depth in (None, 1):
                for n in _microbatches("spatial", seats, batch, m):
                    yield Strategy("spatial", ranks, 1, n, grid=grid)
            split = [name for name in names if name not in (*WHOLE, "spatial", "zero-bubble")]
            for each in candidates(seats, batch, names=split, most_stages=most_stages, depth=depth, m=m):
                yield dataclasses.replace(each, ranks=ranks, grid=grid)


def grids_of(members: int) -> list[Grid]:
    """Return the grids worth trying: rows alone, whose pieces lie in memory as they are sent, and about as many columns
    as rows, which have the shortest borders."""
    columns = max(c for c in range(1, math.isqrt(members) + 1) if members % c == 0)
    return [Grid(members, 1)] + [Grid(members // columns, columns)] * (columns > 1)


def leanest(strategies: Iterable[Strategy]) -> list[Strategy]:
    """Return, of candidates of one name, those with the smallest and the largest microbatches for each number of
    stages; others take bytes between theirs. The smallest microbatches first, and of these the most stages."""
    by_depth: dict[int, list[Strategy]] = {}
    for strategy in sorted(strategies, key=lambda candidate: -candidate.m):
        by_depth.setdefault(strategy.depth, []).append(strategy)
    ends = [end for own in by_depth.values() for end in {own[0]: None, own[-1]: None}]
    return sorted(ends, key=lambda candidate: (-candidate.m, -candidate.depth))


def _depths(ranks: int, asked: int | None) -> list[int]:
    return [d for d in range(2, min(ranks, MAX_DEPTH) + 1) if ranks % d == 0 and asked in (None, d)]


def _microbatches(name: str, groups: int, batch: int, asked: int | None) -> list[int]:
    """Return the numbers of microbatches of which every group has one, and every one a tile."""
    if name == "mast":
        return [2 * groups] if 2 * groups <= batch and asked in (None, 2 * groups) else []
    if asked is not None:
        return [asked] if groups <= asked <= batch else []
    if groups > batch:
        return []
    sizes = [2**k for k in range(batch.bit_length())]
    return sorted({groups, *(n for tiles in sizes if (n := -(-batch // tiles)) >= groups)})
