"""A plan explained: the stages of a split and their slowest, why each strategy is or is not the plan, and hours.

Takes the rows of a planner; prints tables and lines of at most 80 columns where names of layers allow.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

from app.planning.command import PlanCommand
from app.planning.table import best_of_each
from app.settings.cli import print_table
from app.settings.optimization import OptimizerSettings
from parallel.graph.layers import INPUT, OUTPUT
from parallel.graph.partition import bytes_across, cut_positions, partition_equal
from parallel.memory.windows import Windows, thinned
from parallel.plan.balance import PLACES, best_replicated
from parallel.plan.evaluate import COMPUTING, step_shares
from parallel.plan.plan import BOXES, SIMPLER, PlanRow, best_of
from parallel.plan.search import Planner
from parallel.plan.step_time import schedule_of
from parallel.schedule.action import Kind
from parallel.schedule.shares import FINE, coarseness
from parallel.strategy import DELAYED, Strategy
from parallel.units import bytes_text, seconds_text
from pipelines.catalog.table import counted

NOTABLE = 0.02
"""Part of a step that is said to make a strategy slower."""
CAUSES = 2
"""That are named of a strategy."""
NAME = 22
"""Most characters of a layer's name; longer ones lose their beginning."""
WORTH = 0.03
"""Part of the images per second that devices have to add not to be advised against: less is within a plan's error."""


def print_reasons(planner: Planner, rows: Sequence[PlanRow], best: PlanRow | None) -> None:
    """Print why each strategy is or is not the plan, in the order of the table of strategies.

    Args:
        best: the plan; None where nothing fits.
    """
    spent = step_shares(planner, best) if best is not None and best.step_s else {}
    lines = [(row.strategy.name, reason(planner, row, best, spent)) for row in best_of_each(rows, best)]
    print_table("why; shares are of a step", ("", ""), lines)


def reason(planner: Planner, row: PlanRow, best: PlanRow | None, spent: Mapping[str, float]) -> str:
    """Return why ``row`` is or is not the plan."""
    if row.refused:
        return f"cannot run: {row.refused}"
    if not row.fits:
        return f"does not fit: {bytes_text(row.over_bytes)} over; {planner.limit(row)}"
    if best is None:
        return "fits: the plan if it is named"
    if not row.images_per_second or not best.images_per_second:
        return "the plan" if row is best else "fits; times are not known"
    if row is best:
        return f"fastest that fits{_where_time_goes(spent)}"
    slower = best.images_per_second / row.images_per_second
    if slower < 1 and row.strategy.ways > 1:
        return f"{1 / slower:.2f}x as fast: the plan if it is named"
    if slower < 1 / (1 + SIMPLER):
        return f"{1 / slower:.2f}x as fast: boxes are the plan if they gain {100 * (BOXES + SIMPLER):.0f} %"
    if slower < 1 + SIMPLER:
        return f"as fast within {100 * SIMPLER:.0f} %; the simpler strategy is the plan"
    return f"{slower:.2f}x slower{_causes(planner, row, best, spent)}"


def _where_time_goes(spent: Mapping[str, float]) -> str:
    lost = sorted(((share, what) for what, share in spent.items() if what != COMPUTING), reverse=True)
    words = [f"{100 * share:.0f} % {what}" for share, what in lost if share >= NOTABLE]
    return ", ".join([f": {100 * spent[COMPUTING]:.0f} % computing", *words[:1]])


def _causes(planner: Planner, row: PlanRow, best: PlanRow, spent: Mapping[str, float]) -> str:
    """Return what of a step of ``row`` takes longer than in the plan, the longest first."""
    assert row.step_s is not None
    assert best.step_s is not None
    shares, relative = step_shares(planner, row), best.step_s / row.step_s
    more = {what: share - relative * spent.get(what, 0.0) for what, share in shares.items()}
    smaller = planner.stages.tiles(row.strategy) < planner.stages.tiles(best.strategy)
    names = {COMPUTING: "smaller microbatches" if smaller else "uneven shares"}
    lost = sorted(((share, names.get(what, what)) for what, share in more.items()), reverse=True)[:CAUSES]
    words = [f"{100 * share:.0f} % {what}" for share, what in lost if share >= NOTABLE or share == lost[0][0]]
    return f": {', '.join(words)}"


def print_stages(planner: Planner, rows: Sequence[PlanRow], best: PlanRow) -> None:
    """Print the stages of the plan, or of the fastest split that fits, and the cost of a split into equal numbers of
    layers; nothing where no split fits."""
    splits = [row for row in rows if row.strategy.stages > 1 and not row.strategy.paired]
    row = best if best.strategy.stages > 1 else best_of(splits)
    if row is None:
        return
    strategy, partition = row.strategy, planner.partition_of(row)
    graph, tiles = partition.graph, planner.stages.tiles(strategy)
    across = bytes_across(graph)
    speeds = planner.cluster.speeds_of(range(strategy.depth))
    costs = planner.stages.stage_costs(strategy, partition)
    seconds = [(cost.forward_s + cost.backward_s) / speeds[k % strategy.depth] for k, cost in enumerate(costs)]
    slowest = _slowest(strategy, seconds)
    lines = []
    for stage, (start, cost) in enumerate(zip(partition.starts, costs, strict=True)):
        layers = partition.layers_of(stage)
        name = "input" if layers[0].kind == INPUT else layers[0].name
        speed = speeds[stage % strategy.depth]
        lines.append(
            (
                str(stage),
                name if len(name) <= NAME else f"…{name[1 - NAME :]}",
                str(len(layers)),
                seconds_text(cost.forward_s / speed),
                seconds_text(cost.backward_s / speed),
                bytes_text(sum(graph.owned_bytes[start : start + len(layers)])),
                bytes_text(across[start + len(layers)]) if stage + 1 < partition.depth else "",
                ("<- slowest rank" if len(slowest) > 1 else "<- slowest") if stage in slowest else "",
            )
        )
    which = "" if row is best else ", the fastest split"
    print_table(
        f"stages of {strategy}{which}; a microbatch has {counted(tiles, 'tile')}",
        ("stage", "from", "layers", "forward", "backward", "params", "over cut", ""),
        lines,
    )
    print(f"  equal numbers of layers: {_equal_layers(planner, row)}")


def _slowest(strategy: Strategy, seconds: Sequence[float]) -> list[int]:
    """Return the stages of the slowest rank; none where ranks with several stages are as fast as each other."""
    mesh = schedule_of(strategy)[1]
    held = [sorted({stage for stage, _ in mesh.held_by(rank)}) for rank in range(strategy.depth)]
    loads = [sum(seconds[stage] for stage in stages) for stages in held]
    most = max(loads)
    return [] if len(held[0]) > 1 and most <= (1 + SIMPLER) * min(loads) else held[loads.index(most)]


def _equal_layers(planner: Planner, row: PlanRow) -> str:
    """Return what a split into stages of equal numbers of layers would cost."""
    graph, _ = planner.stages.of(row.strategy)
    counts = [float(layer.kind not in (INPUT, OUTPUT, "get_attr")) for layer in graph.layers]
    equal = partition_equal(graph, row.strategy.stages, counts)
    other = planner.forecast(dataclasses.replace(row.strategy, cuts=()), partition=equal)
    if other is None:
        return "would not fit, whatever is recomputed"
    assert other.step_s is not None
    assert row.step_s is not None
    factor = other.step_s / row.step_s
    words = "as fast" if factor < 1 + SIMPLER else f"{factor:.2f}x slower"
    return words if other.fits else f"{words}, and {bytes_text(other.over_bytes)} over"


def train_line(command: PlanCommand, strategy: Strategy) -> str:
    """Return the command that trains as ``strategy``, on two lines; slides and run folder are left to the user."""
    policy, grid = strategy.policy, strategy.grid
    words = ["--model", shlex.quote(command.model), "\\\n    --tile", str(command.tile)]
    words += ["--batch", str(command.step_tiles)]
    words += ["--norm", command.norm] if command.norm != PlanCommand.norm else []
    words += ["--head", command.head] if command.head != PlanCommand.head else []
    words += ["--optimizer", command.optimizer] if command.optimizer != OptimizerSettings.optimizer else []
    trained = command.precision not in ("auto", "fp16")  # fp16 can only be planned
    words += ["--precision", command.precision] if trained else []
    words += ["--ranks", str(strategy.ranks), "--parallel", strategy.name, "--microbatches", str(strategy.m)]
    if strategy.ways > 1 or (strategy.depth > 1 and strategy.groups > 1):
        words += ["--stages", str(max(strategy.ways, strategy.depth))]
    words += [shlex.quote(f"--cuts={','.join(strategy.cuts)}")] if strategy.cuts else []
    words += ["--grid", str(grid)] if grid else []
    words += ["--recompute", policy.recompute] if policy.recompute != "none" else []
    words += ["--memory", command.memory] if policy.recompute == "optimal" and command.memory else []
    words += ["--offload", policy.offload] if policy.moves else []
    words += ["--offload-host", command.host_memory] if command.host_memory and (policy.moves or policy.stream) else []
    words += ["--stream", str(policy.stream)] if policy.stream else []
    words += ["--zero", str(strategy.zero)] if strategy.zero else []
    words += ["--shares", ",".join(str(len(share)) for share in strategy.shares)] if strategy.shares else []
    return f"python -m app.train --slides DIR --out RUN {' '.join(words)}"


def hours_text(tiles: int, batch: int, step_s: float) -> str:
    """Return how long ``tiles`` tiles take in steps of ``batch``: hours, or minutes of less than a tenth of one.

    >>> hours_text(1_000_000, 8, 0.474), hours_text(1000, 8, 1.0)
    ('16.5 h for 1,000,000 tiles, 125,000 steps of 474 ms', '2.1 min for 1,000 tiles, 125 steps of 1 s')
    """
    steps = -(-tiles // batch)
    hours = steps * step_s / 3600
    duration = f"{60 * hours:.1f} min" if hours < 0.1 else f"{hours:.3g} h" if hours < 1000 else f"{hours:,.0f} h"
    return f"{duration} for {tiles:,} tiles, {steps:,} steps of {seconds_text(step_s)}"


def delayed_notes(planner: Planner, row: PlanRow, tile: int) -> Iterator[str]:
    """Yield lines on the best row of pipedream: it is not the plain step, and when it would win.

    Its argument is that values between stages are fewer bytes than the gradients that data parallelism sums. They grow
    with the pixels of a tile and gradients do not, so large tiles reverse it.
    """
    strategy = row.strategy
    graph, costs = planner.stages.of(strategy)
    starts = planner.partition_of(row).starts
    places = thinned(graph, [0, *cut_positions(graph), len(graph.layers)], PLACES)
    windows = Windows(graph, costs.seconds, sorted({*places, *starts}))
    timeline = planner.timeline(row)
    updates = {rank: sum(span.action.kind is Kind.UPDATE for span in spans) for rank, spans in timeline.spans.items()}
    full_s = max(timeline.busy_s(rank) / count for rank, count in updates.items())
    yield (
        f"{strategy.name}: {DELAYED}; no plan chooses it by itself. A microbatch takes {full_s:.3g} s "
        f"while the pipeline is full, and ranks wait while it fills and empties, once a step: use many microbatches"
    )
    passed = windows.received_bytes[:, -1] + windows.returned_bytes[:, -1]
    sent = strategy.m * max(int(passed[windows.positions.index(start)]) for start in starts[1:])
    summed = 2 * (strategy.ranks - 1) * int(windows.param_bytes[0, -1]) // strategy.ranks
    side = tile * math.sqrt(summed / sent)
    yield (
        f"a step passes {bytes_text(sent)} over its widest cut, and each rank of ddp sends {bytes_text(summed)} of "
        f"gradients: pipedream sends less below {side:.0f} px, for values grow with the pixels and gradients do not"
    )
    link = planner.cluster.link(0, strategy.ranks - 1)
    assert link is not None
    each = range(len(windows) - 1)
    seconds, stages = best_replicated(
        [float(windows.seconds[n, n + 1]) for n in each],
        [float(windows.param_bytes[n, n + 1]) for n in each],
        [float(passed[n + 1]) / 2 for n in each],
        strategy.ranks,
        link.bandwidth,
    )
    ranks = "-".join(str(stage.ranks) for stage in stages)
    data_parallel = " (data parallelism)" if len(stages) == 1 else ""
    yield (
        f"with replicas of stages, which are planned and not run, PipeDream would take {ranks} ranks a "
        f"stage{data_parallel}: {seconds:.3g} s a microbatch"
    )


def unequal_notes(
    devices: Sequence[str], speeds: Sequence[float], rows: Sequence[PlanRow], without: Callable[[str], float | None]
) -> Iterator[str]:
    """Yield lines where devices differ: the gain of shares by speed, and what the slower devices add.

    Args:
        devices, speeds: of the ranks; the slowest device's speed is 1.
        without: returns the images per second of the best plan without the devices of a name; None: there is none.
    """
    of_device = dict(zip(devices, speeds, strict=True))
    fastest_first = sorted(of_device.items(), key=lambda item: -item[1])
    yield "speeds: " + ", ".join(f"{devices.count(name)} x {name} {speed:.2f}" for name, speed in fastest_first)
    for name in dict.fromkeys(row.strategy.name for row in rows if row.strategy.shares):
        yield _gain([row for row in rows if row.strategy.name == name])
    best = best_of(rows)
    if best is None or not best.images_per_second:
        return
    for device in [name for name, speed in of_device.items() if speed < max(speeds)]:
        others = without(device)
        if others is not None:
            gain = best.images_per_second / others - 1
            advice = ", as many or more: leave them out" if gain < WORTH else f"; they add {gain:.0%}"
            yield f"without {devices.count(device)} x {device}: {others:.3g} images/s{advice}"


def _gain(rows: Sequence[PlanRow]) -> str:
    """Return the gain of a strategy by shares that follow speeds."""
    shared = best_of(row for row in rows if row.strategy.shares)
    equal = best_of(row for row in rows if not row.strategy.shares)
    if shared is None or equal is None or not shared.images_per_second or not equal.images_per_second:
        return f"{rows[0].strategy.name}: no shares by speed fit"
    strategy = shared.strategy
    counts = ",".join(str(len(share)) for share in strategy.shares)
    gain = shared.images_per_second / equal.images_per_second
    text = (
        f"{strategy.name} --shares {counts}: {shared.images_per_second:.3g} images/s, {gain:.2f} times its best with "
        "equal shares"
    )
    if strategy.m < FINE * strategy.groups:
        text += f"; {strategy.m} microbatches follow speeds within {coarseness(strategy.m, strategy.groups):.0%}"
    return text
