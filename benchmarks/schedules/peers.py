"""Peers of the engine: torch's own pipelines on the same stages, data parallelism, and a plain loop.

Each takes the workload and builds its part of it on this rank. The stages of torch's pipelines are cut from the model
at the very places where the engine cuts it, so that both compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from benchmarks.schedules.workload import CPU, Workload
from parallel.comm.communicator import Communicator
from parallel.offload.packing import ActivationMeter
from parallel.schedule.shares import share_of
from parallel.trace.cut import cut_stage
from parallel.trace.stage_module import StageModule
from parallel.trace.trace import trace

TORCH_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class TheirStage(nn.Module):
    """A stage as torch's pipelines take it. Gloo sends what is contiguous, forward and back.

    Args:
        gives: names of the values that the next stage takes, in its order; none of the last stage.
    """

    def __init__(
        self,
        stage: StageModule,
        first: bool,
        gives: tuple[str, ...],
        counted: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        self.stage = stage
        self._first, self._gives, self._counted = first, gives, counted

    def forward(self, *values: Tensor) -> Any:
        if not self._first:
            values = tuple(map(self._received, values))
        with self._counted():
            given = self.stage(*values)
        if not self._gives:
            return given[0]
        made = dict(zip(self.stage.outputs, given, strict=True))
        return tuple(made[name] for name in self._gives)

    def _received(self, value: Tensor) -> Tensor:
        value = value.view_as(value)
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient.contiguous())
        return value


class TorchPipeline:
    """torch.distributed.pipelining, one stage a rank."""

    def __init__(
        self, schedule: str, work: Workload, communicator: Communicator, meter: ActivationMeter | None = None
    ) -> None:
        self.name = f"torch {schedule}"
        rank, depth = communicator.rank, communicator.world
        partition = work.partition(depth)
        stage = cut_stage(trace(work.build(), work.shape), partition, rank).train()
        gives = partition.inputs_of(rank + 1) if rank < depth - 1 else ()
        if past := {*gives} - {*stage.outputs}:
            raise ValueError(
                f"torch's pipelines send values to the next stage alone; {', '.join(sorted(past))} pass one"
            )
        counted: Callable[[], AbstractContextManager[None]] = nullcontext
        if meter:
            counted = partial(meter.watching, (*stage.parameters(), *stage.buffers()))

        def weighted_loss(output: Tensor, labels: Tensor) -> Tensor:
            # As ours, which spares them the pass over all gradients that scale_grads is.
            with counted():
                return F.cross_entropy(output, labels) / work.m

        self._first, self._last = rank == 0, rank == depth - 1
        self._optimizer = work.make_optimizer(stage.named_parameters())
        self._images, self._labels = work.batch()
        self._pipeline = TORCH_SCHEDULES[schedule](
            PipelineStage(TheirStage(stage, self._first, gives, counted), rank, depth, CPU),
            work.m,
            loss_fn=weighted_loss,
            scale_grads=False,
        )

    def step(self, number: int) -> None:
        self._optimizer.zero_grad()
        inputs = (self._images,) if self._first else ()
        targets: dict[str, Any] = {"target": self._labels, "losses": []} if self._last else {}
        self._pipeline.step(*inputs, **targets, return_outputs=False)
        self._optimizer.step()


class DataParallel:
    """DistributedDataParallel: each rank computes its share one microbatch after the other, and sums gradients once.
    Without a communicator, gradient accumulation on one rank, written out."""

    def __init__(self, work: Workload, communicator: Communicator | None = None) -> None:
        self.name = f"ddp m={work.m}" if communicator else "plain loop"
        rank, world = (communicator.rank, communicator.world) if communicator else (0, 1)
        model = work.build().train()
        self._optimizer = work.make_optimizer(model.named_parameters())
        self._model: Any = DistributedDataParallel(model, gradient_as_bucket_view=True) if communicator else model
        self._delay: Any = self._model.no_sync if communicator else nullcontext
        self._weight = world / work.m  # sums are divided by the number of ranks
        self._parts = work.tiles(share_of(rank, world, work.m))

    def step(self, number: int) -> None:
        self._optimizer.zero_grad()
        for n, (image, label) in enumerate(self._parts, 1):
            with nullcontext() if n == len(self._parts) else self._delay():
                (F.cross_entropy(self._model(image), label) * self._weight).backward()
        self._optimizer.step()
