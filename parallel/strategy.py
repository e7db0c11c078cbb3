"""Strategy that spreads a model over ranks: one frozen value, from flags or a planner's search to ``plan.json`` and the
engine.

Takes names and numbers; returns what follows before any rank computes: the mesh, the partition and the lowered
schedule, all proven to fit each other. No torch here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition, partition_at, partition_equal
from parallel.memory.policy import KEEP_ALL, ActivationPolicy
from parallel.schedule.action import Kind, Schedule
from parallel.schedule.check import check
from parallel.schedule.dependencies import Links
from parallel.schedule.mesh import Mesh
from parallel.schedule.passes import lower
from parallel.schedule.registry import PIPEDREAM, SPATIAL, SUBGRAPH, build_schedule, kind_of, mesh_for
from parallel.schedule.shares import Changes, Shares, share_of
from parallel.schedule.text import PushRule, from_csv
from parallel.schedule.timeline import StageCost
from parallel.space.team import TeamGrid

WHOLE = ("single", "ddp", "fsdp", "async")
"""Strategies that do not split the model into stages: each rank computes all of it."""

STREAMED = ("single", "ddp", SPATIAL.name)
"""Strategies whose tiles, or members' parts of them, are planned box by box."""

DELAYED = "delayed gradients, not the plain step"
"""Said wherever a strategy of ``STALE`` is reported."""

STALE = (PIPEDREAM.name, "async")
"""Strategies whose gradients are of older weights than those that they update; never chosen by a planner."""


@dataclass(frozen=True)
class Strategy:
    """Spread of a model over ranks.

    Attributes:
        name: one of ``WHOLE``, or of the schedule.
        ranks: all of them; d groups of ``depth`` teams, each of one rank or of several.
        depth: teams that one group spreads the model over, D; 1 where each computes all of it.
        m: microbatches of the global batch, over all groups.
        chunks: stages a rank holds of each replica; interleaved has 2 or more.
        cuts: names of layers or modules that begin a stage; empty: stages of equal cost.
        policy: what is saved for backward, recomputed or offloaded.
        zero: what the ranks that hold a stage divide among themselves (Rajbhandari et al. 2020): 1: optimizer state, 2:
            gradients, too, 0: nothing. Stage 3 is the strategy fsdp.
        schedule_csv: text of a schedule file, run in place of the named one's actions on the same mesh.
        statistics: running statistics of normalisation layers once per microbatch, or deferred to once per step.
        compile: run the stages through ``torch.compile``.
        gradient_bytes: of a stage's gradients in a sum over the ranks that hold it, from its last backward pass on; 0:
            all, once this rank has computed everything; None: as ``GradReducer`` does.
        grid: of the teams, which divide each tile among their ranks; None: one rank a team.
        shares: microbatches of each group; empty: consecutive ones, the same number for each.
        changes: steps from which other shares are in force.
        rebalanced: shares follow the speed of groups.
        pushes: how the parameter server of async treats gradients; None: under other strategies.
        ways: ranks of a team that share the branches of the model's blocks, with subgraph; 1: none do.
    """

    name: str
    ranks: int
    depth: int
    m: int
    chunks: int = 1
    cuts: tuple[str, ...] = ()
    policy: ActivationPolicy = KEEP_ALL
    zero: int = 0
    schedule_csv: str | None = None
    statistics: Literal["per-microbatch", "deferred"] = "per-microbatch"
    compile: bool = False
    gradient_bytes: int | None = None
    grid: TeamGrid | None = None
    shares: Shares = ()
    changes: Changes = ()
    rebalanced: bool = False
    pushes: PushRule | None = None
    ways: int = 1

    @property
    def group_ranks(self) -> int:
        """Ranks of one group, over all its teams."""
        return self.depth * self.members

    @property
    def members(self) -> int:
        """Ranks of a team; 1 without a grid and without shared branches."""
        return self.grid.members if self.grid else self.ways

    @property
    def groups(self) -> int:
        """Data-parallel groups, d."""
        return self.ranks // self.group_ranks

    def share_of(self, group: int) -> Sequence[int]:
        """Return the microbatches that a group computes, rising.

        Raises:
            ValueError: there are more or fewer than groups.
        """
        return self.shares[group] if self.shares else share_of(group, self.groups, self.m)

    @property
    def splits(self) -> bool:
        """The model is cut into stages."""
        return self.name not in WHOLE

    @property
    def delayed(self) -> bool:
        """Gradients are of older weights than those that they update."""
        return self.name in STALE

    @property
    def stashes(self) -> bool:
        """Every microbatch updates the weights, of which older versions are kept."""
        return self.name == PIPEDREAM.name

    @property
    def paired(self) -> bool:
        """A rank holds two stages, one of each of two inverted replicas."""
        return self.splits and kind_of(self.name).replicas == 2

    @property
    def copies(self) -> int:
        """Copies of each stage, in all groups."""
        return self.groups * (1 + self.paired)

    @property
    def holders(self) -> int:
        """Ranks that hold each stage; half of them the middle one of two inverted replicas."""
        return self.copies * self.members

    @property
    def stages(self) -> int:
        """Stages of each replica."""
        return self.depth * self.chunks

    def under(self, **policy: Any) -> Strategy:
        """Return the strategy with these fields of its ``policy`` changed."""
        return dataclasses.replace(self, policy=dataclasses.replace(self.policy, **policy))

    @property
    def policy_text(self) -> str:
        """Return the measures that save memory, for people: "+recompute block +offload"; empty without any."""
        recompute = self.policy.recompute
        words = (
            {"none": "", "stage": "+recompute"}.get(recompute, f"+recompute {recompute}"),
            "+offload" * self.policy.moves,
            "" if self.policy.stream is None else f"+stream {self.policy.stream}",
            f"+zero {self.zero}" * bool(self.zero),
        )
        return " ".join(word for word in words if word)

    def __str__(self) -> str:
        mesh = f" {self.groups} x {self.depth}" if self.splits else f" {self.ranks}" if self.ranks > 1 else ""
        if self.grid:
            mesh += f" of {self.grid}"
        elif self.ways > 1:
            mesh = f" {self.groups} x {self.ways}"
        return f"{self.name}{mesh}, m={self.m} {self.policy_text}".rstrip()

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of a strategy that splits the model.

        Raises:
            ValueError: the schedule cannot run on it.
        """
        faults = []
        if self.depth < 1 or self.ranks % self.group_ranks:
            faults.append(f"{self.ranks} ranks cannot be grouped by {self.group_ranks} stages' ranks: choose a divisor")
        faults += self.team_faults + self.stash_faults + self.zero_faults
        policy = self.policy
        if self.compile and (policy.segmented or policy.moves or policy.parameters):
            faults.append(
                "compiled stages cannot be recomputed in parts, nor what they keep or their parameters be moved to "
                "the host: do not compile, or do not save memory so"
            )
        if self.name == "zero-bubble":
            faults += self._split_faults
        if faults:
            raise ValueError("; ".join(faults))
        return mesh_for(self.name, groups=self.groups, depth=self.depth, chunks=self.chunks, members=self.members)

    @property
    def team_faults(self) -> list[str]:
        """Return what teams cannot do, a line each."""
        given = (
            (self.name == "zero-bubble", "zero-bubble splits the backward pass, which exchanges cannot: use 1f1b"),
            (self.compile, "compiled stages cannot exchange parts of maps: leave compile out"),
            (self.statistics == "deferred", "deferred statistics are not of teams: keep them per-microbatch"),
            (bool(self.policy.parameters), "parameters on the host are not of teams: use offload-state=optimizer"),
            (self.schedule_csv is not None, "a schedule file is of single ranks, not of teams: leave schedule out"),
        )
        faults = [fault for is_set, fault in given if is_set and self.members > 1]
        if self.name == SUBGRAPH.name:
            faults += self._branch_faults
        if self.name == "spatial" and not self.grid:
            faults.append("spatial divides each tile among the ranks of a team: say how, as --grid 2x1")
        return faults

    @property
    def _branch_faults(self) -> list[str]:
        """Return what ranks that share branches cannot do, a line each."""
        given = (
            (self.ways < 2, "shares the branches of a model among 2 ranks or more: give --stages 2"),
            (self.grid is not None, "divides no tiles: leave --grid out"),
            (
                self.policy.stream is not None,
                f"does not compute boxes of a tile: leave --stream {self.policy.stream} out",
            ),
            (bool(self.zero), f"keeps a branch on one rank of a team already: leave --zero {self.zero} out"),
            (self.policy.recompute == "optimal", "recomputes whole blocks alone: use --recompute block"),
        )
        return [f"{SUBGRAPH.name} {what}" for is_set, what in given if is_set]

    @property
    def stash_faults(self) -> list[str]:
        """Return what does not go with updates after every microbatch, a line each."""
        if not self.stashes:
            return []
        policy = self.policy
        given = (
            (self.ranks > self.group_ranks, f"data-parallel groups: give as many --stages as ranks, {self.ranks}"),
            (self.grid is not None, "--grid"),
            (self.compile, "--compile"),
            (self.statistics == "deferred", "--norm-statistics=deferred"),
            (policy.moves, f"--offload {policy.offload}"),
            (policy.optimizer or policy.parameters, "--offload-state"),
            (policy.stream is not None, f"--stream {policy.stream}"),
        )
        rule = "updates the weights after every microbatch, which was not tried with"
        return [f"{self.name} {rule} {what}" for is_set, what in given if is_set]

    @property
    def zero_faults(self) -> list[str]:
        """Return what does not go with state that is divided among the holders of a stage, a line each."""
        if not self.zero:
            return []
        given = (
            (self.holders == 1, "leave it out: each stage is on one rank alone"),
            (self.pushes is not None, "leave it out: a parameter server has the only optimizer"),
            (
                self.zero == 2 and self.gradient_bytes == 0,
                "use --zero 1: with --gradient-buckets=0 gradients stay whole until all is computed",
            ),
        )
        return [
            f"{self.name} on {self.ranks} ranks with --zero {self.zero}: {what}" for is_set, what in given if is_set
        ]

    @property
    def _split_faults(self) -> list[str]:
        """Reasons why backward passes cannot be split in two."""
        splits = "zero-bubble" if self.schedule_csv is None else "the schedule file"
        given = (
            (
                self.policy.segmented or self.policy.parameters,
                "neither parts computed again nor parameters on the host allow: recompute whole stages, or use 1f1b",
            ),
            (self.compile, "compiled stages cannot: use 1f1b, or do not compile"),
            (self.stashes, f"{self.name} cannot: give whole backward passes, such as 2B0, or use 1f1b"),
        )
        return [f"{splits} splits the backward pass, which {what}" for is_set, what in given if is_set]

    def partition(self, graph: LayerGraph) -> Partition:
        """Return the stages of the model.

        Raises:
            ValueError: cuts that are not in the model, or more or fewer than the stages need.
        """
        stages = self.mesh.stages
        if not self.cuts:
            return partition_equal(graph, stages)
        if len(self.cuts) != stages - 1:
            raise ValueError(
                f"{len(self.cuts)} cuts make {len(self.cuts) + 1} stages and {stages} are needed: name {stages - 1} "
                "layers or modules that begin a stage"
            )
        return partition_at(graph, self.cuts)

    def schedule(self, links: Links, costs: Sequence[StageCost] | None = None) -> Schedule:
        """Return everything that all ranks do in a step, proven to run.

        Args:
            links: of the partition.
            costs: of its stages, to find time for copies to the host; the same on every rank.

        Raises:
            ValueError: the schedule does not fit the number of microbatches, or a schedule file is wrong.
        """
        mesh = self.mesh
        if self.schedule_csv is None:
            schedule = build_schedule(self.name, mesh, self.m, self.shares)
        else:
            schedule = from_csv(self.schedule_csv)
            check(schedule, mesh, links)  # errors show it as it was written; passes need a right one
            computed = {action.microbatch for row in schedule.values() for action in row} - {None}
            if len(computed) != self.m:
                raise ValueError(
                    f"the schedule file computes {len(computed)} microbatches and the batch has {self.m}: give "
                    f"--microbatches {len(computed)}, or another file"
                )
            if any(a.kind is Kind.BACKWARD_INPUT for row in schedule.values() for a in row) and self._split_faults:
                raise ValueError("; ".join(self._split_faults))
            for group in range(mesh.groups):
                own = {a.microbatch for rank, row in schedule.items() if rank // mesh.depth == group for a in row}
                if own - {None} != {*self.share_of(group)}:
                    numbers = ", ".join(map(str, self.share_of(group)))
                    raise ValueError(f"group {group} of the schedule file must compute the microbatches {numbers}")
        if self.stashes != any(action.kind is Kind.UPDATE for row in schedule.values() for action in row):
            raise ValueError("a schedule file has updates, such as 2U0, with pipedream and with no other strategy")
        lowered = lower(
            schedule,
            mesh,
            links,
            recompute=self.policy.stagewise,
            offload=self.policy.moves,
            costs=costs,
            reduce_at_end=self.gradient_bytes == 0,
            reduce_each=self.zero == 2 and not self.paired,  # whose ranks would have whole gradients and slices
        )
        check(lowered, mesh, links)
        return lowered
