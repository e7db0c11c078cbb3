"""Run fx nodes on one rank of a spatial team: sharded maps on every rank, everything after them on rank 0.

A plan is compiled once for each member and shape of tiles: a closure for each node, with its exchanges, pads and slices
bound. A step only runs the closures.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, fx, nn

from parallel.streaming.box_sums import BoxSums
from parallel.streaming.operation import DIMS
from parallel.team.node_compiler import GATHERED, Compute, NodeCompiler, Values
from parallel.team.team_comm import ForwardContext, all_reduce_sum
from parallel.team.team_plan import TeamPlan


@dataclass(frozen=True)
class Program:
    """Nodes compiled for one member and plan.

    Attributes:
        constants: values by name that are known without computing.
        attributes: (name, module, its attribute) of parameters, buffers and constants that nodes take.
        nodes: (name, what computes its value, names of values that are not used after it).
    """

    constants: Mapping[str, Any]
    attributes: tuple[tuple[str, nn.Module, str], ...]
    nodes: tuple[tuple[str, Compute, tuple[str, ...]], ...]


class NodeRun:
    """Runs consecutive nodes, of which the context says what is sharded.

    Args:
        inputs, outputs: names of the values it takes and gives.
        random: names of nodes that may draw.
        constants: values by name that are known without computing.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        random: Collection[str],
        constants: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._constants = constants
        self._inputs, self._outputs = inputs, outputs
        self._nodes = [node for node in nodes if node.op not in ("placeholder", "get_attr")]
        self._random = frozenset(random)
        self._output = next((node for node in self._nodes if node.op == "output"), None)

    def __call__(self, stage: Any, *values: Any) -> tuple[Any, ...]:
        """Run the nodes in the pass that ``stage`` has under way."""
        return self.run(stage, stage._context, values, stage._asked)

    def run(
        self, stage: nn.Module, context: ForwardContext, values: Sequence[Any], asked: BoxSums | None = None
    ) -> tuple[Any, ...]:
        """Return the values named in ``outputs``; of sharded maps, this member's part.

        Args:
            asked: sums that the model's output is wanted as, a sharded map (``gives_parts``).
        """
        program = self.program(stage, context)
        known = {**program.constants, **dict(zip(self._inputs, values, strict=True))}
        for name, module, attribute in program.attributes:
            known[name] = getattr(module, attribute)
        for name, compute, finished in program.nodes:
            if asked is not None and self._output is not None and name == self._output.name:
                known[name] = self._sums(context, known, asked, compute)
            else:
                known[name] = compute(known, context)
            for used in finished:
                known.pop(used, None)
        return tuple(map(known.get, self._outputs))

    def _sums(self, context: ForwardContext, known: Values, asked: BoxSums, compute: Compute) -> Tensor:
        """Sums of the model's output; those of all members' parts of it, where it is sharded."""
        assert self._output is not None
        if context.plan.region is None:
            return asked.of_whole(compute(known, context))
        (source,) = self._output.all_input_nodes
        box = context.plan.owned(source.name, context.comm.member)
        return all_reduce_sum(context.comm, asked.of_part(known[source.name], box))

    def gives_parts(self, plan: TeamPlan, targets: Sequence[int]) -> bool:
        """Return whether the model's output is a map (n, c, h, w) that is sharded, of the rows of ``targets``."""
        source = None if self._output is None else self._output.args[0]
        if not isinstance(source, fx.Node) or plan.region is None:
            return False
        if plan.placement(source.name) != "shard" or plan.dims(source.name) != DIMS:
            return False
        shape = plan.region.forms[source.name][0]
        return len(shape) == 4 and (shape[0], *shape[2:]) == tuple(targets)

    def program(self, stage: nn.Module, context: ForwardContext) -> Program:
        """Return the nodes compiled for the plan of ``context``."""
        programs = context.plan.compiled
        if self not in programs:
            programs[self] = self._compile(stage, context)
        program: Program = programs[self]
        return program

    def _compile(self, stage: nn.Module, context: ForwardContext) -> Program:
        region = context.plan.region
        constants = {**({} if region is None else region.constants), **self._constants}
        # Types and devices come from the tensors: plans are made outside autocast, before the model is on a device.
        forms = {node.name for node in self._nodes if node.target is getattr and node.args[1] in ("dtype", "device")}
        fixed = constants.keys() - forms
        nodes = [node for node in self._nodes if node.name not in fixed]
        last = {source: node.name for node in nodes for source in node.all_input_nodes}
        finished: dict[str, list[str]] = {}
        for source, user in last.items():
            own = () if source.name in self._outputs else (source.name,)
            finished.setdefault(user, []).extend((source.name + GATHERED, *own))
        attributes = []
        for source in last:
            if source.op == "get_attr" and source.name not in constants:
                owner, _, name = str(source.target).rpartition(".")
                attributes.append((source.name, stage.get_submodule(owner), name))
        compiler = NodeCompiler(stage, context, self._random, frozenset(self._inputs))
        compiled = ((node.name, compiler.compile(node), tuple(finished.get(node.name, ()))) for node in nodes)
        return Program(constants, tuple(attributes), tuple(compiled))
