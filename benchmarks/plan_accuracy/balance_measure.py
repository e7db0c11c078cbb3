"""How long each stage of a partition takes: forward and backward of one microbatch, measured.

Takes a traced model and partitions of it; gives seconds by stage. All stages run in this process one after the other,
on one thread, as the engine runs them on a rank each; messages are not in it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parallel.comm.local import LocalCommunicator
from parallel.graph.layers import RANDOM_STATE
from parallel.graph.partition import Partition
from parallel.stage.batchnorm import running_statistics
from parallel.stage.stage import Compute, Stage
from parallel.trace.cut import cut_stage
from parallel.trace.trace import Traced

CPU = torch.device("cpu")


def stage_times(
    traced: Traced, partitions: Mapping[str, Partition], images: Tensor, rounds: int
) -> dict[str, list[float]]:
    """Name of a partition -> seconds of each stage, the fastest of ``rounds`` in which the partitions take turns."""
    taken: dict[str, list[list[float]]] = {name: [] for name in partitions}
    for _ in range(rounds):
        for name, partition in partitions.items():
            taken[name].append(_once(_stages(traced, partition), partition, images))
    return {name: [min(of_stage) for of_stage in zip(*own, strict=True)] for name, own in taken.items()}


def _stages(traced: Traced, partition: Partition) -> list[Stage]:
    found = []
    for number in range(partition.depth):
        module = cut_stage(traced, partition, number).train()
        found.append(
            Stage(
                module,
                Compute(CPU),
                statistics=running_statistics(module, LocalCommunicator(), "per-microbatch"),
                loss=_loss if number == partition.depth - 1 else None,
                uses_rng=any(layer.random for layer in partition.layers_of(number)),
            )
        )
    return found


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def _once(stages: Sequence[Stage], partition: Partition, images: Tensor) -> list[float]:
    """Seconds of each stage for one microbatch; gradients of parameters are new, as in the first of a step."""
    held: dict[str, Tensor] = dict.fromkeys(partition.inputs_of(0), images)
    random: int | Tensor = 0
    seconds = []
    for stage in stages:
        for parameter in stage.parameters.values():
            parameter.grad = None
        stage.statistics.begin_step(1)
        # Leaves of its own for each stage, as a message makes them.
        given = {name: held[name].detach().requires_grad_(held[name].requires_grad) for name in stage.module.inputs}
        begun = time.perf_counter()
        outputs = stage.forward(0, given, random, targets=torch.zeros(()))
        seconds.append(time.perf_counter() - begun)
        random = outputs.pop(RANDOM_STATE, random)
        held |= outputs
    back: dict[str, list[Tensor]] = {}
    for number in reversed(range(len(stages))):
        begun = time.perf_counter()
        gradients = stages[number].backward(0, back)
        seconds[number] += time.perf_counter() - begun
        for name, own in gradients.items():
            sums = [a + b for a, b in zip(back[name], own, strict=True)] if name in back else own
            if sums:
                back[name] = sums
    return seconds
