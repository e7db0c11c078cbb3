"""From a user's model and a strategy to an engine: trace, cut, schedule, check, and put the stages to work.

Takes the whole model on every rank, gives an ``Engine`` that holds only this rank's stages. Everything that can be
wrong with a strategy is found here, before the first step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch
from torch import nn

from parallel.comm.communicator import Communicator
from parallel.comm.grad_reducer import GradReducer, broadcast_tensors
from parallel.cost.stage_cost import nominal_costs
from parallel.engine.engine import Engine, Observer
from parallel.engine.inference import Inference
from parallel.engine.messages import Messenger
from parallel.engine.optimizer_step import Copy, MakeOptimizer, OptimizerStep
from parallel.engine.rank_program import RankProgram
from parallel.engine.stage_groups import StageGroups
from parallel.engine.state_dict import FullStateDict
from parallel.engine.team_transfers import TeamTransfers
from parallel.engine.transfers import StageTransfers
from parallel.graph.partition import Partition
from parallel.memory.policy import ActivationPolicy
from parallel.memory.segments import segments_of
from parallel.offload.activation_meter import ActivationMeter
from parallel.offload.copies import Copies
from parallel.offload.host_memory import HostMemory
from parallel.offload.host_parameters import HostParameters
from parallel.offload.live_bytes import not_counted
from parallel.offload.saved_tensors import SavedTensors
from parallel.schedule.action import Action, Kind, Schedule, held
from parallel.schedule.dependencies import Links
from parallel.schedule.mesh import Mesh
from parallel.schedule.shares import Shares
from parallel.schedule.timeline import StageCost
from parallel.stage.batchnorm import running_statistics
from parallel.stage.split_backward import DeferredWeights
from parallel.stage.stage import Compute, Loss, Stage
from parallel.strategy import Strategy
from parallel.streaming.streamed_stages import streamed_stages
from parallel.team.boxed_nodes import BoxedParts
from parallel.team.seat import modules_of_seat
from parallel.team.team_comm import TeamComm
from parallel.team.team_plan import TeamPlans
from parallel.team.team_stage import TeamStage
from parallel.trace.cut import cut_stage
from parallel.trace.stage_module import StageModule
from parallel.trace.trace import Traced
from parallel.trace.trace_alone import trace_alone, updated_alone
from parallel.trace.untraced import Untraced, UntracedModule
from parallel.trace.updated_faults import refuse_copies, refuse_schedule


def assemble(
    module: nn.Module,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    communicator: Communicator,
    strategy: Strategy,
    *,
    shape: tuple[int, ...],
    batch: int,
    device: torch.device,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    observer: Observer | None = None,
    meter: ActivationMeter | None = None,
    host: HostMemory | None = None,
) -> Engine:
    """The engine of this rank.

    Args:
        module: the whole model; the engine moves its stages to ``device`` and leaves the rest to be freed.
        loss: (output, targets) -> mean over a microbatch; computed with the last stage.
        make_optimizer: over the parameters it is given, in one group.
        shape: (n, 3, h, w) of a usual microbatch; others may follow.
        batch: tiles of a usual step over all ranks.
        autocast: type for mixed precision; None computes in the model's own.
        meter: counts the bytes this rank keeps for backward.
        host: where maps of stages in boxes are; None: in memory.

    Raises:
        ValueError: a strategy, cut or schedule that does not fit the ranks, the model or each other.
    """
    assert strategy.ranks == communicator.world
    if batch < strategy.m:
        raise ValueError(
            f"{strategy.m} microbatches need a batch of at least {strategy.m} tiles, got {batch}: raise --batch or "
            "lower --microbatches"
        )
    traced = _trace_as_needed(module, shape, communicator, strategy)
    work = put_to_work(
        traced,
        strategy.partition(traced.graph),
        loss,
        make_optimizer,
        communicator,
        strategy,
        batch=batch,
        shape=shape,
        device=device,
        autocast=autocast,
        meter=meter,
        host=host,
    )
    return Engine(work, communicator, seed=seed, observer=observer)


def _trace_as_needed(
    module: nn.Module, shape: tuple[int, ...], communicator: Communicator, strategy: Strategy
) -> Traced | Untraced:
    """Return the layers of ``module`` if the strategy cuts, recomputes or streams them, else the module as it is.

    Activations leave for the host earlier if a model is traced: a user's forward holds what it gave to a module.
    """
    policy = strategy.policy
    needed = strategy.splits or policy.segmented or policy.stream is not None
    if needed or policy.moves:
        try:
            traced = trace_alone(module, shape, communicator)
            if needed or not traced.updated:
                return traced
        except ValueError:
            if needed:
                raise
    refuse_copies(updated_alone(module, shape, communicator), communicator.world, strategy.name)
    return Untraced(module)


def put_to_work(
    traced: Traced | Untraced,
    partition: Partition,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    communicator: Communicator,
    strategy: Strategy,
    *,
    batch: int,
    shape: tuple[int, ...],
    device: torch.device,
    autocast: torch.dtype | None = None,
    meter: ActivationMeter | None = None,
    host: HostMemory | None = None,
) -> RankProgram:
    """What this rank of a traced model computes, and with what; for the rest see ``assemble``.

    Args:
        partition: of ``traced``, into the stages of ``strategy``.
    """
    mesh, policy = strategy.mesh, strategy.policy
    rank = communicator.rank
    team = mesh.team_of(rank)
    costs = nominal_costs(partition) if policy.moves else None
    scheduled = functools.partial(_schedule_of, strategy, partition.links, costs)
    schedule = scheduled(strategy.shares)
    updated: Collection[str] = ()
    if isinstance(traced, Traced):
        refuse_schedule(traced, partition, schedule, mesh, policy, strategy.name)
        updated = traced.updated
    splits = any(action.kind is Kind.BACKWARD_INPUT for action in schedule[team])
    holders = StageGroups(communicator, mesh, pairs=strategy.shard_optimizer)
    communicator.connect(mesh.pairs(partition.links))
    numbers = sorted({stage for stage, _ in mesh.held_by(team)})
    link, plans = None, None
    if isinstance(traced, Untraced):
        cuts: Mapping[int, StageModule] = {0: UntracedModule(traced.model)}
    elif mesh.members > 1:
        holders.team.all_reduce(torch.zeros(1, device=device))  # connects its GPUs
        link = TeamComm(holders.team, mesh.ranks_of(team))
        plans = TeamPlans(traced, once=policy.stream is None)
        stored = _stored_bytes(policy, schedule[team])
        boxed = None if policy.stream is None else BoxedParts(policy.stream, stored, host)
        cuts = modules_of_seat(traced, partition, numbers, strategy, link, plans, shape, device, boxed)
    else:
        cuts = _stage_modules(traced, partition, numbers, policy, shape, schedule[team], host)
    compute = Compute(device, autocast, strategy.compile)
    saved = SavedTensors(policy, device, meter=meter)
    stages = {
        number: _stage(cut, number, partition, strategy, holders, compute, loss, splits, saved, meter, updated)
        for number, cut in cuts.items()
    }
    reducers = _reducers(stages, holders, strategy, overlap=not splits and strategy.gradient_bytes != 0)
    names = [name for name, _ in traced.model.named_parameters()]
    offload = Copies.for_device(device) if policy.optimizer or policy.parameters else None
    update = _update(make_optimizer, names, stages, reducers, holders, mesh, rank, offload, resident=policy.parameters)
    messenger, routes, inputs = Messenger(communicator, device), _routes(partition), partition.inputs_of(0)[0]
    if plans is not None:
        assert strategy.grid is not None
        plan_of = functools.partial(plans.plan, strategy.grid)
        transfers: StageTransfers = TeamTransfers(routes, partition.links, mesh, messenger, rank, plan_of)
    else:
        transfers = StageTransfers(routes, partition.links, mesh, messenger, rank)
    return RankProgram(
        schedule=schedule,
        scheduled=scheduled,
        mesh=mesh,
        stages=stages,
        transfers=transfers,
        reducers=reducers,
        update=update,
        messenger=messenger,
        prediction=Inference(stages, routes, mesh, messenger, rank, inputs, transfers),
        full_state=FullStateDict(tuple(traced.model.state_dict()), names, stages, update, mesh, communicator),
        inputs=inputs,
        share=strategy.share_of(mesh.group_of(rank)),
        batch=batch,
        m=strategy.m,
        link=link,
    )


def _schedule_of(strategy: Strategy, links: Links, costs: Sequence[StageCost] | None, shares: Shares) -> Schedule:
    """Return the actions of all teams where groups compute ``shares``; for the rest see ``Strategy.schedule``."""
    return dataclasses.replace(strategy, shares=shares).schedule(links, costs)


def _routes(partition: Partition) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return names of the values that go from one stage to another."""
    return {
        way: tuple(edge.value for edge in partition.edges if (edge.source, edge.target) == way)
        for way in partition.links
    }


def _reducers(
    stages: Mapping[int, Stage], holders: StageGroups, strategy: Strategy, *, overlap: bool
) -> dict[int, GradReducer]:
    """Return what sums gradients, of the stages that other ranks hold, too."""
    with not_counted() if strategy.policy.parameters else contextlib.nullcontext():
        return {
            number: GradReducer(
                stage.module.parameters(),
                holders.of_stage[number],
                overlap=overlap,
                bucket_bytes=strategy.gradient_bytes,
            )
            for number, stage in stages.items()
            if holders.of_stage[number].world > 1
        }


def _stage_modules(
    traced: Traced,
    partition: Partition,
    numbers: Sequence[int],
    policy: ActivationPolicy,
    shape: tuple[int, ...],
    actions: Sequence[Action],
    host: HostMemory | None,
) -> Mapping[int, StageModule]:
    """Return the stages ``numbers``, whole, in segments or in boxes of the tile.

    Args:
        actions: of this rank.
    """
    if policy.stream is None:
        return {n: cut_stage(traced, partition, n, segments_of(partition, n, policy)) for n in numbers}
    if any(action.kind is Kind.BACKWARD_INPUT for action in actions):
        raise ValueError(
            "--stream computes a backward pass box by box, and cannot split it as zero-bubble does: use 1f1b"
        )
    return streamed_stages(traced, partition, numbers, policy.stream, shape, _stored_bytes(policy, actions), host)


def _stored_bytes(policy: ActivationPolicy, actions: Sequence[Action]) -> int | None:
    """Return what maps of one microbatch may take of the host, by the most that are between their forward and backward
    passes at a time; None: as much as is asked for."""
    steps = (bool(after) - bool(before) for _, before, after in held(actions))
    return policy.host_bytes and policy.host_bytes // max(accumulate(steps), default=1)


def _stage(
    cut: StageModule,
    number: int,
    partition: Partition,
    strategy: Strategy,
    holders: StageGroups,
    compute: Compute,
    loss: Loss,
    splits: bool,
    saved_tensors: SavedTensors,
    meter: ActivationMeter | None,
    updated: Collection[str],
) -> Stage:
    """Stage ``number``, with the same weights on all ranks that hold it."""
    ranks = holders.of_stage[number]
    if not strategy.policy.parameters:
        cut.to(compute.device)
    if ranks.world > 1:
        broadcast_tensors(ranks, [*cut.parameters(), *cut.buffers()], 0)
    if strategy.policy.parameters:
        saved_tensors.streams(HostParameters(cut.root, compute.device, saved_tensors.copies))
    if meter is not None:
        meter.exclude((*cut.parameters(), *cut.buffers()))
    return Stage(
        cut,
        compute,
        statistics=running_statistics(
            cut, ranks, strategy.statistics, not isinstance(cut, TeamStage) or bool(cut.counted)
        ),
        loss=loss if number == partition.depth - 1 else None,
        no_grad_outputs=[
            edge.value
            for edge in partition.edges
            if edge.source == number
            and edge.value in partition.graph.by_name
            and edge.value not in partition.graph.asked_back
        ],
        uses_rng=any(layer.random for layer in partition.layers_of(number)),
        weights=DeferredWeights(cut, meter) if splits else None,
        saved_tensors=None if saved_tensors.idle else saved_tensors,
        updated=updated,
    )


def _update(
    make_optimizer: MakeOptimizer,
    names: Sequence[str],
    stages: Mapping[int, Stage],
    reducers: Mapping[int, GradReducer],
    holders: StageGroups,
    mesh: Mesh,
    rank: int,
    offload: Copies | None,
    resident: bool,
) -> OptimizerStep:
    """The optimizer of this rank: over the stages it holds, without those that the other rank of a pair updates."""
    held = {name: parameter for stage in stages.values() for name, parameter in stage.parameters.items()}
    copies: list[Copy] = []
    others: set[str] = set()
    for number, pair in sorted(holders.pairs.items()):
        owner, other = (mesh.rank_at(number, replica, mesh.group_of(rank)) for replica in (0, 1))
        # The lower rank comes first in a pair.
        copies.append(Copy(tuple(stages[number].parameters.values()), pair, int(owner > other)))
        if owner != rank:
            others |= stages[number].parameters.keys()
    return OptimizerStep(
        make_optimizer,
        owned={name: held[name] for name in names if name in held and name not in others},
        unshared=[p for n, stage in stages.items() if n not in reducers for p in stage.parameters.values()],
        held=held.values(),
        copies=copies,
        offload=offload,
        resident=resident,
    )
