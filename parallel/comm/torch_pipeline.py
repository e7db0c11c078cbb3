"""The forward and backward passes of a step in the order of torch's own schedules: torch.distributed.pipelining.

Takes what one rank computes and a process group, stage k on rank k; torch sends the values and walks autograd. After
Huang et al. 2019, GPipe, and Narayanan et al. 2021, 1F1B.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from parallel.comm.communicator import CommunicationError, PipelinePart

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class TorchPipeline:
    """One rank of a pipeline. What it receives and gives is known beforehand: to find it out, torch would make a pass
    more in the first step.

    Args:
        schedule: of ``SCHEDULES``.
        part: what this rank computes.
        m: microbatches of a step.
        rank, world: of ``group``.
        device: of the stage.
    """

    def __init__(
        self, schedule: str, part: PipelinePart, m: int, rank: int, world: int, group: Any, device: torch.device
    ) -> None:
        # Torch cuts the batch itself, into views of one tensor; here each microbatch is read when its turn comes, and
        # what torch cuts are their numbers.
        numbers = torch.arange(m)
        first, last = rank == 0, rank == world - 1
        self._inputs = (numbers,) if first else ()
        self._targets = numbers if last else None
        self._passes = _Passes(part)
        stage = _Stage(
            self._passes,
            rank,
            world,
            device,
            input_args=(numbers[:1].to("meta"),) if first else tuple(part.receives),
            output_args=tuple(part.gives),
            group=group,
        )
        # Nothing is left to divide: each loss has its weight, and the last stage computes its own.
        self._schedule = SCHEDULES[schedule](stage, m, loss_fn=lambda given, _: given[0], scale_grads=False)
        self._described = f"rank {rank} of {world}: torch.distributed.pipelining"

    def step(self) -> None:
        try:
            self._schedule.step(*self._inputs, target=self._targets, return_outputs=False)
        except RuntimeError as fault:
            if self._passes.fault is not None:  # torch may have wrapped it in one of its own
                raise self._passes.fault from None
            raise CommunicationError(
                f"{self._described} failed: {str(fault).splitlines()[0]}; another rank has ended or hangs: its own "
                "message says why"
            ) from fault


class _Passes(nn.Module):
    """The part as a module that torch can call; it has no parameters, as nothing is asked of them.

    Attributes:
        microbatch: of the forward pass under way.
        fault: what a pass failed with.
    """

    def __init__(self, part: PipelinePart) -> None:
        super().__init__()
        self.part = part
        self.microbatch = 0
        self.fault: Exception | None = None

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        try:
            return self.part.forward(self.microbatch, values)
        except Exception as fault:
            self.fault = fault
            raise


class _Stage(PipelineStage):
    """Torch's stage, which tells the module whose turn it is."""

    submod: _Passes

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        self.submod.microbatch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        try:
            with self.submod.part.backward(bwd_chunk_id):
                try:
                    return super().backward_one_chunk(bwd_chunk_id, *arguments, **options)
                except RuntimeError as fault:  # of torch's own around what failed
                    raise fault.__cause__ or fault from None
        except Exception as fault:
            self.submod.fault = fault
            raise
