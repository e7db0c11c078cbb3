"""Which member of one team sends which value to which member of another, between two stages.

All teams divide maps alike, so that each member sends its part of a map to the member of the same number. Member 0
sends what every member has, and what it alone has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from parallel.graph.layers import RANDOM_STATE
from parallel.team.team_plan import TeamPlan


class Parcel(NamedTuple):
    """A value, or a member's part of it, on its way from a member of one team to a member of the next."""

    name: str
    source: int
    target: int


def parcels(names: Iterable[str], plan: TeamPlan) -> list[Parcel]:
    """Return all that goes between two teams of ``plan``, in the order that every member sends and receives it in."""
    members, found = range(plan.mesh.grid.members), []
    for name in names:
        place = plan.placement(name)
        if place == "shard":
            found += [Parcel(name, p, p) for p in members if all(span.size > 0 for span in plan.owned(name, p))]
        else:
            everybody = name == RANDOM_STATE or place == "replicate"
            found += [Parcel(name, 0, q) for q in (members if everybody else [0])]
    return found
