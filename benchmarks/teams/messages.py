"""Steps of a team as it is, and with every convolution taken apart, in turns."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any
from unittest import mock

import torch

from app.launch.place import take_cores
from benchmarks.teams.engines import engine_of, microbatch_of
from benchmarks.teams.passes import Problem
from parallel.comm.communicator import Communicator
from parallel.profile.malloc import keep_freed_memory
from parallel.space.team import Grid
from parallel.strategy import Strategy
from parallel.team import convolution

M = 2
APART = partial(mock.patch.object, convolution, "overlap_pays", return_value=True)
WAYS = {"as it is": (), "taken apart": (APART,)}
"""What is put in place of what a team does."""


def on_rank(communicator: Communicator, argument: dict[str, Any]) -> dict[str, list[float]]:
    """Return seconds of each round, by way."""
    take_cores(torch.device("cpu"))
    keep_freed_memory()
    problem = Problem(argument["model"], argument["side"])
    strategy = Strategy("spatial", communicator.world, 1, M, grid=Grid.parse(argument["grid"]))
    engines = {way: engine_of(problem, communicator, strategy) for way in WAYS}
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    for k in range(argument["rounds"] + 1):
        order = [*WAYS][k % len(WAYS) :] + [*WAYS][: k % len(WAYS)]
        for way in order:
            engine = engines[way]
            microbatches = [microbatch_of(problem, engine, i) for i in engine.share]
            with contextlib.ExitStack() as stack:
                for patch in WAYS[way]:
                    stack.enter_context(patch())
                communicator.barrier()
                start = time.perf_counter()
                engine.step(microbatches, k, 1e-3)
                communicator.barrier()
            if k:  # the first round warms up
                took[way].append(time.perf_counter() - start)
    return took
