"""Run the nodes of a model on one member of a team that shares its branches.

Shared nodes run on this member's samples. In a region with branches the samples of all members are collected, each
member computes its own branches on all of them, and every member gets its own samples of all branches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from parallel.graph.branches import Branches
from parallel.streaming.box_sums import BoxSums
from parallel.team.program import NodeRun
from parallel.team.sample_exchange import Form, SampleExchange, agreed_forms, fork, join
from parallel.team.samplewise import DROPOUTS, SampleContext, dropped, normalise, samplewise_fault
from parallel.team.team_comm import ForwardContext, TeamComm
from parallel.team.team_plan import MOST_PLANS
from parallel.trace.stage_module import Run, compiled

Compute = Callable[[nn.Module, SampleContext, Sequence[Any]], tuple[Any, ...]]


@dataclass(frozen=True)
class _Step:
    """Consecutive nodes that run together.

    Attributes:
        finished: names of the values that no later step uses.
    """

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
            compute = (
                self._region(nodes, inputs, outputs) if isinstance(key, int) else self._shared(nodes, inputs, outputs)
            )
            yield _Step(inputs, outputs, compute, finished)

    def _key(self, node: fx.Node) -> int | str:
        """Return the number of a node's region, the name of a node that runs by itself, or "" of other shared ones."""
        if node.name in self._branches.region_of:
            return self._branches.region_of[node.name]
        return node.name if node.name in self._random or isinstance(self._module(node), _BatchNorm) else ""

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self._model.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _shared(self, nodes: Sequence[fx.Node], inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Compute:
        faults = [fault for node in nodes if (fault := samplewise_fault(self._model, node))]
        node, module = nodes[0], self._module(nodes[0])
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

        def alone(stage: nn.Module, context: SampleContext, values: Sequence[Any]) -> tuple[Any, ...]:
            own = stage.get_submodule(str(node.target)) if node.op == "call_module" else None
            if isinstance(own, _BatchNorm):
                by_batch = own.training or own.running_mean is None
                return (normalise(self._comm, own, values[0], context),) if by_batch else plain(stage, *values)
            if own is None or own.training:
                return (dropped(node, own, values[0], context),)
            return plain(stage, *values)

        return alone

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
