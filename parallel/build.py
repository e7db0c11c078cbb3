"""Build an engine from a user's model and a strategy: trace, cut, schedule, check, and put the stages to work.

Takes the whole model on every rank, gives an ``Engine`` that holds only this rank's stages. Everything that can be
wrong with a strategy is found here, before the first step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate

import torch
from torch import nn

from parallel.comm.communicator import Communicator
from parallel.comm.grad_reducer import GradReducer, broadcast_tensors
from parallel.comm.objects import make_dense
from parallel.comm.sharded_reducer import ParameterPiece, ShardedReducer
from parallel.comm.thread_comm import LocalCommunicator
from parallel.cost.stage_cost import nominal_costs
from parallel.engine.async_engine import AsyncEngine
from parallel.engine.engine import Engine
from parallel.engine.messages import Messenger
from parallel.engine.optimizer_step import MakeOptimizer, OptimizerStep
from parallel.engine.parameter_server import ParameterServer
from parallel.engine.rank_program import RankProgram, StageGroups, statistics_of_stage
from parallel.engine.state_dict import FullStateDict
from parallel.engine.step import Observer
from parallel.engine.transfers import Routes, StageTransfers
from parallel.graph.layers import RANDOM_STATE
from parallel.graph.partition import Partition
from parallel.memory.policy import ActivationPolicy, segments_of
from parallel.offload.copies import Copies
from parallel.offload.host_memory import HostMemory
from parallel.offload.host_parameters import HostParameters, buffers_to
from parallel.offload.live_bytes import not_counted
from parallel.offload.packing import ActivationMeter
from parallel.offload.saved_tensors import SavedTensors
from parallel.schedule.action import Action, Kind, Schedule, held
from parallel.schedule.mesh import Mesh
from parallel.schedule.passes import add_communication
from parallel.schedule.shares import Shares
from parallel.schedule.text import PushRule
from parallel.stage.microbatch_state import WeightVersions
from parallel.stage.split_backward import DeferredWeights
from parallel.stage.stage import Loss, Stage
from parallel.strategy import Strategy
from parallel.team.team_comm import TeamComm
from parallel.team.team_plan import MOST_PLANS, BoxedParts, Plans, plan_alone, team_plans
from parallel.team.team_stages import stages_of_rank
from parallel.trace.cut import cut_stage
from parallel.trace.stage_module import StageModule
from parallel.trace.trace import Traced, Untraced, UntracedModule, trace_as_needed
from parallel.trace.updated_search import refuse_schedule


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
        loss: (output, targets) -> mean over a microbatch; computed with the last stage; nothing in it is trained.
        make_optimizer: over all named parameters it is given; groups differ in learning rate by ``lr_scale``.
        shape: (n, 3, h, w) of a usual microbatch; others may follow.
        batch: tiles of a usual step over all ranks.
        autocast: torch.bfloat16 for mixed precision; None computes in the model's own type.
        meter: counts the bytes this rank keeps for backward.
        host: where maps of stages in boxes are; None: in memory.

    Raises:
        ValueError: a strategy, cut or schedule that does not fit the ranks, the model or each other; a loss, optimizer
            or ``autocast`` that no engine trains with.
    """
    assert strategy.ranks == communicator.world
    if batch < strategy.m:
        raise ValueError(
            f"{strategy.m} microbatches need a batch of at least {strategy.m} tiles, got {batch}: raise --batch or "
            "lower --microbatches"
        )
    if strategy.name == "fsdp":
        raise ValueError('assemble does not build "fsdp": use parallel.engine.fully_sharded.FullyShardedEngine')
    if strategy.name == "async" and strategy.pushes is None:
        raise ValueError('Strategy("async") has no pushes: give it pushes=PushRule(...) of parallel.schedule.text')
    if autocast not in (None, torch.bfloat16):
        raise ValueError(f"autocast={autocast} needs a scaled loss, which no engine has: use torch.bfloat16 or None")
    for name, parameter in loss.named_parameters() if isinstance(loss, nn.Module) else ():
        if parameter.requires_grad:
            raise ValueError(f"the loss has a trained parameter, {name}, which no engine updates: move it to the model")
    parts = trace_as_needed(module, shape, communicator, strategy), loss, make_optimizer, communicator, strategy
    work = put_to_work(*parts, batch=batch, shape=shape, device=device, autocast=autocast, meter=meter, host=host)
    if strategy.pushes is not None:
        return AsyncEngine(work, communicator, replayed=strategy.pushes.replayed, seed=seed, observer=observer)
    return Engine(work, communicator, seed=seed, observer=observer)


def put_to_work(
    traced: Traced | Untraced,
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
    """Return the program of this rank of a traced model; for the other arguments see ``assemble``."""
    partition = strategy.partition(traced.graph)
    mesh, policy, rank = strategy.mesh, strategy.policy, communicator.rank
    team = mesh.team_of(rank)
    costs = nominal_costs(partition) if policy.moves else None

    def scheduled(shares: Shares) -> Schedule:
        return dataclasses.replace(strategy, shares=shares).schedule(partition.links, costs)

    schedule = scheduled(strategy.shares)
    updated: Collection[str] = ()
    if isinstance(traced, Traced):
        refuse_schedule(traced, partition, schedule, mesh, policy, strategy.name)
        updated = traced.updated
    split = {action.stage for action in schedule[team] if action.kind is Kind.BACKWARD_INPUT}
    holders = StageGroups(communicator, mesh, peers=strategy.ways > 1)
    communicator.connect(mesh.pairs(partition.links))
    numbers = sorted({stage for stage, _ in mesh.held_by(team)})
    link = plan_of = server = None
    if isinstance(traced, Untraced):
        cuts: Mapping[int, StageModule] = {0: UntracedModule(traced.model)}
    elif mesh.members > 1 or policy.stream is not None:
        comm, plans = TeamComm(holders.team, mesh.ranks_of(team)), _plans(traced, strategy)
        if mesh.members > 1:
            holders.team.all_reduce(torch.zeros(1, device=device))  # connects its GPUs
            link, plan_of = comm, plans
        boxed = _boxed(policy, schedule[team], device, host)
        cuts = stages_of_rank(traced, partition, numbers, strategy, comm, plans, shape, device, boxed)
    else:
        cuts = {n: cut_stage(traced, partition, n, segments_of(partition, n, policy)) for n in numbers}
    saved = SavedTensors(policy, device, meter=meter)
    stages = {
        number: _stage(
            cut, number, partition, strategy, holders, device, autocast, loss, number in split, saved, updated
        )
        for number, cut in cuts.items()
    }
    names = [name for name, _ in traced.model.named_parameters()]
    if strategy.pushes is not None:
        reducers, update, server = _served(make_optimizer, names, stages[0], communicator, strategy.pushes)
    else:
        reducers = _reducers(stages, holders, strategy, overlap=not split and strategy.gradient_bytes != 0)
        offload = Copies.for_device(device) if policy.optimizer or policy.parameters else None
        update = _update(make_optimizer, names, stages, reducers, offload, policy.parameters)
    messenger, routes = Messenger(communicator, device), _routes(partition)
    return RankProgram(
        schedule=schedule,
        scheduled=scheduled,
        mesh=mesh,
        stages=stages,
        transfers=StageTransfers(routes, partition.links, mesh, messenger, rank, plan_of),
        reducers=reducers,
        update=update,
        messenger=messenger,
        prediction=_prediction(mesh, routes, team),
        full_state=FullStateDict(tuple(traced.model.state_dict()), names, stages, update, mesh, communicator),
        inputs=partition.inputs_of(0)[0],
        share=strategy.share_of(mesh.group_of(rank)),
        batch=batch if strategy.pushes is None else batch // strategy.m,
        m=strategy.m,
        link=link,
        server=server,
    )


def _routes(partition: Partition) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return names of the values that go from one stage to another."""
    return {
        way: tuple(edge.value for edge in partition.edges if (edge.source, edge.target) == way)
        for way in partition.links
    }


def _prediction(mesh: Mesh, routes: Routes, team: int) -> list[Action]:
    """Return what ``team`` does in a prediction: forward passes of one microbatch by replica 0, and their messages."""
    links = {way: False for way, names in routes.items() if names != (RANDOM_STATE,)}
    first = team - team % mesh.depth
    forward = {
        each: [Action(Kind.FORWARD, stage, 0) for stage, replica in mesh.held_by(each) if not replica]
        for each in range(first, first + mesh.depth)
    }
    return add_communication(forward, mesh, links)[team]


def _reducers(
    stages: Mapping[int, Stage], holders: StageGroups, strategy: Strategy, *, overlap: bool
) -> dict[int, GradReducer]:
    """Return what sums gradients, of the stages that other ranks hold, too."""
    allocating = not_counted if strategy.policy.parameters else contextlib.nullcontext
    make: Callable[..., GradReducer] = GradReducer
    if strategy.zero:
        make = functools.partial(ShardedReducer, allocating=allocating)
    reducers: dict[int, GradReducer] = {}
    with allocating():
        for number, stage in stages.items():
            ranks, named = holders.of_stage[number], stage.parameters.items()
            if ranks.world > 1:
                shared, size = stage.module.held(named, own=False), strategy.gradient_bytes
                reducers[number] = make(shared, ranks, overlap=overlap, bucket_bytes=size)
                if holders.peers.world > 1:
                    reducers[number].add(stage.module.held(named, own=True), holders.peers)
    return reducers


def _served(
    make_optimizer: MakeOptimizer, names: Sequence[str], stage: Stage, communicator: Communicator, rule: PushRule
) -> tuple[dict[int, GradReducer], OptimizerStep, ParameterServer | None]:
    """Return where this worker's gradients lie, the optimizer of this rank, and the parameter server, on rank 0."""
    parameters = {name: stage.parameters[name] for name in names}
    reducers = {0: GradReducer(parameters.values(), LocalCommunicator(), overlap=False, bucket_bytes=0)}
    if communicator.rank == 0:
        server = ParameterServer(parameters, make_optimizer, communicator, rule)
        return reducers, server.update, server
    return reducers, OptimizerStep(make_optimizer, owned={}, unshared=(), held=parameters), None


def _plans(traced: Traced, strategy: Strategy) -> Plans:
    """Return what gives the plan of a team for tiles of a shape; each is made when it is first asked for."""
    if strategy.mesh.members == 1 or strategy.grid is None:
        return functools.lru_cache(MOST_PLANS)(plan_alone)
    return team_plans(traced, strategy.grid, once=strategy.policy.stream is None)


def _boxed(
    policy: ActivationPolicy, actions: Sequence[Action], device: torch.device, host: HostMemory | None
) -> BoxedParts | None:
    """Return the boxes of ``policy``, if any. Microbatches in flight share the bytes of host and GPU."""
    if policy.stream is None:
        return None
    if any(action.kind is Kind.BACKWARD_INPUT for action in actions):
        raise ValueError("--stream computes backward in boxes, and cannot split it as zero-bubble does: use 1f1b")
    most = max(accumulate(bool(after) - bool(before) for _, before, after in held(actions)), default=1)
    here = (policy.map_bytes or 0) // most if device.type == "cuda" else 0
    return BoxedParts(policy.stream, policy.host_bytes and policy.host_bytes // most, host, here)


def _stage(
    cut: StageModule,
    number: int,
    partition: Partition,
    strategy: Strategy,
    holders: StageGroups,
    device: torch.device,
    autocast: torch.dtype | None,
    loss: Loss,
    splits: bool,
    saved_tensors: SavedTensors,
    updated: Collection[str],
) -> Stage:
    """Stage ``number``, with the same weights on all ranks that hold it."""
    ranks = holders.of_stage[number]
    make_dense((*cut.parameters(), *cut.buffers()))
    if not strategy.policy.parameters:
        buffers_to(cut.root, device)  # first: ``to`` would make a copy for each name of a buffer
        cut.to(device)
    for holding, own in ((ranks, False), (holders.peers, True)):
        broadcast_tensors(holding, cut.held((*cut.named_parameters(), *cut.named_buffers()), own=own), 0)
    if strategy.policy.parameters:
        saved_tensors.streams(HostParameters(cut.root, device, saved_tensors.copies))
    return Stage(
        cut,
        device,
        statistics=statistics_of_stage(cut, ranks, holders.peers, strategy.statistics),
        autocast=autocast,
        compiled=strategy.compile,
        loss=loss if number == partition.depth - 1 else None,
        no_grad_outputs=[
            edge.value
            for edge in partition.edges
            if edge.source == number
            and edge.value in partition.graph.by_name
            and edge.value not in partition.graph.asked_back
        ],
        uses_rng=any(layer.random for layer in partition.layers_of(number)),
        weights=DeferredWeights(cut, saved_tensors.meter) if splits else None,
        saved_tensors=None if saved_tensors.idle else saved_tensors,
        updated=updated,
        versions=WeightVersions(cut) if strategy.stashes else None,
    )


def _update(
    make_optimizer: MakeOptimizer,
    names: Sequence[str],
    stages: Mapping[int, Stage],
    reducers: Mapping[int, GradReducer],
    offload: Copies | None,
    resident: bool,
) -> OptimizerStep:
    """The optimizer of this rank: over the stages it holds, and over its pieces of those that are divided."""
    held = {name: parameter for stage in stages.values() for name, parameter in stage.parameters.items()}
    owned, pieces = dict(held), dict[str, ParameterPiece]()
    shards = {number: each for number, each in sorted(reducers.items()) if isinstance(each, ShardedReducer)}
    for number, shard in shards.items():
        own = {piece.parameter: piece for piece in shard.pieces}
        for name, parameter in stages[number].parameters.items():
            if parameter in own:
                owned[name], pieces[name] = own[parameter].value, own[parameter]
            elif parameter.requires_grad:
                del owned[name]
    summed = {number for reducer in reducers.values() for number in reducer.summed}
    return OptimizerStep(
        make_optimizer,
        owned={name: owned[name] for name in names if name in owned},
        unshared=[parameter for parameter in held.values() if id(parameter) not in summed],
        held=held,
        pieces=pieces,
        shards=list(shards.values()),
        offload=offload,
        resident=resident,
    )
