"""What is wrong with teams as they are asked for: grids, the ranks they take, and what teams cannot do."""

from __future__ import annotations

from app.settings.strategy import StrategySettings
from parallel.space.team import Grid


def grid_faults(settings: StrategySettings) -> list[str]:
    """Return what is wrong with ``--grid`` under a strategy that is named, a line each."""
    faults = []
    for text in settings.grid.split(",") if settings.grid else ():
        try:
            Grid.parse(text)
        except ValueError as fault:
            faults.append(f"--grid: {fault}")
    if faults:
        return faults
    if not settings.splits:
        return [
            f"--grid divides each tile among the ranks of a team, which --parallel {settings.name} does not have: use "
            "--parallel spatial, or a strategy that splits the model"
        ]
    grids, asked = settings.grids, settings.asked_grids
    ranks = settings.group_ranks
    if settings.name == "spatial" and settings.stages is not None:
        faults.append(f"--stages is about a model split into stages; spatial has one; got --stages {settings.stages}")
    if settings.name == "spatial" and len(asked) > 1:
        faults.append(f"--parallel spatial has one team; got --grid {settings.grid}: give one grid")
    elif settings.name != "spatial" and settings.depth < 2:
        faults.append(
            f"--parallel {settings.name} splits the model over 2 teams or more; got --grid {settings.grid} and "
            f"{settings.world} ranks: use more ranks, smaller grids, or --parallel spatial"
        )
    elif len(asked) > 1 and settings.stages not in (None, len(asked)):
        faults.append(f"--grid {settings.grid} has {len(asked)} teams, --stages {settings.stages}: leave --stages out")
    if not faults and max(grid.members for grid in grids) < 2:
        faults.append(f"--grid {settings.grid or grids[0]} divides nothing: give a grid of 2 ranks or more, as 2x1")
    if settings.world < ranks or settings.world % ranks:
        faults.append(
            f"{settings.world} ranks cannot be divided into groups of {ranks}, which --grid takes "
            f"({', '.join(map(str, grids))}): use {ranks} ranks, or a multiple"
        )
    return faults
