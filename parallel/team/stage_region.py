"""The part of a model's region that one stage computes: what of a team's plan is computed box by box on its seat.

Takes the region of a whole model and the nodes of a stage; gives a region whose maps enter from other teams, each
member's own box of them, and whose values without rows every member is given. Where values lie is the model's plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

from torch import fx

from parallel.space.step import Step
from parallel.streaming.region import Region


def region_of_stage(region: Region, nodes: Iterable[fx.Node], inputs: Sequence[str]) -> Region | None:
    """Return what ``nodes`` compute of a region; None where they compute no map of it.

    Args:
        inputs: names of the values that enter the stage.

    Raises:
        ValueError: several maps, or several tensors, pass between stages as one value.
    """
    here = {node.name for node in nodes if node.op not in ("placeholder", "get_attr")}
    steps = tuple(step for step in region.steps if region.nodes[step.name].name in here)
    if not any(step.flops and not step.sums for step in steps):
        return None
    made = {step.name for step in steps}
    maps = {name for step in steps for name in step.maps} - made
    others = {name for step in steps for name in step.others} - made
    leaving = tuple(step.name for step in steps if _leaves(region, step, made))
    passing = sorted(maps | {name for name in leaving if name in region.dims})
    for name, forms in [*((n, region.forms) for n in passing), *((n, region.pooled) for n in sorted(others))]:
        if name not in forms:
            raise ValueError(
                f"--stream: {name} is several {'maps' if name in region.dims else 'tensors'}, which pass from stage to "
                "stage together: cut the model elsewhere (--developer cuts)"
            )
    given = tuple(name for name in inputs if name in others)
    return replace(
        region,
        steps=steps,
        forms={**region.forms, **{name: region.pooled[name] for name in given}},
        leaving=leaving,
        inputs=tuple(name for name in inputs if name in maps),
        given=given,
    )


def _leaves(region: Region, step: Step, made: Collection[str]) -> bool:
    """Whether what follows, here or in a later stage, uses the value of a step."""
    node = region.nodes[step.name]
    inside = {*made, *region.constants}
    return node.name == step.name and any(user.name not in inside for user in node.users)


def scale_of(region: Region, side: tuple[int, int]) -> tuple[Fraction, Fraction]:
    """Return px of tiles of ``side`` for each of the largest map that enters."""
    rows, columns = max(region.sides[name] for name in region.inputs)
    return Fraction(side[0], rows), Fraction(side[1], columns)
