"""``--parallel auto`` or ``--recompute optimal`` of a run: planned once, kept in the run folder, the same on all ranks.

Takes the settings and the dataset; writes ``plan.json``, or leaves the one that a resumed run began with. Every rank
is then given its text.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.planning.explained import hours_text
from app.settings.cli import RunError
from app.settings.fields import bytes_of
from app.settings.launcher import find_launch
from app.settings.run import RunConfig
from app.settings.strategy import StrategySettings
from parallel.graph.partition import Partition
from parallel.plan.candidates import RECOMPUTE, MemoryOptions
from parallel.plan.plan import Plan, PlanRow, best_of, too_small
from parallel.plan.search import Planner
from parallel.schedule.registry import SCHEDULES, SPATIAL
from parallel.strategy import STALE, WHOLE, Strategy
from parallel.units import bytes_text
from pipelines.tiles.tiling import WHOLE_SLIDE_MULTIPLE

if TYPE_CHECKING:
    from app.planning.machine import Machine

PLAN = "plan.json"
BOX = 512
"""px of boxes where no limit of memory asks for smaller ones, nor an accelerator for larger ones."""
PLANNED = ("name", "ranks", "depth", "m", "chunks", "cuts", "zero", "grid", "ways")
"""What a plan decides besides the policy for activations."""
ASKED: tuple[str, ...] = ("batch", "memory", "parallel", "grid", "chunks", "cuts", "zero", "recompute", "offload")
ASKED += ("offload_host", "offload_state", "gradient_buckets", "stream")
"""Settings of a strategy that a plan depends on."""


def plan_run(
    config: RunConfig, classes: int, segments: bool, folder: Path, say: Callable[[str], None], tiles: int | None = None
) -> None:
    """Choose a strategy, or what the one that is named recomputes, and write ``plan.json`` into ``folder``. One
    process of the run does this.

    Args:
        segments: a class per pixel is learned, else one per tile.
        tiles: of an epoch, where a step has ``--batch`` of them.

    Raises:
        RunError: nothing fits the memory, or a choice needs a trace of a model that cannot be traced.
        ValueError: there is no such model.
    """
    from app.planning.workload import Workload

    problem = _problem(config, classes, segments)
    kept = _read(plan_text(folder)) if config.resume else None
    # A plan from before something was asked is of the same problem otherwise.
    if kept is not None and {**problem, **kept.problem} == problem and _is_as_asked(kept.row.strategy, config.strategy):
        return
    net = config.net
    Workload(net.model, config.index.side, classes, net.norm, head=net.head).build()  # refuse a wrong --model first
    try:
        plan = _choose(config, classes, segments, problem)
    except ValueError as fault:  # not traced: it can only be computed as a whole
        if config.strategy.needs_recompute_plan:
            raise RunError(f"--recompute optimal has to look into the model: {fault}. Use --recompute none") from fault
        if config.strategy.stream == "auto":
            raise RunError(f"--stream has to look into the model: {fault}. Leave --stream out") from fault
        world = config.strategy.world
        m = config.strategy.microbatches or world
        row = PlanRow(Strategy("ddp" if world > 1 else "single", world, 1, m))
        plan = Plan(problem, row, f"none: {fault}", None)
        say(f"plan: {row.strategy}; the model cannot be planned for: {fault}")
    else:
        if config.stream.bag:  # a step has one more forward pass of each tile, which plans leave out
            plan = dataclasses.replace(plan, row=dataclasses.replace(plan.row, images_per_second=None, step_s=None))
        speed = "" if plan.row.images_per_second is None else f", {plan.row.images_per_second:.3g} images/s"
        peak = bytes_text(max(plan.row.peak_bytes))
        say(f"plan: {plan.row.strategy}{speed}, {peak} on the fullest rank expected")
        if tiles and plan.row.step_s:
            say(f"plan: an epoch takes {hours_text(tiles, config.strategy.batch, plan.row.step_s)}")
    (folder / PLAN).write_text(plan.dumps())


def _is_as_asked(planned: Strategy, settings: StrategySettings) -> bool:
    """Return whether a plan has the microbatches and stages that ``settings`` ask for, where they do."""
    return settings.microbatches in (None, planned.m) and settings.stages in (None, planned.depth)


def decided(settings: StrategySettings, folder: Path, device: str, text: str) -> Strategy:
    """Return the strategy that is asked for, or that the plan in ``folder`` chose where that was left to it.

    Args:
        device: "cpu" or "cuda".

    Raises:
        RunError: the plan is missing or damaged.
    """
    if not settings.needs_plan:
        return settings.to_strategy(device)
    kept = _read(text)
    if kept is None:
        raise RunError(f"{folder / PLAN} is missing or damaged: remove {folder}, or name a strategy with --parallel")
    return follow(settings, kept.row, device)


def follow(settings: StrategySettings, row: PlanRow, device: str) -> Strategy:
    """Return the strategy of ``row``, and as ``settings`` request it what plans do not choose."""
    asked, policy = settings.to_strategy(device), row.strategy.policy
    asked = asked.under(
        recompute=policy.recompute,
        chosen=policy.chosen,
        offload=policy.offload if policy.moves else asked.policy.offload,
        ahead=policy.ahead if policy.ahead and settings.offload_ahead is None else asked.policy.ahead,
        stream=policy.stream,
        map_bytes=policy.map_bytes,
        host_bytes=asked.policy.host_bytes if policy.host_bytes is None else policy.host_bytes,
    )
    return dataclasses.replace(asked, **{name: getattr(row.strategy, name) for name in PLANNED})


def savings_of(settings: StrategySettings) -> MemoryOptions:
    """Return the ways to need less memory that a search may use: those requested, else all."""
    return MemoryOptions(
        RECOMPUTE if settings.recompute == "none" else (settings.recompute,),
        (False, True) if settings.offload == "none" else (True,),
        stream=settings.offload_state != "parameters" and settings.norm_statistics == "per-microbatch",
        zero=(0, 1) if settings.bucket_bytes == 0 else MemoryOptions.zero,
    )


def names_for(settings: StrategySettings, bag: int = 0) -> list[str]:
    """Return the strategies that the ranks of this run can execute; ``bag`` as ``--bag``."""
    launch, on_host = find_launch(), settings.offload_state == "parameters"
    excluded = {
        SPATIAL.name: on_host or settings.norm_statistics == "deferred",
        "zero-bubble": on_host,
        "fsdp": on_host or bag or (launch and launch.mpi),
    }
    return [n for n in (*WHOLE, SPATIAL.name, *SCHEDULES) if n not in STALE and not excluded.get(n)]


def _choose(config: RunConfig, classes: int, segments: bool, problem: dict[str, Any]) -> Plan:
    strategy = config.strategy
    timed = strategy.world > 1 or strategy.needs_recompute_plan
    planner, row = _best(config, classes, segments, timed)
    # One rank has hardly anything to choose by time, so nothing is calibrated for it until memory is short.
    if not timed and row.strategy.policy.saves and strategy.recompute == strategy.offload == "none":
        planner, row = _best(config, classes, segments, True)
    return planner.plan(problem, row)


def _best(config: RunConfig, classes: int, segments: bool, timed: bool) -> tuple[Planner, PlanRow]:
    """Return the strategy that fits and is fastest; the first that fits unless ``timed``."""
    strategy = config.strategy
    machine = machine_of(config, timed=timed, reserved=config.stream.read_ahead_bytes)
    planner = _planner(config, classes, segments, machine)
    if not strategy.needs_strategy_plan:
        decide = _with_boxes if strategy.stream == "auto" else _with_runs
        return planner, decide(strategy, planner)
    names, m = names_for(strategy, config.stream.bag), strategy.microbatches
    savings = savings_of(strategy)
    rows = list(planner.search(names, ranks=strategy.world, depth=strategy.stages, m=m, savings=savings))
    best = best_of(planner.tune_recompute(rows, savings))
    if best is None:
        raise RunError(too_small(rows, planner.cluster))
    return planner, best


def _planner(config: RunConfig, classes: int, segments: bool, machine: Machine) -> Planner:
    """Return a planner of the model of ``config``; a ValueError where it cannot be traced."""
    from app.planning.workload import Workload  # torch is imported once the settings are known to be right

    net, rule = config.net, config.optimization
    names = net.model, config.index.side, classes, net.norm, segments, rule.optimizer
    work = Workload(*names, machine.autocast, net.head, rule.ema > 0)
    return Planner(work.task(config.strategy.batch, machine.estimate), machine.cluster)


def _with_runs(strategy: StrategySettings, planner: Planner) -> PlanRow:
    """Return the strategy that is named, with the best choice of what it recomputes."""
    asked = strategy.to_strategy("cpu")
    mesh = asked.name, asked.ranks, asked.depth, asked.m, asked.chunks
    candidate = Strategy(*mesh, zero=asked.zero, grid=asked.grid)
    candidate = candidate.under(recompute="optimal", offload=asked.policy.offload)
    graph, _ = planner.stages.microbatch(planner.stages.tiles(candidate))
    try:
        split = asked.partition(graph) if asked.splits else Partition(graph, (0,))
    except ValueError as fault:
        raise RunError(str(fault)) from fault
    row = planner.forecast(candidate, partition=split)
    if row is None:
        raise RunError(
            f"--recompute optimal found nothing of {candidate} that fits in "
            f"{bytes_text(planner.cluster.memory_bytes)} a rank: use more ranks, --recompute block with --offload "
            "overlap, or a smaller --tile"
        )
    return row


def _with_boxes(strategy: StrategySettings, planner: Planner) -> PlanRow:
    """Return the strategy that is named, in the largest boxes that fit the memory."""
    asked = strategy.to_strategy("cpu")
    candidate = Strategy(asked.name, asked.ranks, asked.depth, asked.m, zero=asked.zero, grid=asked.grid)
    candidate = candidate.under(host_bytes=asked.policy.host_bytes)
    streamed, fault = planner.task.in_boxes()
    if streamed is None:
        raise RunError(fault)
    if not planner.stages.goes_in_boxes(candidate):
        raise RunError(
            f"--stream auto finds nothing of this model that a team of {asked.grid} can divide: use larger tiles, "
            "another --grid, or --parallel ddp"
        )
    if strategy.memory is None and planner.cluster.kind == "cpu":
        row = planner.forecast(candidate.under(stream=BOX))
    else:
        row = planner.in_boxes(candidate)
    if row is None:
        px, parts = max(streamed.region.side), f" divided by {asked.grid}" if asked.grid else ""
        raise RunError(f"tiles of {px} px{parts} are one box: leave --stream out")
    if not row.fits and strategy.memory is not None:
        raise RunError(
            f"--stream auto: {row.strategy} takes {bytes_text(max(row.peak_bytes))} of a rank's "
            f"{bytes_text(planner.cluster.memory_bytes)} and {bytes_text(row.host_bytes)} of the host, "
            f"{bytes_text(row.over_bytes)} too many; limited by {planner.limit(row)}"
        )
    return row


def machine_of(config: RunConfig, *, timed: bool, reserved: int = 0) -> Machine:
    """Return this machine, as a run uses it.

    Args:
        timed: calibrated, where it was not yet.
        reserved: bytes of the host that are not for the model.
    """
    from app.planning.machine import this_machine

    strategy = config.strategy
    launch = find_launch()
    return this_machine(
        strategy.world,
        memory=strategy.memory_bytes,
        # No limit for boxes, which write to files what does not fit.
        host_memory=bytes_of(strategy.offload_host or "") if strategy.offload != "none" else None,
        device=strategy.device,
        precision=strategy.computed_precision,
        channels_last=strategy.channels_last,
        per_node=launch.local_world if launch else None,
        reserved=reserved,
        timed=timed,
        advice="name a strategy with --parallel"
        if strategy.needs_strategy_plan
        else "leave out --recompute optimal and --stream auto",
    )


def _problem(config: RunConfig, classes: int, segments: bool) -> dict[str, Any]:
    from app.launch.place import device_kind
    from app.planning.machine import precision_here
    from parallel.profile.gpu import gpu_at

    strategy = config.strategy
    kind = device_kind(strategy.device)
    return {
        "model": config.net.model,
        "norm": config.net.norm,
        "head": config.net.head,
        "classes": classes,
        "task": "segment" if segments else "classify",
        "tile_px": config.index.tile,
        "ranks": strategy.world,
        "optimizer": config.optimization.optimizer,
        "averages": config.optimization.ema > 0,
        "device": kind,
        "gpu": gpu_at(0).name if kind == "cuda" else None,
        "precision": precision_here(strategy.computed_precision, strategy.device),
        **{name: getattr(strategy, name) for name in ASKED},
    }


def plan_text(folder: Path) -> str:
    """Return the plan that ``plan_run`` wrote into ``folder``; "" where there is none that can be read."""
    try:
        return (folder / PLAN).read_text()
    except (OSError, ValueError):
        return ""


def planned_speed(folder: Path, strategy: str) -> float | None:
    """Return the images per second that the plan in ``folder`` expects of ``strategy``; None where it has no time or is
    of another one."""
    kept = _read(plan_text(folder))
    return kept.row.images_per_second if kept is not None and kept.row.strategy.name == strategy else None


def _read(text: str) -> Plan | None:
    try:
        return Plan.loads(text)
    except ValueError:
        return None


def as_square(config: RunConfig, largest: tuple[int, int]) -> RunConfig:
    """Return ``config`` with square tiles of one size that have the pixels of the largest slide of ``--tile slide``.

    Args:
        largest: width and height in px.
    """
    multiple = config.index.stride or WHOLE_SLIDE_MULTIPLE
    side = multiple * math.ceil(math.sqrt(largest[0] * largest[1]) / multiple)
    return dataclasses.replace(config, index=dataclasses.replace(config.index, tile=side, stride=None))


def in_boxes(largest: tuple[int, int]) -> str:
    """Return advice about slides that are too large to be computed whole."""
    return (
        f"the largest slide has {largest[0]} x {largest[1]} px: compute slides in boxes, with --parallel single or ddp "
        f"and --stream {BOX}, or ask for a coarser --mpp"
    )


def check_largest(config: RunConfig, largest: tuple[int, int], classes: int, segments: bool) -> None:
    """Refuse slides that a strategy which is named, without boxes, cannot compute.

    Raises:
        RunError: the largest takes more than there is, by plan.
    """
    asked = config.strategy
    # Plans count all layers as trained, and their state as on the device.
    if asked.stream_px is not None or config.optimization.freeze or asked.offload_state != "none":
        return
    machine = machine_of(config, timed=False)
    try:
        planner = _planner(as_square(config, largest), classes, segments, machine)
    except ValueError:  # not traced: its memory is unknown
        return
    savings = MemoryOptions((asked.recompute,), (asked.offload != "none",), stream=False)
    rows = planner.search([asked.name], ranks=asked.world, m=asked.m, savings=savings)
    least = min((max(row.peak_bytes) for row in rows if row.peak_bytes), default=0)
    if least > machine.cluster.memory_bytes:
        raise RunError(
            f"--tile slide takes {bytes_text(least)} a rank, of {bytes_text(machine.cluster.memory_bytes)}; "
            + in_boxes(largest)
        )
