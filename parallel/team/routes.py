"""What of a value goes from which member of one team to which of another, between two stages.

A map that lies in parts goes box by box: what a member of the first owns of what one of the second owns. What every
member has, and what member 0 alone has, member 0 sends. Both teams find the same from the plans of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parallel.graph.layers import RANDOM_STATE
from parallel.space.span import Span
from parallel.space.team import Box, overlap
from parallel.team.team_plan import TeamPlan


@dataclass(frozen=True)
class Parcel:
    """Part of a value on its way.

    Attributes:
        source, target: members of the two teams.
        box: of the map; None: the value as it is.
        sent_from, held_at: box that the source has, and that the target will have.
    """

    name: str
    source: int
    target: int
    box: Box | None = None
    sent_from: Box | None = None
    held_at: Box | None = None


def parcels(names: Iterable[str], before: TeamPlan, after: TeamPlan) -> list[Parcel]:
    """Return all that goes between two teams, in the order that every member sends and receives it in.

    Raises:
        ValueError: a value that is several maps would go in parts.
    """
    found: list[Parcel] = []
    for name in names:
        plans = [plan for plan in (before, after) if plan.lies(name) == "parts"]
        if plans:
            sides, region = plans[0].sides(name), plans[0].region
            assert region is not None
            if name not in region.forms or plans[0].dims(name) != (2, 3) or len(region.forms[name][0]) != 4:
                raise ValueError(
                    f"{name} is not one map with rows and columns as its last dims, which is all that goes from team "
                    "to team in parts: cut the model elsewhere (--developer cuts)"
                )
            whole = (Span(0, sides[0]), Span(0, sides[1]))
            sources, targets = (_held(name, plan, whole) for plan in (before, after))
            for p, has in enumerate(sources):
                for q, wants in enumerate(targets):
                    box = overlap(has, wants)
                    if box is not None:
                        found.append(Parcel(name, p, q, box, has, wants))
        else:
            everybody = name == RANDOM_STATE or after.lies(name) == "all"
            found += [Parcel(name, 0, q) for q in range(after.territory.grid.members if everybody else 1)]
    return found


def _held(name: str, plan: TeamPlan, whole: Box) -> list[Box]:
    """By member: the box of a map that it has."""
    if plan.lies(name) == "parts":
        return [plan.owned(name, member) for member in range(plan.territory.grid.members)]
    return [whole]
