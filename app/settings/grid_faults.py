"""What is wrong with teams as they are asked for: grids, the ranks they take, and what teams cannot do."""

from __future__ import annotations

from app.settings.strategy import StrategySettings
from parallel.memory.policy import ActivationPolicy
from parallel.schedule.registry import kind_of
from parallel.space.team import Grid
from parallel.strategy import Strategy


def grid_faults(settings: StrategySettings) -> list[str]:
    """Return what is wrong with ``--grid`` under a strategy that is named, a line each."""
    if settings.grid:
        try:
            Grid.parse(settings.grid)
        except ValueError as fault:
            return [f"--grid: {fault}"]
    faults: list[str] = []
    if not settings.splits:
        return [
            f"--grid divides each tile among the ranks of a team, which --parallel {settings.name} does not have: use "
            "--parallel spatial, or a strategy that splits the model"
        ]
    if settings.name == "spatial":
        faults = _faults_of_one_stage(settings)
    elif settings.depth < 2:
        faults = [
            f"--parallel {settings.name} splits the model over 2 teams or more; got --grid {settings.grid} and "
            f"{settings.world} ranks: use more ranks, smaller grids, or --parallel spatial"
        ]
    if faults:
        return faults
    grid, ranks = settings.team, settings.group_ranks
    assert grid is not None
    shown = settings.grid or str(grid)
    if grid.members < 2:
        return [f"--grid {shown} divides nothing: give a grid of 2 ranks or more, as 2x1"]
    if settings.world % ranks:
        teams = "a team" if settings.depth == 1 else f"{settings.depth} teams"
        faults = [
            f"--grid {shown} takes {ranks} ranks for {teams}, or a multiple; got {settings.world}: "
            f"give --ranks {max(1, settings.world // ranks) * ranks}, or another grid"
        ]
    return faults + [f"--grid {shown}: {fault}" for fault in _strategy(settings).team_faults]


def _faults_of_one_stage(settings: StrategySettings) -> list[str]:
    if settings.world < 2 and not settings.grid:
        return [f"--parallel spatial divides each tile among 2 ranks or more; got --ranks {settings.world}"]
    return [
        f"{flag} is about a model split into stages; --parallel spatial has one stage: leave it out"
        for flag, given in (
            (f"--stages {settings.stages}", settings.stages is not None),
            (f"--cuts={settings.cuts}", bool(settings.cuts)),
        )
        if given
    ]


def _strategy(settings: StrategySettings) -> Strategy:
    """As much of what is asked for as teams have a say in."""
    policy = ActivationPolicy(parameters=settings.offload_state == "parameters", stream=settings.stream_px)
    return Strategy(
        settings.name,
        ranks=settings.world,
        depth=settings.depth,
        m=settings.m,
        policy=policy,
        shard_optimizer=settings.shard_optimizer == "pair" and kind_of(settings.name).replicas == 2,
        statistics=settings.norm_statistics,
        compile=settings.compile,
        grid=settings.team,
        schedule_csv="" if settings.schedule else None,
    )
