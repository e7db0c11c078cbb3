"""Plan what trains within a number of bytes; no tensor is made here.

Takes names and numbers; gives rows of a plan whose usable memory is exactly the budget, since what is counted is
tensors and not an allocator's reserve. Times are those of a nominal device: only bytes matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from app.planning.workload import Workload
from parallel.cost.cluster import Cluster, LinkSpec
from parallel.cost.stage_cost import Costs, LayerCost
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import equal_cost
from parallel.graph.scale import with_tiles
from parallel.memory.policy import KEEP_ALL, ActivationPolicy
from parallel.memory.rank_bytes import RankBytes
from parallel.plan.candidates import MemoryOptions
from parallel.plan.plan import PlanRow
from parallel.plan.search import Planner
from parallel.schedule.registry import SPATIAL
from parallel.strategy import WHOLE, Strategy

BATCH = 4
"""Tiles of a step, each a microbatch of its own."""
CLASSES = 2
GIB = 2**30
LINK = LinkSpec("shared memory", 4.5e9, 1e-4)
"""Orders plans that fit; which do, and what they take, does not depend on it."""
ROOM = 19 * GIB
"""Bytes of this machine that a case of one rank may take, on the device and on the host, which are one here."""
HOST = {1: 15.5, 2: 7.75, 4: 4.5}
"""Ranks -> GiB of this machine that each may fill as a host: it has 23, and the ranks' devices are in them, too."""


def planner(
    model: str, px: int, ranks: int, budget: int, batch: int = BATCH, *, state_on_host: bool = False
) -> Planner:
    """Return a planner for ranks of ``budget`` usable bytes each, and ``batch`` tiles a step.

    Args:
        state_on_host: the optimizer and its state are there.
    """
    cluster = Cluster("a budget", budget, ranks, float(ranks), LINK, LINK, 1e10, "cpu")
    cluster = dataclasses.replace(cluster, memory_bytes=cluster.needed_bytes(budget))
    cluster = dataclasses.replace(cluster, host_bytes=HOST[ranks] * GIB)
    task = Workload(model, px, CLASSES).task(batch, _nominal)
    return Planner(dataclasses.replace(task, slots=0) if state_on_host else task, cluster)


def _nominal(graph: LayerGraph) -> Callable[[int], Costs]:
    def costs(tiles: int) -> Costs:
        seconds = equal_cost(with_tiles(graph, tiles))
        return Costs(tuple(LayerCost(s / 3, 2 * s / 3, s / 3) for s in seconds), "nominal")

    return costs


def alone(
    model: str, px: int, batch: int, policy: ActivationPolicy = KEEP_ALL
) -> tuple[dict[str, Any], RankBytes, int]:
    """Return a step of one rank without a limit, as ``trial`` takes it, and the bytes predicted of it there and on the
    host."""
    made, candidate = planner(model, px, 1, 2 * GIB, batch), Strategy("single", 1, 1, batch, policy=policy)
    partition = made.stages.partition(candidate, within=False)
    assert partition is not None
    case = {"model": model, "px": px, "batch": batch, "row": PlanRow(candidate).to_json(), "state_on_host": False}
    return case, made.stages.rank_bytes(candidate, partition, 0), made.stages.host_bytes(candidate, partition)


def least(model: str, px: int, ranks: int, budget: int, name: str, savings: MemoryOptions) -> PlanRow | None:
    """The fewest_bytes candidate of a strategy with microbatches of one tile, its stages spread over all ranks. Where
    activations go to the host, the optimizer is there, too."""
    made = planner(model, px, ranks, budget, state_on_host=savings.offload == (True,))
    depth = None if name in (*WHOLE, SPATIAL.name) else ranks
    rows = [row for row in made.search([name], ranks=ranks, depth=depth, m=BATCH, savings=savings) if not row.refused]
    return min(rows, key=lambda row: (row.over_bytes, max(row.peak_bytes)), default=None)
