"""The engine under any schedule.

Takes the workload and the schedule's name; keeps how long each action took in each measured step, for the simulation.
"""

from __future__ import annotations

from collections import defaultdict

import torch.nn.functional as F

from benchmarks.schedules.workload import LEARNING_RATE, Workload
from benchmarks.whole_engine import cpu_engine
from parallel.comm.communicator import Communicator
from parallel.engine.step import Microbatch
from parallel.offload.packing import ActivationMeter
from parallel.strategy import Strategy

Durations = dict[str, list[float]]
"""Stage and kind, as ``0F``, -> seconds of each time it was computed."""


class Ours:
    """The engine. With one rank it is given a communicator of one, and the others stand by."""

    def __init__(
        self, schedule: str, work: Workload, communicator: Communicator, meter: ActivationMeter | None = None
    ) -> None:
        whole = schedule == "ddp"
        self.name = f"{'engine ' * whole}{schedule} m={work.m}" if communicator.world > 1 else "engine on one rank"
        self.work = work
        depth, chunks = 1 if whole else communicator.world, 2 if schedule == "interleaved" else 1
        self.strategy = Strategy(schedule, communicator.world, depth, work.m, chunks=chunks)
        rules = work.build(), F.cross_entropy, work.make_optimizer
        self.engine = cpu_engine(*rules, communicator, self.strategy, work.shape, work.m, meter)
        wants = [self.engine.wants(i) for i in self.engine.share]
        self._microbatches = [
            Microbatch(image if want.images else None, label if want.targets else None, work.shape)
            for want, (image, label) in zip(wants, work.tiles(self.engine.share), strict=True)
        ]
        self.rounds: list[Durations] = []

    def step(self, number: int) -> None:
        self.engine.step(self._microbatches, number, LEARNING_RATE)

    def record(self) -> None:
        """Keep how long the actions of the last step took."""
        durations: Durations = defaultdict(list)
        for span in self.engine.spans():
            durations[f"{span.action.stage}{span.action.kind.value}"].append(span.duration_s)
        self.rounds.append(dict(durations))
