"""Errors of a strategy as it is asked for: how ranks and batch are divided, and settings that exclude each other.

Takes ``StrategySettings``; returns a line for each error.
"""

from __future__ import annotations

import math

from app.settings.fields import at_least, broken, bytes_of, error_of, flag_of, sizes
from app.settings.launcher import find_launch, started_by_us
from app.settings.share_errors import async_errors, mixed_errors, share_errors
from app.settings.strategy import StrategySettings
from parallel.memory.policy import ActivationPolicy
from parallel.schedule.registry import kind_of
from parallel.space.team import TeamGrid
from parallel.strategy import STREAMED, Strategy

OPTIMAL_OFFLOAD = "--recompute optimal is planned for what stays on the device: use --recompute block with --offload"


def strategy_errors(settings: StrategySettings) -> list[str]:
    """Return the errors of ``settings`` on the number of ranks there are."""
    if settings.ranks < 1:
        return [f"--ranks must be at least 1; got {settings.ranks}"]
    errors = _of_planner(settings) if settings.needs_strategy_plan else _of_mesh(settings) or _of_microbatches(settings)
    for find in (_of_options, _of_memory_policy, _of_buckets, share_errors, mixed_errors, async_errors):
        errors += find(settings)
    errors += broken(
        {
            **sizes(settings, memory="16GiB"),
            f"--ranks {settings.ranks} starts ranks, and a launcher has started {settings.world}: leave "
            "--ranks out, or add --ranks 1 where --config gives it": (
                settings.ranks not in (1, settings.world) and not started_by_us()
            ),
            "--memory-excess=stop holds a run against --memory; give that, too": settings.memory_excess == "stop"
            and settings.memory is None,
            **{
                f"{flag_of(name)} must be above 0 and finite; got {value:g}": not 0 < value < math.inf
                for name in ("timeout_s", "join_timeout_s")
                for value in [getattr(settings, name)]
            },
        }
    )
    if not errors and not settings.needs_strategy_plan:
        strategy = settings.to_strategy("cpu")
        errors = [f"--parallel {error}" for error in strategy.stash_faults + strategy.zero_faults]
        if settings.name == "subgraph":
            errors += [f"--parallel subgraph: {error}" for error in strategy.team_faults]
    return errors


def _of_options(settings: StrategySettings) -> list[str]:
    rule = f"--parallel {settings.name} does not split it"
    if settings.needs_strategy_plan:
        rule = "--parallel auto chooses this itself: leave it out, or name the strategy"
    of_stages = {
        "--stages": settings.stages is not None and not settings.needs_strategy_plan,
        "--cuts": settings.cuts,
        "--schedule": settings.schedule is not None,
        "--recompute stage": settings.recompute == "stage",
        "--compile": settings.compile,
    }
    flags = [] if settings.splits else broken(of_stages)
    zero, is_fsdp = settings.zero, settings.name == "fsdp"
    return [f"{flag} is about a model split into stages; {rule}" for flag in flags] + broken(
        {
            f"--chunks is for --parallel interleaved; got --parallel {settings.parallel}": settings.chunks is not None
            and settings.name != "interleaved",
            f"--parallel auto chooses --zero itself: leave --zero {zero} out, or name the strategy": zero
            and settings.needs_strategy_plan,
            f"--zero 3 divides a model that each rank computes whole: got --parallel {settings.name}, use ddp": zero
            == 3
            and not is_fsdp
            and not settings.needs_strategy_plan,
            f"--parallel fsdp is --zero 3; got --zero {zero}: use --parallel ddp with it": zero in (1, 2) and is_fsdp,
            f"--schedule {settings.schedule} is not a file": settings.schedule is not None
            and not settings.schedule.is_file(),
        }
    )


def _of_planner(settings: StrategySettings) -> list[str]:
    stages, m = settings.stages, settings.microbatches
    return broken(
        {
            "--grid is of a strategy that is named, as --parallel spatial; got --parallel auto": settings.grid,
            f"--stages must be 2 or more and divide the number of ranks, {settings.world}; got {stages}": (
                stages is not None and (stages < 2 or settings.world % stages)
            ),
            f"--microbatches must be 1 to --batch {settings.batch}; got {m}": m is not None
            and not 1 <= m <= settings.batch,
            **at_least(settings, batch=1),
        }
    )


def _of_mesh(settings: StrategySettings) -> list[str]:
    name, world, depth = settings.name, settings.world, settings.group_ranks
    errors = broken(
        {
            f"--parallel single uses one process; got {world} ranks": name == "single" and world > 1,
            "--stages must be at least 2; got 0": settings.stages == 0 and settings.splits and name != "spatial",
            f"--cuts={settings.cuts} begins stages, and --parallel subgraph has one: leave it out": name == "subgraph"
            and settings.cuts,
            f"--parallel fsdp keeps parts of the model on 2 ranks or more; got --ranks {world}": name == "fsdp"
            and world < 2,
        }
    )
    if settings.grid or name == "spatial":
        errors += _of_teams(settings)
    elif settings.splits and world < 2:
        errors.append(f"--parallel {name} splits the model over 2 ranks or more; got --ranks {world}")
    elif settings.splits and not 2 <= depth <= world:
        errors.append(f"--stages must be 2 to the number of ranks, {world}; got {depth}")
    elif settings.splits and world % depth:
        errors.append(
            f"{world} ranks cannot be divided into groups of --stages {depth}: use {world - world % depth} ranks, or "
            "other --stages"
        )
    launch = find_launch()
    return errors + broken(
        {
            **at_least(settings, chunks=2),
            f"--parallel {name} is torch's own and talks over torch.distributed, not MPI; these ranks were started by "
            "an MPI launcher: start them with torchrun or --ranks, or use --parallel ddp": name == "fsdp"
            and launch
            and launch.mpi,
        }
    )


def _of_microbatches(settings: StrategySettings) -> list[str]:
    """Return errors in the microbatches of a mesh that is right."""
    if not settings.groups <= settings.m <= settings.batch:
        of = settings.group_ranks
        share = "every rank" if of == 1 else f"each of {settings.groups} groups of {of} ranks"
        return [
            f"{settings.world} ranks, --microbatches {settings.m} and --batch {settings.batch} do not fit: "
            f"{share} needs a microbatch and every microbatch a tile"
        ]
    if settings.name == "mast" and settings.m != 2 * settings.groups:
        return [
            f"--parallel mast computes 2 microbatches per group, {2 * settings.groups} in all; "
            f"got --microbatches {settings.m}: leave it out, or use master"
        ]
    return []


def _of_teams(settings: StrategySettings) -> list[str]:
    """Return errors of ``--grid`` under a strategy that is named, and of ``--parallel spatial``."""
    name, world = settings.name, settings.world
    if settings.grid and (unread := error_of(lambda: TeamGrid.parse(settings.grid))):
        return [f"--grid: {unread[0]}"]
    if not settings.splits:
        return [
            f"--grid divides each tile among the ranks of a team, which --parallel {name} does not have: use "
            "--parallel spatial, or a strategy that splits the model"
        ]
    if name == "spatial" and world < 2 and not settings.grid:
        return [f"--parallel spatial divides each tile among 2 ranks or more; got --ranks {world}"]
    one_stage = "is about a model split into stages; --parallel spatial has one stage: leave it out"
    errors = broken(
        {
            f"--stages {settings.stages} {one_stage}": name == "spatial" and settings.stages is not None,
            f"--cuts={settings.cuts} {one_stage}": name == "spatial" and settings.cuts,
            f"--parallel {name} splits the model over 2 teams or more; got --grid {settings.grid} and {world} ranks: "
            "use more ranks, smaller grids, or --parallel spatial": name != "spatial" and settings.depth < 2,
        }
    )
    if errors:
        return errors
    grid, ranks = settings.team, settings.group_ranks
    assert grid is not None
    shown = settings.grid or str(grid)
    if grid.members < 2:
        return [f"--grid {shown} divides nothing: give a grid of 2 ranks or more, as 2x1"]
    teams = "a team" if settings.depth == 1 else f"{settings.depth} teams"
    # As much of the strategy as teams have a say in.
    strategy = Strategy(
        name,
        ranks=world,
        depth=settings.depth,
        m=settings.m,
        policy=ActivationPolicy(parameters=settings.offload_state == "parameters", stream=settings.stream_px),
        statistics=settings.norm_statistics,
        compile=settings.compile,
        grid=grid,
        schedule_csv="" if settings.schedule else None,
    )
    whole = {
        f"--grid {shown} takes {ranks} ranks for {teams}, or a multiple; got {world}: give --ranks "
        f"{max(1, world // ranks) * ranks}, or another grid": world % ranks
    }
    return broken(whole) + [f"--grid {shown}: {fault}" for fault in strategy.team_faults]


def _of_memory_policy(settings: StrategySettings) -> list[str]:
    recompute, offload, runs = settings.recompute, settings.offload, settings.recompute_runs
    policies = {
        f"--recompute {recompute}": recompute == "optimal",
        f"--offload {offload}": offload != "none",
        "--offload-state=parameters": settings.offload_state == "parameters",
    }
    is_fsdp = settings.name == "fsdp" and not settings.needs_strategy_plan
    errors = [
        f"{flag} is not for --parallel fsdp, whose parameters come and go: use ddp, or a strategy with stages"
        for flag in (broken(policies) if is_fsdp else ())
    ]
    errors += broken(
        {
            f"--recompute-runs goes with --recompute optimal; got --recompute {recompute}": runs
            and recompute != "optimal",
            f"--parallel auto chooses what is recomputed: leave --recompute-runs {runs} out, or name the strategy": runs
            and recompute == "optimal"
            and settings.needs_strategy_plan
            and settings.world > 1,
            OPTIMAL_OFFLOAD: recompute == "optimal" and offload == "overlap" and not runs,
            f"--recompute optimal is planned for the schedule of --parallel; got --schedule {settings.schedule}: name "
            "the layers with --recompute-runs, or use --recompute block": settings.needs_recompute_plan
            and settings.schedule is not None,
            **sizes(settings, offload_ahead="16GiB", offload_host="16GiB"),
            f"--recompute-runs takes pairs of layers such as layer1_0_conv1:add_2; got {runs!r}": any(
                len(run.split(":")) != 2 for run in runs.split(",") if run
            ),
        }
    )
    for flag, text in (("--offload-ahead", settings.offload_ahead), ("--offload-host", settings.offload_host)):
        is_used = offload == "overlap" or (settings.stream != "none" and flag.endswith("host"))
        if bytes_of(text or "") is not None and not is_used:
            errors.append(f"{flag} is about --offload overlap; got --offload {offload}")
    return errors + _of_boxes(settings)


def _of_boxes(settings: StrategySettings) -> list[str]:
    stream, parallel = settings.stream, settings.parallel
    if stream == "none":
        return []
    if stream != "auto" and (not stream.isdecimal() or int(stream) < 1):
        return [f"--stream takes none, auto or the side of boxes in px, such as 512; got {stream!r}"]
    excluded = {
        f"--recompute {settings.recompute}": settings.recompute != "none",
        f"--offload {settings.offload}": settings.offload != "none",
        "--offload-state=parameters": settings.offload_state == "parameters",
        "--norm-statistics deferred": settings.norm_statistics == "deferred",
        "--compile": settings.compile,
    }
    reasons = {
        "fsdp": "whose parameters come and go",
        "zero-bubble": "which splits a backward pass that boxes compute in one",
    }
    reason = reasons.get(parallel, "which does not plan boxes yet")
    refused = settings.needs_strategy_plan or settings.name in ("fsdp", "zero-bubble")
    return [
        f"--stream {stream} recomputes a tile box by box, and is incompatible with {flag}: leave that out"
        for flag in broken(excluded)
    ] + broken(
        {
            f"--stream {stream} is not for --parallel {parallel}, {reason}: name another strategy": refused,
            f"--stream auto is planned for --parallel single, ddp and spatial; got --parallel {parallel}: name the "
            "side of boxes in px, such as 512": not refused and stream == "auto" and settings.name not in STREAMED,
        }
    )


def _of_buckets(settings: StrategySettings) -> list[str]:
    """Return errors of ``--gradient-buckets``, of settings whose ranks and stages fit together."""
    if settings.gradient_buckets is None:
        return []
    if settings.bucket_bytes is None:
        return [f"--gradient-buckets takes a size such as 4MiB, or 0; got {settings.gradient_buckets!r}"]
    sums = settings.name == "ddp" and settings.world > 1
    if settings.splits:
        sums = settings.groups > 1 or settings.group_ranks > settings.depth or kind_of(settings.name).replicas == 2
    if settings.needs_strategy_plan or sums:
        return []
    ranks = f"{settings.world} rank{'s' * (settings.world > 1)}"
    units = ": it sums those of a unit at once" if settings.name == "fsdp" else ""
    return [
        "--gradient-buckets is about gradients that several ranks have of the same parameters; "
        f"--parallel {settings.name} on {ranks} sums none so{units}: leave it out"
    ]
