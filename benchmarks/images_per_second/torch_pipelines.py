"""torch.distributed.pipelining on the stages that ours would have: images per second from memory, and bytes of a rank.

``measure`` runs on every rank; ``measured`` starts them. Same model, cut, microbatches, optimizer and memory layout as
``app.train``; tiles are random and stay in memory, so that its figures stand beside those "from memory" of ours.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from app.launch.host import usable_cores
from benchmarks.ranks import run_on_ranks
from benchmarks.schedules.peers import TorchPipeline
from benchmarks.schedules.workload import Workload
from parallel.comm.communicator import Communicator
from parallel.offload.live_bytes import LiveBytes

COUNTED = 2
"""First steps, counted and not timed: the second has the optimizer's state and all gradients."""


def measured(schedule: str, model: str, px: int, m: int, ranks: int, steps: int, limit: int) -> dict[str, Any]:
    """Return the row of one pipeline: its images/s and the bytes of its fullest rank, or why it has none.

    Args:
        schedule: gpipe or 1f1b.
        m: microbatches, and so tiles, of a step.
        limit: bytes that a rank may take, as of a device.
    """
    row = {"model": model, "tile_px": px, "ranks": ranks, "strategy": f"torch-{schedule}", "schedule": schedule}
    with tempfile.TemporaryDirectory() as folder:
        fault = Path(folder) / "fault.txt"
        argument = {"schedule": schedule, "model": model, "px": px, "m": m, "steps": steps, "limit": limit}
        try:
            of_ranks = run_on_ranks(ranks, f"{__name__}:measure", argument | {"fault": str(fault)})
        except RuntimeError as ended:
            return row | {"reason": fault.read_text() if fault.exists() else str(ended)}
    step_s = statistics.median(max(of_step) for of_step in zip(*(rank["steps_s"] for rank in of_ranks), strict=True))
    return row | {"images_per_second_no_data": m / step_s, "device_bytes": [rank["bytes"] for rank in of_ranks]}


def measure(communicator: Communicator, argument: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's seconds of each step, and the most bytes its tensors took."""
    torch.set_num_threads(max(1, usable_cores() // communicator.world))
    work = Workload(
        argument["model"],
        argument["px"],
        argument["m"],
        optimizer="adamw",
        segments=argument["model"] == "unet",
        channels_last=True,
    )
    live, steps_s = LiveBytes(argument["limit"]), []
    try:
        theirs = TorchPipeline(argument["schedule"], work, communicator)
        live.add(theirs.state)
        for number in range(COUNTED):
            with live:
                theirs.step(number)
    except Exception as fault:
        full = torch.OutOfMemoryError in (type(fault), type(fault.__cause__))  # torch wraps what a stage raises
        with contextlib.suppress(FileExistsError), Path(argument["fault"]).open("x") as file:  # the first says why
            file.write("out of memory" if full else repr(fault))
        raise
    for number in range(COUNTED, COUNTED + argument["steps"]):
        communicator.barrier()
        begun = time.perf_counter()
        theirs.step(number)
        steps_s.append(time.perf_counter() - begun)
    return {"steps_s": steps_s, "bytes": live.peak_bytes}
