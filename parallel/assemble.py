"""From a user's model and a strategy to an engine: trace, cut, schedule, check, and put the stages to work.

Takes the whole model on every rank, gives an ``Engine`` that holds only this rank's stages. Everything that can be
wrong with a strategy is found here, before the first step.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from parallel.action import Kind, Schedule
from parallel.activations import ActivationMeter
from parallel.batchnorm import running_statistics
from parallel.canonical import CanonicalState
from parallel.check import check
from parallel.comm.communicator import Communicator
from parallel.comm.objects import broadcast_tensors
from parallel.cut import cut_stage
from parallel.engine import Engine, Observer, RankWork
from parallel.exchange import GradientExchange
from parallel.handover import Handover
from parallel.holders import Holders
from parallel.lowering import Links, lower
from parallel.messages import Messenger
from parallel.microbatch import share_of
from parallel.partition import Partition, partition_at, partition_equal
from parallel.placement import Placement
from parallel.prediction import Prediction
from parallel.schedule_file import from_csv
from parallel.schedules.registry import SCHEDULES, build_schedule, placement_for
from parallel.stage import Stage
from parallel.step import Loss
from parallel.trace import Traced, trace
from parallel.update import Copy, MakeOptimizer, Update


_TRACING = threading.Lock()
"""Symbolic tracing replaces ``nn.Module.__call__`` for the whole process while it runs, and watches its generators."""


@dataclass(frozen=True)
class Strategy:
    """How a model is spread over ranks.

    Attributes:
        name: of the schedule.
        ranks: all of them; d groups of ``depth``.
        depth: ranks that one group spreads the model over, D.
        m: microbatches of the global batch, over all groups.
        chunks: stages a rank holds of each replica; interleaved has 2 or more.
        cuts: names of layers or modules that begin a stage; empty: stages of equal cost.
        schedule_csv: text of a schedule file, run in place of the named one's actions on the same placement.
        recompute: keep only what enters a stage, and compute the rest again before its backward pass.
        shard_optimizer: each rank of a pair of inverted replicas keeps half of their optimizer state.
        statistics: running statistics of normalisation layers once per microbatch, or deferred to once per step.
        compile: run the stages through ``torch.compile``.
    """

    name: str
    ranks: int
    depth: int
    m: int
    chunks: int = 1
    cuts: tuple[str, ...] = ()
    schedule_csv: str | None = None
    recompute: bool = False
    shard_optimizer: bool = False
    statistics: Literal["per-microbatch", "deferred"] = "per-microbatch"
    compile: bool = False

    @property
    def placement(self) -> Placement:
        """The mesh.

        Raises:
            ValueError: the schedule cannot run on it.
        """
        faults = []
        if self.depth < 1 or self.ranks % self.depth:
            faults.append(f"{self.ranks} ranks cannot be grouped by {self.depth} stages' ranks: choose a divisor")
        replicas = SCHEDULES[self.name].replicas if self.name in SCHEDULES else 2
        if self.shard_optimizer and replicas < 2:
            faults.append(f"{self.name} has no pairs of replicas to share an optimizer: use master or bidirectional")
        if self.compile and self.name == "zero-bubble":
            faults.append(
                "zero-bubble splits the backward pass, which compiled stages cannot: use 1f1b, or do not compile"
            )
        if faults:
            raise ValueError("; ".join(faults))
        return placement_for(self.name, groups=self.ranks // self.depth, depth=self.depth, chunks=self.chunks)


def _partition(traced: Traced, strategy: Strategy, placement: Placement) -> Partition:
    if not strategy.cuts:
        return partition_equal(traced.graph, placement.stages)
    if len(strategy.cuts) != placement.stages - 1:
        raise ValueError(
            f"{len(strategy.cuts)} cuts make {len(strategy.cuts) + 1} stages and {placement.stages} are needed: name "
            f"{placement.stages - 1} layers or modules that begin a stage"
        )
    return partition_at(traced.graph, strategy.cuts)


def _schedule(strategy: Strategy, placement: Placement, links: Links) -> Schedule:
    """The lowered schedule of all ranks, proven to run."""
    if strategy.schedule_csv is None:
        schedule = build_schedule(strategy.name, placement, strategy.m)
    else:
        schedule = from_csv(strategy.schedule_csv)
    check(schedule, placement, links)
    lowered = lower(schedule, placement, links, recompute=strategy.recompute)
    check(lowered, placement, links)
    return lowered


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

    Raises:
        ValueError: a strategy, cut or schedule that does not fit the ranks, the model or each other.
    """
    assert strategy.ranks == communicator.world
    placement = strategy.placement
    rank = communicator.rank
    # Ranks may be threads of one process: none draws weights before, or computes after, while another traces.
    communicator.barrier()
    with _TRACING:
        traced = trace(module, shape, dtype=next(module.parameters()).dtype)
    communicator.barrier()
    partition = _partition(traced, strategy, placement)
    schedule = _schedule(strategy, placement, partition.links)
    messenger = Messenger(communicator, device)
    routes = {
        way: tuple(edge.value for edge in partition.edges if (edge.source, edge.target) == way)
        for way in partition.links
    }
    handover = Handover(routes, partition.links, placement, messenger, rank)
    holders = Holders(communicator, placement, pairs=strategy.shard_optimizer)
    splits = any(action.kind is Kind.BACKWARD_INPUT for action in schedule[rank])

    stages: dict[int, Stage] = {}
    exchanges: dict[int, GradientExchange] = {}
    for number in sorted({stage for stage, _ in placement.held_by(rank)}):
        cut = cut_stage(traced, partition, number).to(device)
        ranks = holders.of_stage[number]
        if ranks.world > 1:
            broadcast_tensors(ranks, list(cut.state_dict().values()), 0)
        if meter is not None:
            meter.exclude((*cut.parameters(), *cut.buffers()))
        stages[number] = Stage(
            cut,
            device=device,
            statistics=running_statistics(cut, ranks, strategy.statistics),
            loss=loss if number == partition.depth - 1 else None,
            differentiable=[edge.value for edge in partition.edges if edge.source == number and edge.differentiable],
            draws=any(layer.random for layer in partition.layers_of(number)),
            autocast=autocast,
            split=splits,
            compiled=strategy.compile,
            meter=meter,
        )
        if ranks.world > 1:
            exchanges[number] = GradientExchange(cut.parameters(), ranks, overlap=not splits)

    names = [name for name, _ in module.named_parameters()]
    held = {name: parameter for stage in stages.values() for name, parameter in stage.parameters.items()}
    group = placement.group_of(rank)
    others = {
        name
        for number, stage in stages.items()
        if strategy.shard_optimizer and placement.rank_of(number, 0, group) != rank
        for name in stage.parameters
    }
    update = Update(
        make_optimizer,
        owned={name: held[name] for name in names if name in held and name not in others},
        unshared=[p for n, stage in stages.items() if n not in exchanges for p in stage.parameters.values()],
        held=held.values(),
        copies=[
            # The lower rank of a pair comes first in it.
            Copy(tuple(stages[n].parameters.values()), pair, int(placement.rank_of(n, 0) > placement.rank_of(n, 1)))
            for n, pair in sorted(holders.pairs.items())
        ],
    )
    canonical = CanonicalState(
        keys=tuple(module.state_dict()),
        parameters=names,
        stages=stages,
        update=update,
        placement=placement,
        communicator=communicator,
    )
    inputs = partition.inputs_of(0)[0]
    work = RankWork(
        schedule=schedule,
        placement=placement,
        stages=stages,
        handover=handover,
        exchanges=exchanges,
        update=update,
        messenger=messenger,
        prediction=Prediction(stages, routes, placement, messenger, rank, inputs),
        canonical=canonical,
        inputs=inputs,
        share=share_of(placement.group_of(rank), placement.groups, strategy.m),
        batch=batch,
        m=strategy.m,
    )
    return Engine(work, communicator, seed=seed, observer=observer)
