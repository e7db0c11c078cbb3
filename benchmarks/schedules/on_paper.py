"""The step of an engine on paper: `simulate`, fed with what its stages, links and sums were measured to take.

Takes an engine that has recorded some steps; gives the step time that the schedule promises for each. Stages take what
their actions took on average in that very step, so that both ranks were at work; messages and sums are timed by
themselves.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.schedules.ours import Durations, Ours
from parallel.comm.communicator import Communicator
from parallel.comm.objects import gather_objects
from parallel.graph.partition import Partition
from parallel.memory.rank_bytes import BUCKET_BYTES
from parallel.schedule.action import Kind
from parallel.schedule.simulate import simulate
from parallel.schedule.timeline import LinkCost, StageCost

COSTED = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.UPDATE)
TRIES = 11


def simulated_steps_s(ours: Ours, communicator: Communicator) -> list[float] | None:
    """Step time of each recorded step, on rank 0; None on the others. Every rank takes part.

    The update after a whole step and the sum of the losses are left out.
    """
    mesh = ours.strategy.mesh
    partition = ours.work.partition(mesh.stages)
    links = {}
    for (source, target), back in partition.links.items():
        travel = travel_s(communicator, partition.bytes_over(source, target))
        links[source, target] = LinkCost(travel, travel if back else None)
    sums = {
        stage: sum_s(communicator, _param_bytes(partition, stage))
        for stage in range(mesh.stages)
        if len(mesh.teams_with(stage)) > 1
    }
    told = gather_objects(communicator, ours.rounds)
    if told is None:
        return None
    return [
        simulate(ours.engine.schedule, mesh, _costs(of_ranks, mesh.stages), links, sums).makespan_s
        for of_ranks in zip(*told, strict=True)
    ]


def _costs(of_ranks: Sequence[Durations], stages: int) -> list[StageCost]:
    """Return the seconds of the actions of each stage in one step, on average over microbatches and holders."""

    def mean_s(key: str) -> float:
        durations = [seconds for own in of_ranks for seconds in own.get(key, [])]
        return statistics.mean(durations) if durations else 0.0

    def cost(stage: int) -> StageCost:
        forward_s, backward_s, input_s, weight_s, update_s = (mean_s(f"{stage}{kind.value}") for kind in COSTED)
        return StageCost(forward_s, backward_s, input_s, weight_s, activation_bytes=0, update_s=update_s)

    return [cost(stage) for stage in range(stages)]


def travel_s(communicator: Communicator, size: int) -> float:
    """Seconds that ``size`` bytes take from rank 0 to rank 1: half of a way there and back, median."""
    tensor = torch.zeros(size, dtype=torch.uint8)
    taken = []
    for _ in range(TRIES):
        communicator.barrier()
        begun = time.perf_counter()
        for sender in (0, 1):
            begin = communicator.isend if communicator.rank == sender else communicator.irecv
            begin(tensor, 1 - communicator.rank, 0).wait()
        taken.append((time.perf_counter() - begun) / 2)
    return statistics.median(taken)


def sum_s(communicator: Communicator, size: int) -> float:
    """Seconds that the sum of ``size`` bytes of gradients takes, in the engine's buckets, median."""
    buckets = torch.zeros(size // 4).split(BUCKET_BYTES // 4)
    taken = []
    for _ in range(TRIES):
        communicator.barrier()
        begun = time.perf_counter()
        for work in [communicator.iall_reduce(bucket) for bucket in buckets]:
            work.wait()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def _param_bytes(partition: Partition, stage: int) -> int:
    return sum(layer.param_bytes for layer in partition.layers_of(stage))
