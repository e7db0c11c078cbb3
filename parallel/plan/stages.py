"""The stages of every candidate of a plan: the model cut anew for each number of stages and size of microbatch.

Takes a task and a cluster; gives partitions, what their stages cost and hold. Candidates share what they can: the graph
for a size of microbatch, its windows, partitions, what stages hold. A model that each rank computes whole is one stage.
No torch here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel import remembered
from parallel.cost.cluster import Cluster
from parallel.cost.stage_cost import Costs, stage_costs
from parallel.graph.blocks import block_cuts
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition, cut_positions, equal_cost
from parallel.graph.scale import with_tiles
from parallel.memory.gathered import WHOLE, Sharding, gathered_peak
from parallel.memory.policy import MIB, WINDOW, module_runs, segments_of
from parallel.memory.rank_bytes import RankBytes, host_bytes, in_flight, rank_bytes, sharded_bytes
from parallel.memory.recompute_search import Runs, chosen_runs
from parallel.memory.stage_bytes import StageBytes, StageMemory
from parallel.memory.windows import Windows
from parallel.plan.added_costs import BranchedParts, policy_costs
from parallel.plan.balance import MemoryRule, partition_optimal
from parallel.plan.part_costs import Divisible, TeamParts
from parallel.plan.plan import Limit
from parallel.plan.step_time import largest_weights, schedule_of
from parallel.plan.streamed import Streamed, StreamedStages
from parallel.schedule.timeline import StageCost
from parallel.space.team import TeamGrid
from parallel.strategy import STREAMED, Strategy

MANY = 400
"""Places for cuts: a model with more is cut between blocks only, which costs it nothing and saves minutes."""
DEEP = 16
"""Ranks of a group beyond which every stage is balanced, and not pairs of stages against each other."""
OWN_MAPS = 0.95
"""Of the host's bytes that a member of a team stores maps in, for those of its own part."""
LEAST_S = 1e-12
"""Of a layer's forward pass."""

_Size = tuple[int, TeamGrid | int | None]
"""Tiles of a microbatch, and the grid of the teams that divide each of them, or the members that share branches."""


@dataclass(frozen=True)
class Task:
    """Training task: model, batch and costs.

    Attributes:
        graph: of the model and its loss, traced with a microbatch of one tile.
        estimate: returns what the layers cost with a microbatch of so many tiles.
        batch: tiles of a step over all ranks.
        slots: values that the optimizer keeps for each parameter: 1 for momentum, 2 for Adam.
        refused: strategy -> why the model cannot be trained with it.
        one_copy: why no two ranks may hold a copy of a stage; empty where they may.
        sharding: units and blocks of fsdp.
        in_boxes: gives the model as streaming sees it, or None and why it cannot be computed box by box.
        in_teams: gives the model as teams see it, or None and why no tile of it can be divided.
    """

    graph: LayerGraph
    estimate: Callable[[int], Costs]
    batch: int
    slots: int
    refused: Mapping[str, str] = field(default_factory=dict)
    one_copy: str = ""
    sharding: Sharding = WHOLE
    in_boxes: Callable[[], tuple[Streamed | None, str]] = lambda: (None, "")
    in_teams: Callable[[], tuple[Divisible | None, str]] = lambda: (None, "")


class StageCache:
    """Cache of the stages of candidates.

    Attributes:
        places: positions in the graph's layers at which stages may begin.
    """

    def __init__(self, task: Task, cluster: Cluster) -> None:
        self.task, self.cluster = task, cluster
        places = cut_positions(task.graph)
        blocks = block_cuts(task.graph) if len(places) > MANY else ()
        self.places = list(blocks) or places
        self._partitions: dict[object, Partition | None] = {}
        self.branched = BranchedParts(task.graph, task.estimate, cluster)

    @functools.cached_property
    def _streamed(self) -> StreamedStages | None:
        streamed, _ = self.task.in_boxes()
        return None if streamed is None else StreamedStages(streamed, self.cluster)

    @functools.cached_property
    def teams(self) -> TeamParts | None:
        """Parts of the model by the grid of its teams; None where no tile of it can be divided."""
        divisible, _ = self.task.in_teams()
        return None if divisible is None else TeamParts(divisible, self.task.graph, self.cluster)

    def goes_in_boxes(self, candidate: Strategy) -> bool:
        """Return whether a candidate's tiles, or members' parts of them, can be computed box by box."""
        streamed = self._streamed if candidate.name in STREAMED else None
        return streamed is not None and streamed.region(candidate.grid) is not None

    def box_sides(self, candidate: Strategy) -> list[int]:
        """Return the sides of boxes that a candidate's tiles, or members' parts of them, may be computed in, in px;
        none where they cannot be."""
        streamed = self._streamed if self.goes_in_boxes(candidate) else None
        return [] if streamed is None else streamed.sides(candidate.grid)

    def within_host(self, candidate: Strategy) -> Strategy:
        """Return ``candidate``, computed box by box, with fewer maps stored where the host has not memory for those
        that are usual."""
        assert self._streamed is not None
        host, policy = self.cluster.host_bytes, candidate.policy
        tiles = self.tiles(candidate)
        if policy.host_bytes is not None or not host or self._streamed.fits_host(candidate, tiles, host):
            return candidate
        left = int(host) - self._streamed.tile_bytes(tiles)
        if candidate.grid:  # rows of others that a member holds come to what it stores of its own
            left = int(OWN_MAPS * left)
        return candidate.under(host_bytes=max(1, left))

    def limit_in_boxes(self, candidate: Strategy) -> Limit:
        """Return what stands in the way of a larger tile, of a candidate that is computed box by box."""
        assert self._streamed is not None
        candidate = candidate.under(map_bytes=0)  # maps on the device take what is left
        held = self.rank_bytes(candidate, Partition(self.of(candidate)[0], (0,)), 0)
        return self._streamed.limit(candidate, self.tiles(candidate), held)

    @property
    def most_stages(self) -> int:
        """Stages that the model can be cut into."""
        return len(self.places) + 1

    def tiles(self, candidate: Strategy) -> int:
        """Return the tiles of the largest microbatch."""
        return -(-self.task.batch // candidate.m)

    @remembered
    def microbatch(self, tiles: int, grid: TeamGrid | int | None = None) -> tuple[LayerGraph, Costs]:
        """Return the graph for microbatches of ``tiles`` tiles, and what its layers cost.

        Args:
            grid: of the teams that divide each tile, or members that share branches: of the largest member's part.
        """
        if grid is None:
            return with_tiles(self.task.graph, tiles), self.task.estimate(tiles)
        if isinstance(grid, int):
            return self.branched.microbatch(grid, tiles)
        assert self.teams is not None, self.task.in_teams()[1]
        return self.teams.microbatch(grid, tiles)

    def of(self, candidate: Strategy) -> tuple[LayerGraph, Costs]:
        """Return the graph of a candidate's largest microbatch, and what its layers cost."""
        return self.microbatch(*self._size(candidate))

    def _size(self, candidate: Strategy) -> _Size:
        """Return the tiles of the largest microbatch, and the teams that compute them."""
        return self.tiles(candidate), candidate.grid or (candidate.ways if candidate.ways > 1 else None)

    def partition(self, candidate: Strategy, *, within: bool) -> Partition | None:
        """Return the best stages for a candidate.

        Args:
            within: that keep every rank within the memory; None where there are none.
        """
        size = self._size(candidate)
        if candidate.stages == 1:
            return None if within else Partition(self.microbatch(*size)[0], (0,))
        paired = candidate.paired and candidate.depth <= DEEP
        # Of what is left on the device in the end, what enters a stage is the part that its cuts decide.
        candidate = candidate.under(recompute="stage" if candidate.policy.saves else "none", offload="none")
        memory = self._rule(candidate) if within else None
        key = size, candidate.stages, candidate.members, tuple(self._speeds(candidate)), paired, memory
        if key not in self._partitions:
            members = candidate.members
            links = [self.cluster.link(seat * members, (seat + 1) * members) for seat in range(candidate.depth - 1)]
            try:
                self._partitions[key] = partition_optimal(
                    self._windows(size),
                    candidate.stages,
                    link_s=max(1 / link.bandwidth for link in links if link is not None),
                    speeds=self._speeds(candidate),
                    memory=memory,
                    paired=paired,
                )
            except ValueError:
                self._partitions[key] = None
        return self._partitions[key]

    def _speeds(self, candidate: Strategy) -> list[float]:
        """Return the speed of each rank of a group, the slowest of all groups: they cut the model alike."""
        if not self.cluster.speeds:
            return [1.0] * candidate.depth
        ranks = [range(group * candidate.depth, (group + 1) * candidate.depth) for group in range(candidate.groups)]
        return [min(of_seat) for of_seat in zip(*map(self.cluster.speeds_of, ranks), strict=True)]

    def resolve_policy(self, candidate: Strategy, partition: Partition) -> Strategy | None:
        """Return a candidate with these stages' names and all that its policy leaves open; None where no choice of what
        is recomputed fits. Where copies overlap the computation, a little is left on the device and brought back ahead,
        so that no rank waits for the first of them."""
        runs: Runs | None = ()
        if candidate.policy.recompute == "optimal":
            runs = self._choose_recompute(candidate, partition.starts)
        elif candidate.name == "fsdp" and candidate.policy.segmented:
            runs = module_runs(partition.graph, self.task.sharding.blocks) or None
        if runs is None:
            return None
        cuts = tuple(partition.graph.layers[start].name for start in partition.starts[1:])
        ahead = self._ahead(self._size(candidate)) if candidate.policy.moves and self.cluster.kind == "cuda" else 0
        return dataclasses.replace(candidate.under(chosen=runs, ahead=ahead), cuts=cuts)

    @remembered
    def _ahead(self, size: _Size) -> int:
        ahead = WINDOW * max((each.bytes for each in self._memory(size).storages if each.saved), default=0)
        return -(-ahead // MIB) * MIB  # for people to read

    @remembered
    def _choose_recompute(self, candidate: Strategy, starts: tuple[int, ...]) -> Runs | None:
        graph, costs = self.of(candidate)
        partition = Partition(graph, starts)
        times = [cost.forward_s for cost in costs.layers]
        forward_s = [max(seconds, LEAST_S) for seconds in (times if any(times) else equal_cost(graph))]
        memory, limit = self._memory_of(candidate), self._limit(candidate)
        schedule, mesh = schedule_of(candidate)
        return chosen_runs(partition, mesh, schedule, forward_s, limit, memory=memory, **self._options(candidate))

    def _options(self, candidate: Strategy) -> dict[str, Any]:
        """Return arguments of ``memory.rank_bytes``."""
        return {
            "slots": self.task.slots,
            "zero": candidate.zero,
            "copies": candidate.groups * candidate.members,
            "weights": largest_weights(candidate, self.task.batch),
            "device": self.cluster.kind,
        }

    def rank_bytes(self, candidate: Strategy, partition: Partition, rank: int) -> RankBytes:
        """Return the bytes of a rank of the fullest group."""
        computing = self._computing_bytes(candidate, partition, rank)
        return dataclasses.replace(computing, communication=communication_bytes(candidate, self.cluster))

    def _computing_bytes(self, candidate: Strategy, partition: Partition, rank: int) -> RankBytes:
        memory, policy = self._memory_of(candidate), candidate.policy
        boxes = self._streamed if policy.stream is not None else None
        schedule, mesh = schedule_of(candidate)
        if candidate.name == "fsdp":
            graph, stage, several = partition.graph, memory.of_stage(partition, 0, policy), len(schedule[0]) > 2
            timeline = memory.arrays((0, len(graph.layers))).timeline(segments_of(partition, 0, policy), policy)
            peak, slots = gathered_peak(graph, timeline, self.task.sharding), self.task.slots
            return sharded_bytes(stage, peak, candidate.ranks, several=several, slots=slots, device=self.cluster.kind)

        def held(stage: int) -> StageBytes:
            if boxes is not None:
                return boxes.stage_bytes(candidate, self.tiles(candidate), memory)
            return memory.of_stage(partition, stage, policy)

        stages = {stage: held(stage) for stage, _ in mesh.held_by(rank)}
        (of_rank,) = rank_bytes(stages, mesh, {rank: schedule[rank]}, **self._options(candidate))
        return of_rank

    def host_bytes(self, candidate: Strategy, partition: Partition) -> int:
        """Return the bytes that the fullest rank takes on the host."""
        if candidate.policy.stream is not None and self._streamed is not None:
            return self._streamed.host_bytes(candidate, self.tiles(candidate))
        if not candidate.policy.moves:
            return 0
        stages = self._memory_of(candidate).host(partition, candidate.policy)
        return max(host_bytes(schedule_of(candidate)[0], stages, largest_weights(candidate, self.task.batch)))

    def stage_costs(self, candidate: Strategy, partition: Partition) -> list[StageCost]:
        """Return the costs of the stages for the largest microbatch, with what the candidate's policy takes."""
        graph, costs = self.of(candidate)
        if candidate.policy.stream is not None and self._streamed is not None:
            return [self._streamed.stage_cost(candidate, self.tiles(candidate), graph, costs)]
        return policy_costs(
            partition,
            self._plain_costs(self._size(candidate), partition.starts),
            costs,
            candidate.policy,
            copy_bandwidth=self.cluster.copy_bandwidth,
            overlapped=self.cluster.kind == "cuda",
            memory=self._memory_of(candidate),
        )

    @remembered
    def _plain_costs(self, size: _Size, starts: tuple[int, ...]) -> list[StageCost]:
        graph, costs = self.microbatch(*size)
        return stage_costs(Partition(graph, starts), costs)

    def moved_s(self, candidate: Strategy) -> float:
        """Return the least seconds that copies of all that a microbatch saves take, each way, without recomputation."""
        return self._memory(self._size(candidate)).saved_bytes / self.cluster.copy_bandwidth

    def _memory_of(self, candidate: Strategy) -> StageMemory:
        return self._memory(self._size(candidate))

    @remembered
    def _memory(self, size: _Size) -> StageMemory:
        return StageMemory(self.microbatch(*size)[0])

    @remembered
    def _windows(self, size: _Size) -> Windows:
        graph, costs = self.microbatch(*size)
        return Windows(graph, costs.seconds, [0, *self.places, len(graph.layers)], self._memory(size).storages)

    def _rule(self, candidate: Strategy) -> MemoryRule:
        return MemoryRule(
            (self._limit(candidate),) * candidate.depth,
            self._in_flight(dataclasses.replace(candidate, zero=0)),
            2.0 + self.task.slots / (candidate.holders if candidate.zero else 1),
            candidate.policy.stagewise,
            candidate.stashes,
        )

    @remembered
    def _in_flight(self, candidate: Strategy) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return in_flight(*schedule_of(candidate))

    def _limit(self, candidate: Strategy) -> float:
        """Return the bytes that computing may take of a rank."""
        return float(self.cluster.usable_bytes - communication_bytes(candidate, self.cluster))


def communication_bytes(strategy: Strategy, cluster: Cluster) -> int:
    """Return the bytes that NCCL allocates on the rank with the most communicators: one for each group of ranks that
    sums, and one for each direction between two ranks that send messages.

    Stages are taken to send to their neighbours only; a skip over a stage adds two links.
    """
    members = strategy.members
    groups = (strategy.holders > 1) + (members > 1)
    return 2 * min(strategy.depth - 1, 2) * cluster.link_bytes + groups * cluster.communicator_bytes
