"""Forecast the images/s of many groups of ranks, each with the same number of tiles.

Takes a model and a machine of a data sheet; gives ``Curve``. A group is as small as the memory allows, and its cuts are
the same however many groups there are. README.md says what the simulation leaves out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from app.planning.machine import named_machine
from app.planning.workload import Workload
from parallel.cost.stage_cost import LayerCost, stage_costs
from parallel.graph.partition import Partition
from parallel.plan.plan import PlanRow, too_small
from parallel.plan.search import Planner
from parallel.plan.step_time import StepTime, links_between, step_time
from parallel.strategy import Strategy

DEVICE, LINK, NETWORK, PER_NODE = "v100-16gb", "nvlink2", "edr-infiniband", 4
"""A node of four V100, as machines of POWER9 and V100 have them, with one port to the network."""
FEW, MORE = 2, 8
"""Tiles of a group in each step. mast takes two by definition, and is master where there are no more."""
DEPTHS = (2, 4, 8, 16, 32)
"""Ranks of a group."""
STRATEGIES = tuple(
    (name, tiles)
    for tiles, replicas in ((FEW, "mast"), (MORE, "master"))
    for name in ("mp-basic", replicas, "1f1b", "bidirectional")
)


@dataclass(frozen=True)
class Changed:
    """An assumption that is varied.

    Attributes:
        network: its bandwidth, as a part of what is assumed otherwise.
        devices: their speed, likewise.
        overlap: gradients are summed during backward passes.
        spread: standard deviation of the time of a group, as a part of it; all wait for the slowest group.
    """

    name: str
    network: float = 1.0
    devices: float = 1.0
    overlap: bool = True
    spread: float = 0.0


CHANGES = (
    Changed("as assumed"),
    Changed("network half as fast", network=0.5),
    Changed("devices twice as fast", devices=2.0),
    Changed("both", network=0.5, devices=2.0),
    Changed("no overlap", overlap=False),
    Changed("groups vary by 1 %", spread=0.01),
)


@dataclass(frozen=True)
class Curve:
    """Forecast of one strategy.

    Attributes:
        strategy: of a single group.
        tiles: of a group in each step.
        peak_bytes: of the fullest rank.
        ranks: depth of a group, and that times 2, 4, ...
        step_s, exchange_s: by number of ranks; the second is what summing gradients adds.
        efficiency: assumption -> by number of ranks, images/s over those of one group times the number of groups.
    """

    strategy: Strategy
    tiles: int
    peak_bytes: int
    ranks: tuple[int, ...]
    step_s: tuple[float, ...]
    exchange_s: tuple[float, ...]
    efficiency: dict[str, tuple[float, ...]]

    @property
    def name(self) -> str:
        return f"{self.strategy.name} {self.strategy.policy_text}".rstrip()

    @property
    def images_per_s(self) -> list[float]:
        """Return images/s by number of ranks."""
        depth = self.strategy.depth
        return [self.tiles * n / depth / step_s for n, step_s in zip(self.ranks, self.step_s, strict=True)]


def simulated(model: str, tile: int, most: int, depths: Sequence[int]) -> list[Curve]:
    """Return curves up to ``most`` ranks, in groups of the first of ``depths`` that fits."""
    machine = named_machine(DEVICE, most, per_node=PER_NODE, link=LINK, network=NETWORK)
    task = Workload(model, tile, 2, optimizer="sgd").task(MORE, machine.estimate)
    planners = {n: Planner(dataclasses.replace(task, batch=n), machine.cluster) for n in (FEW, MORE)}
    return [_curve(planners[tiles], name, tiles, most, depths) for name, tiles in STRATEGIES]


def _curve(planner: Planner, name: str, tiles: int, most: int, depths: Sequence[int]) -> Curve:
    row = _smallest_group(planner, name, tiles, depths)
    partition = planner.partition_of(row)
    depth = row.strategy.depth
    ranks = tuple(depth * 2**k for k in range(int(math.log2(most // depth)) + 1))
    found = [_step(CHANGES[0], planner, row.strategy, partition, n) for n in ranks]
    assert math.isclose(found[0][0], row.step_s or 0.0), (found[0], row)
    efficiency = {}
    for change in CHANGES:
        one, *more = (_step(change, planner, row.strategy, partition, n)[0] for n in ranks)
        efficiency[change.name] = (1.0, *(one / each for each in more))
    steps, exchange = zip(*found, strict=True)
    return Curve(row.strategy, tiles, max(row.peak_bytes), ranks, steps, exchange, efficiency)


def _smallest_group(planner: Planner, name: str, tiles: int, depths: Sequence[int]) -> PlanRow:
    """Microbatches are of one tile; recomputation and a sharded optimizer come in where nothing fits without."""
    rows = []
    for depth in depths:
        rows.append(planner.evaluate(Strategy(name, depth, depth, tiles)))
        if rows[-1].fits:
            return rows[-1]
    raise RuntimeError(f"{name}: {too_small(rows, planner.cluster)}")


def _step(
    change: Changed, planner: Planner, candidate: Strategy, partition: Partition, ranks: int
) -> tuple[float, float]:
    """Seconds of a step on so many ranks, and those that summing gradients adds."""
    groups, task = ranks // candidate.depth, planner.task
    network = planner.cluster.between
    slower = dataclasses.replace(network, bandwidth=change.network * network.bandwidth)
    cluster = dataclasses.replace(planner.cluster, between=slower)
    params = [sum(layer.param_bytes for layer in partition.layers_of(stage)) for stage in range(partition.depth)]

    def forecast(speed: float) -> StepTime:
        costs = task.estimate(1)
        layers = tuple(_faster(layer, speed) for layer in costs.layers)
        return step_time(
            dataclasses.replace(candidate, ranks=ranks, m=candidate.m * groups),
            candidate.m * groups,
            stage_costs(partition, dataclasses.replace(costs, layers=layers)),
            links_between(candidate, partition, cluster),
            params,
            task.slots,
            cluster,
        )

    found = forecast(change.devices)
    # With nothing to compute there is nothing to hide behind.
    exchange_s = found.exchange_s if change.overlap else forecast(math.inf).exchange_s
    computed_s = found.step_s - found.exchange_s
    return computed_s * (1 + change.spread * slowest_of(groups)) + exchange_s, exchange_s


def slowest_of(groups: int) -> float:
    """The largest of so many draws from a standard normal distribution, on average."""
    x = np.linspace(-8, 8, 4001)
    below = np.array([NormalDist().cdf(each) for each in x]) ** groups
    return float(np.sum((below[1:] - below[:-1]) * (x[1:] + x[:-1]) / 2))


def _faster(cost: LayerCost, times: float) -> LayerCost:
    return LayerCost(cost.forward_s / times, cost.backward_s / times, cost.backward_input_s / times)
