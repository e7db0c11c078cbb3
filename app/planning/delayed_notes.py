"""Lines of ``app.plan --parallel pipedream``: that it is not the plain step, and when it would win.

PipeDream's argument is that the values between two stages are fewer bytes than the gradients that data parallelism
sums. They grow with the pixels of a tile and gradients do not, so large tiles reverse it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from parallel.graph.partition import cut_positions
from parallel.memory.windows import Windows, thinned
from parallel.plan.balance import PLACES
from parallel.plan.plan import PlanRow
from parallel.plan.replicated import best_replicated
from parallel.plan.search import Planner
from parallel.schedule.action import Kind
from parallel.strategy import DELAYED
from parallel.units import bytes_text


def delayed_notes(planner: Planner, row: PlanRow, tile: int) -> Iterator[str]:
    """Yield what there is to say of the best row of pipedream.

    Args:
        tile: side in px.
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
