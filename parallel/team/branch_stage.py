"""One member's part of a model whose branches a team shares: D&SP, data and sub-graph parallelism.

Shared layers and their parameters are on every member, a branch and its parameters on the member that computes it
(Jain et al., SUPER: SUb-Graph Parallelism for TransformERs, IPDPS 2021). A microbatch is the samples of all members.
Shared nodes run on this member's samples. In a region with branches the samples of all members are collected. Each
member computes its own branches on all of them, and then gets its own samples of all branches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from parallel.graph.branches import Branches, find_branches
from parallel.graph.partition import Partition
from parallel.memory.policy import segments_of
from parallel.schedule.shares import even_parts
from parallel.strategy import Strategy
from parallel.streaming.box_sums import BoxSums
from parallel.streaming.operation import module_of
from parallel.team.program import NodeRun
from parallel.team.sample_exchange import Form, SampleExchange, agreed_forms, fork, join
from parallel.team.samplewise import (
    DROPOUTS,
    SampleContext,
    dropped,
    inferred_shape,
    normalise,
    reshaped,
    samplewise_fault,
)
from parallel.team.team_comm import ForwardContext, TeamComm, all_reduce_sum
from parallel.team.team_plan import MOST_PLANS, Plans
from parallel.team.team_stage import TeamStage
from parallel.trace.cut import cut_stage, used_tensors
from parallel.trace.op_recorder import tensors_of
from parallel.trace.stage_module import Boxes, Run, as_tensor, compiled
from parallel.trace.trace import Traced

Compute = Callable[[nn.Module, SampleContext, Sequence[Any]], tuple[Any, ...]]


@dataclass(frozen=True)
class _Step:
    """Consecutive nodes that run together; no later step uses the values ``finished``."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    compute: Compute
    finished: tuple[str, ...]


class BranchRun(NodeRun):
    """Runs consecutive nodes of which some are in branches.

    Args:
        model: has the modules that the nodes call.
        inputs, outputs, random: as of ``NodeRun``.

    Raises:
        ValueError: a shared node does not treat each sample alone, or evaluation computes branches in another way.
    """

    def __init__(
        self,
        model: nn.Module,
        nodes: Sequence[fx.Node],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        random: Collection[str],
        branches: Branches,
        comm: TeamComm,
    ) -> None:
        super().__init__(nodes, inputs, outputs, random)
        self._model, self._branches, self._comm = model, branches, comm
        self._steps = tuple(self._made())

    def run(
        self, stage: nn.Module, context: ForwardContext, values: Sequence[Any], asked: BoxSums | None = None
    ) -> tuple[Any, ...]:
        assert isinstance(context, SampleContext)
        known = dict(zip(self._inputs, values, strict=True))
        for step in self._steps:
            given = [known[name] for name in step.inputs]
            for name in step.finished:
                known.pop(name, None)
            known.update(zip(step.outputs, step.compute(stage, context, given), strict=True))
        return tuple(map(known.get, self._outputs))

    def _made(self) -> Iterator[_Step]:
        groups = [(key, list(nodes)) for key, nodes in itertools.groupby(self._nodes, self._key)]
        numbers = [key for key, _ in groups if isinstance(key, int)]
        if len(numbers) > len(set(numbers)):
            raise ValueError(
                "--parallel subgraph: evaluation computes something between the branches of a block that training does "
                "not; use --parallel ddp for this model"
            )
        used = [{source.name for node in nodes for source in node.all_input_nodes} for _, nodes in groups]
        for at, (key, nodes) in enumerate(groups):
            made = {node.name: node for node in nodes}
            later = set(self._outputs).union(*used[at + 1 :])
            sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
            inputs = tuple(s.name for s in sources if s.name not in made and s.op != "get_attr")
            outputs = tuple(name for name in made if name in later)
            finished = tuple(name for name in inputs if name not in later)
            make = self._region if isinstance(key, int) else self._shared
            yield _Step(inputs, outputs, make(nodes, inputs, outputs), finished)

    def _key(self, node: fx.Node) -> int | str:
        """Return the number of a node's region, the name of a node that runs alone, or "" of other shared ones."""
        if node.name in self._branches.region_of:
            return self._branches.region_of[node.name]
        alone = node.name in self._random or isinstance(module_of(self._model, node), _BatchNorm)
        return node.name if alone or inferred_shape(node) else ""

    def _shared(self, nodes: Sequence[fx.Node], inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Compute:
        faults = [fault for node in nodes if (fault := samplewise_fault(self._model, node))]
        node, module = nodes[0], module_of(self._model, nodes[0])
        if not faults and node.name in self._random and not (module is None or isinstance(module, DROPOUTS)):
            faults = [f"{node.name} is a {type(module).__name__}, which may draw random numbers"]
        if faults:
            raise ValueError(
                f"--parallel subgraph gives each rank some samples of the layers outside branches, and {faults[0]}: "
                "use --parallel ddp for this model"
            )
        plain = _compiled(nodes, inputs, outputs)
        if len(nodes) > 1 or self._key(node) == "":
            return lambda stage, _, values: plain(stage, *values)
        shape = inferred_shape(node)

        def run_node(stage: nn.Module, context: SampleContext, values: Sequence[Any]) -> tuple[Any, ...]:
            if shape:
                if context.rows[self._comm.member]:
                    return plain(stage, *values)
                return (reshaped(values[0], shape, dict(zip(inputs, values, strict=True))),)
            own = module_of(stage, node)
            if isinstance(own, _BatchNorm):
                by_batch = own.training or own.running_mean is None
                return (normalise(self._comm, own, values[0], context),) if by_batch else plain(stage, *values)
            if own is None or own.training:
                return (dropped(node, own, values[0], context),)
            return plain(stage, *values)

        return run_node

    def _region(self, nodes: Sequence[fx.Node], inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Compute:
        members, mine = self._branches.member_of, self._comm.member
        takers = {
            name: sorted({members[node.name] for node in nodes for s in node.all_input_nodes if s.name == name})
            for name in inputs
        }
        own = [node for node in nodes if members[node.name] == mine]
        given = tuple(name for name in inputs if mine in takers[name])
        made = tuple(name for name in outputs if members[name] == mine)
        region = _Region(
            self._comm,
            inputs,
            outputs,
            tuple(tuple(takers[name]) for name in inputs),
            tuple((members[name],) for name in outputs),
            tuple(self._branches.graph.by_name[name].differentiable for name in outputs),
            tuple(inputs.index(name) for name in given),
            _compiled(own, given, made),
        )
        return region.compute


@dataclass(frozen=True, eq=False)
class _Region:
    """Branches between a fork and a join.

    Attributes:
        takers: of each value that enters, the members whose branches use it.
        makers: of each value that leaves, the member that computes it.
        differentiable: of each value that leaves, in training.
        given: numbers of the values that enter this member's branches.
        run: this member's branches.
        forms: of the values that enter and leave, by what they depend on.
    """

    comm: TeamComm
    entering: tuple[str, ...]
    leaving: tuple[str, ...]
    takers: tuple[tuple[int, ...], ...]
    makers: tuple[tuple[int], ...]
    differentiable: tuple[bool, ...]
    given: tuple[int, ...]
    run: Run
    forms: dict[object, tuple[Form, ...]] = field(default_factory=dict)

    def compute(self, stage: nn.Module, context: SampleContext, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return this member's samples of the values that leave, from those of the values that enter."""
        rows, mine = context.rows, self.comm.member
        for name, value in zip(self.entering, values, strict=True):
            self._check(name, value, len(rows[mine]))
        first = values if mine == 0 else [None] * len(values)  # which has samples whenever there are any
        entering = SampleExchange(
            self.comm, rows, self._forms("in", stage, context, first), self.takers, context.device
        )
        forked = fork(entering, values)
        made = iter(self.run(stage, *(forked[k] for k in self.given)))
        whole = [next(made) if mine in makers else None for makers in self.makers]
        for name, value in zip(self.leaving, whole, strict=True):
            if value is not None:
                self._check(name, value, context.samples)
        leaving = SampleExchange(
            self.comm, rows, self._forms("out", stage, context, whole), self.makers, context.device
        )
        return join(leaving, whole, self.differentiable, forked)

    def _forms(
        self, way: str, stage: nn.Module, context: SampleContext, values: Sequence[Tensor | None]
    ) -> tuple[Form, ...]:
        """Return the forms of values that all members have agreed on, at the first pass of this kind."""
        mixed = torch.is_autocast_enabled(context.device.type)
        key = way, context.plan.mesh.side, stage.training, mixed
        if key not in self.forms:
            if len(self.forms) >= 2 * MOST_PLANS:
                self.forms.clear()
            self.forms[key] = agreed_forms(self.comm, values)
        return self.forms[key]

    def _check(self, name: str, value: Any, samples: int) -> None:
        if not isinstance(value, Tensor) or value.dim() < 1 or len(value) != samples:
            form = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"--parallel subgraph: {name} enters or leaves branches as {form}, and not as a tensor of {samples} "
                "samples: use --parallel ddp for this model"
            )


def _compiled(nodes: Sequence[fx.Node], inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Run:
    """Return what runs ``nodes``, with the parameters and constants that they name."""
    named = dict.fromkeys(s for node in nodes for s in node.all_input_nodes if s.op == "get_attr")
    return compiled([*named, *nodes], inputs, outputs, {}, nodes[0].name if nodes else "no branch")


class BranchStage(TeamStage):
    """The shared layers, which this member computes of its own samples, and its branches, of all samples."""

    _of_loss = False

    def _begin_pass(self, shape: tuple[int, ...], random: int | Tensor) -> ForwardContext:
        return SampleContext(self.plans(shape, self.training), self.link, self.device, random, samples=shape[0])

    def samples(self, count: int) -> range:
        return even_parts(count, self.link.members)[self.link.member]

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
            own = torch.stack([tensor.sum().double() for tensor in tensors_of(output)]).sum()
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
