"""What torch.distributed.pipelining says to a U-Net whose long skips jump over stages, under its interleaved schedule.

Takes the model, the side of a tile and where stages begin; gives the refusal as text. Runs on two ranks of two stages
each; the split is that of its own ``pipeline`` frontend, since stages handed to it one by one may only be a chain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining import ScheduleInterleaved1F1B, SplitPoint, pipeline

from models.registry import build_model
from parallel.comm.communicator import Communicator

M = 2


def try_to_step(communicator: Communicator, argument: dict[str, Any]) -> str:
    """What it raised; "" if it did the step."""
    model = build_model(argument["model"], classes=2).train()
    images = torch.randn(M, 3, argument["px"], argument["px"])
    parts = pipeline(model, (images[:1],), split_spec=dict.fromkeys(argument["cuts"], SplitPoint.BEGINNING))
    ranks = range(communicator.rank, parts.num_stages, communicator.world)
    stages: list[Any] = [parts.build_stage(number, torch.device("cpu")) for number in ranks]
    try:
        schedule = ScheduleInterleaved1F1B(stages, M, loss_fn=lambda output, _: output.mean())
        if communicator.rank == 0:
            schedule.step(images)
        else:
            schedule.step(target=torch.zeros(M))
    except RuntimeError as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return ""
