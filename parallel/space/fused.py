"""Halos of several operations fetched at once: what members hold beyond their own boxes, to spare later messages.

Takes the steps of a region and a grid whose ``fuse`` is more than 1; gives the boxes of values that members compute
wider than their own. Along a chain of operations, each of one map that nobody else takes, the first of every ``fuse``
that need what others have fetches for all of them; what lies between is computed twice where boxes overlap, and
gradients of the chain's end reach each copy through its own way alone, so that their sum is exact. After the fused halo
exchange of MPI4DL (design D2). No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from parallel.space.step import PRIOR, Step
from parallel.space.team import Box, Territory, needs_of, within


def wide_boxes(
    territory: Territory, steps: Sequence[Step], sides: Mapping[str, tuple[int, int]], leaving: Collection[str]
) -> dict[str, tuple[Box, ...]]:
    """Return, by name of a value that members hold more of than their own, the box of each member.

    Args:
        steps: that are run one after the other, with nothing sent on between them.
        sides: rows and columns of every map.
        leaving: names of values that are used after them.
    """
    if territory.grid.fuse == 1:
        return {}
    users: dict[str, list[Step]] = {}
    for step in steps:
        for name in step.inputs:
            users.setdefault(name, []).append(step)
    of_node = Counter(step.name.partition(PRIOR)[0] for step in steps)
    links = {step.name for step in steps if _links(step) and of_node[step.name] == 1}
    wide: dict[str, tuple[Box, ...]] = {}
    seen: set[str] = set()
    for step in steps:
        if step.name not in links or step.name in seen:
            continue
        chain = [step]
        while chain[-1].name not in leaving and len(after := users.get(chain[-1].name, [])) == 1:
            if after[0].name not in links:
                break
            chain.append(after[0])
        seen.update(each.name for each in chain)
        wide.update(_of_chain(territory, chain, sides))
    return wide


def _links(step: Step) -> bool:
    """Its value is a map, made of one map and nothing that is summed or drawn."""
    return not (step.sums or step.plain or step.draws_whole or step.others) and len(step.maps) == 1


def _of_chain(
    territory: Territory, chain: Sequence[Step], sides: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[Box, ...]]:
    wide: dict[str, tuple[Box, ...]] = {}
    fetching = [
        number
        for number, step in enumerate(chain)
        if not territory.exchange(step.rules, step.sides, sides[step.maps[0]]).quiet
    ]
    for first in range(0, len(fetching), territory.grid.fuse):
        group = fetching[first : first + territory.grid.fuse]
        boxes = territory.all_owned(chain[group[-1]].sides)
        made: dict[str, tuple[Box, ...]] = {}
        for step in reversed(chain[group[0] + 1 : group[-1] + 1]):
            (source,) = step.maps
            boxes = tuple(within(need, sides[source]) for need in needs_of(step.rules, boxes, sides[source]))
            made[source] = boxes
        if all(rows.size and columns.size for boxes in made.values() for rows, columns in boxes):
            wide.update(made)
    return wide
