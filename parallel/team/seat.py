"""The stages on one seat, as the rank of a team holds them, from a strategy.

Takes a traced model and its partition; gives modules, or says why a team cannot compute them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx, nn

from parallel.graph.partition import Partition
from parallel.memory.policy import segments_of
from parallel.strategy import Strategy
from parallel.streaming.read_region import NothingInBoxes
from parallel.team.boxed_nodes import BoxedNodes, BoxedParts, region_of_stage
from parallel.team.team_comm import TeamComm
from parallel.team.team_plan import TeamPlan, TeamPlans
from parallel.team.team_stage import TeamRun, TeamStage, team_stages
from parallel.trace.left_as_it_was import left_as_it_was
from parallel.trace.trace import Traced


def modules_of_seat(
    traced: Traced,
    partition: Partition,
    numbers: Sequence[int],
    strategy: Strategy,
    link: TeamComm,
    plans: TeamPlans,
    shape: tuple[int, ...],
    device: torch.device,
    boxed: BoxedParts | None = None,
) -> Mapping[int, TeamStage]:
    """Return the stages ``numbers``, which this rank computes with the others on its seat.

    Raises:
        ValueError: the model updates buffers of its own in forward passes, or nothing of it has rows to divide, or can
            be computed box by box where that is asked for.
    """
    if traced.updated:
        raise ValueError(
            f"--grid: {next(iter(traced.updated))} is updated by forward passes, each member of a team by its own part "
            "of the tile: leave --grid out for this model"
        )
    assert strategy.grid is not None
    if strategy.name == "spatial" and (plan := plans.plan(strategy.grid, shape, True)).region is None:
        layer, reason = plan.ends_at or ("the model", "")
        raise ValueError(f"--parallel spatial finds nothing to divide: {layer} {reason}; use --parallel ddp")
    segments = {number: segments_of(partition, number, strategy.policy) for number in numbers}
    stages = team_stages(traced, partition, dict.fromkeys(numbers, strategy.grid), link, plans, device, segments, boxed)
    if boxed is not None:
        _plan_boxes(traced, partition, plans.plan(strategy.grid, shape, True), stages)
    _leave_shapes(traced.model, stages.values())
    return stages


def _plan_boxes(traced: Traced, partition: Partition, plan: TeamPlan, stages: Mapping[int, TeamStage]) -> None:
    """Plan the boxes of ``stages``, so that what is wrong is said now; of the other stages, see that they have any."""
    nodes: dict[int, list[fx.Node]] = {}
    for node in traced.training.graph.nodes:
        nodes.setdefault(partition.stage_of(node.name), []).append(node)
    if not any(
        plan.region is not None and region_of_stage(plan.region, nodes[number], partition.inputs_of(number))
        for number in range(partition.depth)
    ):
        raise NothingInBoxes(*(plan.ends_at or ("the model", "has no layer that takes maps")))
    with left_as_it_was(traced.model):
        for stage in stages.values():
            stage.train()
            run = stage._run_training
            assert isinstance(run, TeamRun)
            assert isinstance(run.nodes, BoxedNodes)
            run.nodes.planned(stage, plan)
    for stage in stages.values():
        stage.train(traced.model.training)


def _leave_shapes(model: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Let go of parameters that other ranks hold: plans for tiles of other sizes ask for their shapes alone."""
    held = {id(module) for stage in stages for module in stage.modules()}
    for module in model.modules():
        for name, parameter in module._parameters.items() if id(module) not in held else ():
            if parameter is not None:
                shape = parameter.detach().new_zeros(()).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(shape, parameter.requires_grad)
