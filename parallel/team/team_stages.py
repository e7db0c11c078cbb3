"""Make the stages that one rank of a team holds: divided among its members, in boxes of the tile, or both.

Takes a traced model and its partition; gives modules, or says why a team cannot compute them. A rank alone is a team of
one, whose stages are computed in boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from parallel.graph.partition import Partition
from parallel.memory.policy import Segment, segments_of
from parallel.space.team import TeamGrid
from parallel.strategy import Strategy
from parallel.streaming.layer import Reading
from parallel.streaming.read_region import NothingTileable
from parallel.team.boxed_nodes import BoxedNodes
from parallel.team.branch_stage import branch_stages
from parallel.team.program import NodeRun
from parallel.team.team_comm import TeamComm
from parallel.team.team_plan import BoxedParts, Plans, TeamPlan
from parallel.team.team_stage import TeamStage
from parallel.trace.cut import cut_stage
from parallel.trace.trace import Traced
from parallel.trace.without_data import preserve_module_state, replacements, swapped, without_data


def stages_of_rank(
    traced: Traced,
    partition: Partition,
    numbers: Sequence[int],
    strategy: Strategy,
    comm: TeamComm,
    plans: Plans,
    shape: tuple[int, ...],
    device: torch.device,
    boxed: BoxedParts | None = None,
) -> Mapping[int, TeamStage]:
    """Return the stages ``numbers``, which this rank computes with the others of its team.

    Args:
        shape: (n, 3, h, w) of a usual microbatch; others may follow.

    Raises:
        ValueError: a team's model updates buffers of its own in forward passes, or nothing of it has rows to divide; or
            no stage can be computed box by box where that is asked for: which layer is the first that cannot, and why.
    """
    if strategy.ways > 1:
        return branch_stages(traced, partition, strategy, comm, plans, device)
    if comm.members > 1 and traced.updated:
        raise ValueError(
            f"--grid: {next(iter(traced.updated))} is updated by forward passes, each member of a team by its own part "
            "of the tile: leave --grid out for this model"
        )
    if strategy.name == "spatial" and (plan := plans(shape, True)).region is None:
        layer, reason = plan.ends_at or ("the model", "")
        raise ValueError(f"--parallel spatial finds nothing to divide: {layer} {reason}; use --parallel ddp")
    segments = {number: segments_of(partition, number, strategy.policy) for number in numbers}
    grid = strategy.grid or TeamGrid()
    stages = team_stages(traced, partition, numbers, grid, comm, plans, device, segments, boxed)
    if boxed is not None:
        others = [number for number in range(partition.depth) if number not in stages]
        with preserve_module_state(traced.model):
            traced.model.train()
            values = _values(traced, partition, shape) if comm.members == 1 else {}
            if not _have_boxes(stages, plans(shape, True), values):
                more = team_stages(traced, partition, others, grid, comm, plans, device, boxed=boxed)
                _have_boxes({**stages, **more}, plans(shape, True), values, required=True)
        for stage in stages.values():
            stage.train(traced.model.training)
    if comm.members > 1:
        _leave_shapes(traced.model, stages.values())
    return stages


def _have_boxes(
    stages: Mapping[int, TeamStage], plan: TeamPlan, values: Mapping[str, Any], required: bool = False
) -> bool:
    """Plan the boxes of ``stages``, so that errors are raised now; return whether any stage has some."""
    reasons = []
    for stage in stages.values():
        run = stage.train()._run_training
        assert isinstance(run, BoxedNodes)
        planned = run.planned(stage, plan, [values.get(name) for name in stage.inputs])
        if isinstance(planned, NothingTileable):
            reasons.append(planned)
    if required and len(reasons) == len(stages):
        raise reasons[0]
    return len(reasons) < len(stages)


def _leave_shapes(model: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Let go of parameters that other ranks hold: plans for tiles of other sizes ask for their shapes alone."""
    held = {id(module) for stage in stages for module in stage.modules()}
    for module in model.modules():
        for name, parameter in module._parameters.items() if id(module) not in held else ():
            if parameter is not None:
                shape = parameter.detach().new_zeros(()).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(shape, parameter.requires_grad)


def team_stages(
    traced: Traced,
    partition: Partition,
    numbers: Iterable[int],
    grid: TeamGrid,
    comm: TeamComm,
    plans: Plans,
    device: torch.device,
    segments: Mapping[int, Sequence[Segment]] = MappingProxyType({}),
    boxed: BoxedParts | None = None,
) -> dict[int, TeamStage]:
    """Return this member's modules of the stages ``numbers``.

    Args:
        segments: that a stage is run in, where any are recomputed.
        boxed: how members' parts are computed box by box; None: whole.

    Raises:
        ValueError: evaluation sends values between stages in the place of others, in a team of several.
    """
    random = {layer.name for layer in traced.graph.layers if layer.random}

    def run(
        nodes: Sequence[fx.Node], inputs: tuple[str, ...], outputs: tuple[str, ...], slots: dict[str, str], _: str
    ) -> NodeRun:
        if slots and comm.members > 1:
            raise ValueError(
                f"evaluation sends {next(iter(slots))} where training sends {next(iter(slots.values()))}, and a team "
                "could not tell which rows of it are whose: cut the model elsewhere (--cuts)"
            )
        names = {slot: value for value, slot in slots.items()}  # what evaluation has in place of a value of training
        inside, leaving = (tuple(names.get(name, name) for name in ends) for ends in (inputs, outputs))
        if boxed is None:
            return NodeRun(nodes, inside, leaving, random)
        return BoxedNodes(nodes, inside, leaving, random, boxed, grid, comm, device, traced.updated)

    made: dict[int, TeamStage] = {}
    for number in numbers:
        stage = cut_stage(traced, partition, number, segments.get(number, ()), TeamStage, run)
        assert isinstance(stage, TeamStage)
        stage.link, stage.device, stage.plans = comm, device, plans
        made[number] = stage
    return made


def _values(traced: Traced, partition: Partition, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return what passes between stages, in shape and type alone, by name; and the tiles."""
    parameter = next(traced.model.parameters())
    device, reading, made = parameter.device, Reading(traced.model), dict[str, Any]()
    backward = {edge.value: edge.differentiable for edge in partition.edges}

    def example(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensor = torch.zeros((), dtype=leaf.dtype, device=device).expand(leaf.shape)
        return tensor.requires_grad_(backward.get(name, False) and leaf.is_floating_point())

    images = torch.zeros((), dtype=parameter.dtype.to_real(), device=device).expand(shape)
    if partition.depth == 1:
        return dict.fromkeys(partition.inputs_of(0), images)
    state = replacements(traced.model, torch.zeros_like)  # a model may look at a flag of its own
    with without_data() as fake, swapped(traced.model, {key: fake.from_tensor(t) for key, t in state.items()}):
        _follow(traced, reading, fake.from_tensor(images))
    for name, value in reading.values.items():
        if name in backward or name in partition.inputs_of(0):
            made[name] = tree_map(lambda leaf, name=name: example(name, leaf), value)
    return made


def _follow(traced: Traced, reading: Reading, images: Tensor) -> None:
    """Let ``reading`` learn the value of every node."""
    for node in traced.training.graph.nodes:
        if node.op == "placeholder":
            reading.values[node.name] = images
        elif node.op != "output":
            try:
                reading.of(node)
            except Exception as fault:  # whatever a user's module raises
                raise ValueError(
                    f"--stream over several stages needs the shapes that pass between them without data, and "
                    f"{node.name} ({node.target}) cannot run so: {' '.join(str(fault).split())}. Use --stream with "
                    "--parallel single, or leave --stream out"
                ) from fault
