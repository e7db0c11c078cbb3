"""One member's part of a model whose branches a team shares: D&SP, data and sub-graph parallelism.

Shared layers and their parameters are on every member, a branch and its parameters on the member that computes it
(Jain et al., SUPER: SUb-Graph Parallelism for TransformERs, IPDPS 2021). A microbatch is the samples of all members.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from parallel.graph.branches import Branches, find_branches
from parallel.graph.partition import Partition
from parallel.memory.policy import segments_of
from parallel.strategy import Strategy
from parallel.team.branch_run import BranchRun
from parallel.team.sample_exchange import SampleExchange, agreed_forms, rows_of_members
from parallel.team.samplewise import SampleContext
from parallel.team.team_comm import ForwardContext, TeamComm, all_reduce_sum
from parallel.team.team_stage import Plans, TeamStage
from parallel.trace.cut import cut_stage, used_tensors
from parallel.trace.stage_module import Boxes, as_tensor
from parallel.trace.trace import Traced


class BranchStage(TeamStage):
    """The shared layers, which this member computes of its own samples, and its branches, of all samples."""

    _of_loss = False

    def _begin_pass(self, shape: tuple[int, ...], random: int | Tensor) -> ForwardContext:
        return SampleContext(self.plans(shape, self.training), self.link, self.device, random, samples=shape[0])

    def samples(self, count: int) -> range:
        return rows_of_members(count, self.link.members)[self.link.member]

    def tiles(self, images: Tensor | Boxes, shape: tuple[int, ...]) -> Tensor:
        return self._own(as_tensor(images), shape[0])

    def forward(self, *values: Any) -> Any:
        """Return the output: all samples on member 0, or this member's where the loss takes it."""
        own = super().forward(*values)
        return own if self._of_loss else tuple(tree_map(self._gathered, value) for value in own)

    def loss(self, run: Any, loss: Any, values: Iterable[Any], targets: Any) -> Tensor:
        """Return the ``loss`` of all members' samples."""
        assert isinstance(self._context, SampleContext)
        samples = self._context.samples
        self._of_loss = True
        try:
            (output,) = run(*values)
        finally:
            self._of_loss = False
        if count := len(self.samples(samples)):
            own = loss(output, self._own(as_tensor(targets), samples)).double() * (count / samples)
        else:
            own = torch.stack([leaf.sum().double() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]).sum()
        return all_reduce_sum(self.link, own)

    def _own(self, value: Tensor, count: int) -> Tensor:
        """Return this member's samples of all ``count``, or of its own alone."""
        own = self.samples(count)
        return value if len(value) == len(own) else value[own.start : own.stop]

    def _gathered(self, value: Any) -> Any:
        """Return all samples of an output on member 0."""
        assert isinstance(self._context, SampleContext)
        if not isinstance(value, Tensor):
            return value
        forms = agreed_forms(self.link, [value if self.counts else None])
        (whole,) = SampleExchange(self.link, self._context.rows, forms, ((0,),), self.device).collect([value])
        return value if whole is None else whole


def branch_stages(
    traced: Traced, partition: Partition, strategy: Strategy, comm: TeamComm, plans: Plans, device: torch.device
) -> dict[int, BranchStage]:
    """Return the only stage of a model whose branches a team shares, with this member's branches.

    Raises:
        ValueError: the model has no branches, updates buffers in forward passes, or has shared layers that do not treat
            each sample alone.
    """
    if traced.updated:
        raise ValueError(
            f"--parallel subgraph: {next(iter(traced.updated))} is updated by forward passes, each member of a team by "
            "its own samples: use --parallel single for this model"
        )
    branches = find_branches(partition.graph, comm.members)
    random = {layer.name for layer in partition.graph.layers if layer.random}

    def run(
        nodes: Sequence[fx.Node], inputs: tuple[str, ...], outputs: tuple[str, ...], slots: dict[str, str], _: str
    ) -> BranchRun:
        assert not slots, "one stage sends nothing"
        return BranchRun(traced.model, nodes, inputs, outputs, random, branches, comm)

    others = {name for name, member in branches.member_of.items() if member != comm.member}
    segments = segments_of(partition, 0, strategy.policy)
    stage = cut_stage(traced, partition, 0, segments, BranchStage, run, others)
    assert isinstance(stage, BranchStage)
    stage.link, stage.device, stage.plans = comm, device, plans
    stage.of_one_member = _own_state(traced, stage, branches, comm.member)
    return {0: stage}


def _own_state(traced: Traced, stage: BranchStage, branches: Branches, member: int) -> frozenset[str]:
    """Return the names of the parameters and buffers that only this member's branches use."""
    nodes = [*traced.training.graph.nodes, *traced.evaluation.graph.nodes]
    mine = [node for node in nodes if branches.member_of.get(node.name) == member]
    own = used_tensors(traced, _with_parameters(mine))
    rest = used_tensors(traced, _with_parameters([node for node in nodes if node.name not in branches.member_of]))
    state = [*stage.named_parameters(), *stage.named_buffers()]
    return frozenset(name for name, tensor in state if id(tensor) in own and id(tensor) not in rest)


def _with_parameters(nodes: Collection[fx.Node]) -> list[fx.Node]:
    """Return ``nodes`` with those that name parameters and buffers for them."""
    return [*nodes, *(source for node in nodes for source in node.all_input_nodes if source.op == "get_attr")]
