"""What is wrong with a strategy as it is asked for: all of it, and how ranks, stages and microbatches are divided."""

from __future__ import annotations

from app.settings.async_faults import async_faults
from app.settings.gradient_faults import gradient_faults
from app.settings.grid_faults import grid_faults
from app.settings.launcher import find_launch
from app.settings.mixed_faults import mixed_faults
from app.settings.policy_faults import policy_faults
from app.settings.share_faults import share_faults
from app.settings.strategy import StrategySettings
from parallel.schedule.registry import SCHEDULES, kind_of


def strategy_faults(settings: StrategySettings) -> list[str]:
    """Return what is wrong with the settings, a line each, held against the number of ranks there are."""
    if settings.ranks < 1:
        return [f"--ranks must be at least 1; got {settings.ranks}"]
    faults = _division_faults(settings) + _option_faults(settings) + policy_faults(settings) + gradient_faults(settings)
    faults += share_faults(settings) + mixed_faults(settings) + async_faults(settings)
    if settings.memory is not None and settings.memory_bytes is None:
        faults.append(f"--memory takes a size such as 512MiB or 16GiB; got {settings.memory!r}")
    if settings.memory_excess == "stop" and settings.memory is None:
        faults.append("--memory-excess=stop holds a run against --memory; give that, too")
    if not settings.timeout_s > 0:
        faults.append(f"--timeout-s must be above 0; got {settings.timeout_s:g}")
    if not settings.join_timeout_s > 0:
        faults.append(f"--join-timeout-s must be above 0; got {settings.join_timeout_s:g}")
    if not faults and not settings.undecided:
        faults = [f"--parallel {fault}" for fault in settings.to_strategy("cpu").stash_faults]
    return faults


def _division_faults(settings: StrategySettings) -> list[str]:
    """How ranks and batch are divided, or the planner may divide them."""
    if settings.undecided:
        return _open_faults(settings)
    return _mesh_faults(settings) or _microbatch_faults(settings)


def _option_faults(settings: StrategySettings) -> list[str]:
    """Options that mean nothing under the strategy asked for."""
    faults = []
    if not settings.splits:
        rule = (
            "--parallel auto chooses this itself: leave it out, or name the strategy"
            if settings.undecided
            else f"--parallel {settings.name} does not split it"
        )
        faults += [
            f"{flag} is about a model split into stages; {rule}"
            for flag, given in (
                ("--stages", settings.stages is not None and not settings.undecided),
                ("--cuts", bool(settings.cuts)),
                ("--schedule", settings.schedule is not None),
                ("--recompute stage", settings.recompute == "stage"),
                ("--compile", settings.compile),
            )
            if given
        ]
    if settings.chunks is not None and settings.name != "interleaved":
        faults.append(f"--chunks is for --parallel interleaved; got --parallel {settings.parallel}")
    if settings.shard_optimizer == "pair" and not (settings.splits and kind_of(settings.name).replicas == 2):
        pairs = ", ".join(name for name, kind in SCHEDULES.items() if kind.replicas == 2)
        faults.append(
            f"--shard-optimizer=pair needs two copies of the model ({pairs}); got --parallel {settings.parallel}"
        )
    if settings.schedule is not None and not settings.schedule.is_file():
        faults.append(f"--schedule {settings.schedule} is not a file")
    return faults


def _open_faults(settings: StrategySettings) -> list[str]:
    """Of what limits the planner's choice."""
    faults = []
    if settings.grid:
        faults.append("--grid is of a strategy that is named, as --parallel spatial; got --parallel auto")
    if settings.stages is not None and (settings.stages < 2 or settings.world % settings.stages):
        faults.append(
            f"--stages must be 2 or more and divide the number of ranks, {settings.world}; got {settings.stages}"
        )
    if settings.microbatches is not None and not 1 <= settings.microbatches <= settings.batch:
        faults.append(f"--microbatches must be 1 to --batch {settings.batch}; got {settings.microbatches}")
    if settings.batch < 1:
        faults.append(f"--batch must be at least 1; got {settings.batch}")
    return faults


def _mesh_faults(settings: StrategySettings) -> list[str]:
    faults = []
    if settings.name == "single" and settings.world > 1:
        faults.append(f"--parallel single uses one process; got {settings.world} ranks")
    if settings.name == "fsdp" and settings.world < 2:
        faults.append(f"--parallel fsdp keeps parts of the model on 2 ranks or more; got --ranks {settings.world}")
    if settings.grid or settings.name == "spatial":
        faults += grid_faults(settings)
    elif settings.splits and settings.world < 2:
        faults.append(f"--parallel {settings.name} splits the model over 2 ranks or more; got --ranks {settings.world}")
    elif settings.splits and not 2 <= settings.depth <= settings.world:
        faults.append(f"--stages must be 2 to the number of ranks, {settings.world}; got {settings.depth}")
    elif settings.splits and settings.world % settings.depth:
        faults.append(
            f"{settings.world} ranks cannot be divided into groups of --stages {settings.depth}: "
            f"use {settings.world - settings.world % settings.depth} ranks, or other --stages"
        )
    if settings.chunks is not None and settings.chunks < 2:
        faults.append(f"--chunks must be at least 2; got {settings.chunks}")
    launch = find_launch()
    if settings.over_torch and launch and launch.mpi:
        faults.append(
            f"--parallel {settings.name} is torch's own and talks over torch.distributed, not MPI; these ranks were "
            "started by an MPI launcher: start them with torchrun or --ranks, or use --parallel ddp"
        )
    return faults


def _microbatch_faults(settings: StrategySettings) -> list[str]:
    """On a mesh that is right."""
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
