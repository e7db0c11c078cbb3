"""Passes of a team that fetches halos of 1, 2, 4 operations at once, in turns, over links as they are and slow ones."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from app.launch.place import take_cores
from benchmarks.teams.delayed import Delayed
from benchmarks.teams.passes import Problem
from parallel.comm.communicator import Communicator
from parallel.plan.candidates import FUSED
from parallel.space.team import Grid
from parallel.team.link import TeamLink


def on_rank(communicator: Communicator, argument: dict[str, Any]) -> dict[str, list[float]]:
    """Return seconds of each round, by ``delay in ms, operations at once``."""
    take_cores(torch.device("cpu"))
    problem, grid = Problem(argument["model"], argument["side"]), Grid.parse(argument["grid"])
    members = {}
    for delay_ms in argument["delays_ms"]:
        for fuse in FUSED:
            slow: Any = Delayed(communicator, delay_ms / 1000) if delay_ms else communicator
            members[f"{delay_ms}, {fuse}"] = problem.member(
                communicator, dataclasses.replace(grid, fuse=fuse), TeamLink(slow)
            )
    took: dict[str, list[float]] = {way: [] for way in members}
    for k in range(argument["rounds"] + 1):
        for way in sorted(members, reverse=bool(k % 2)):
            communicator.barrier()
            start = time.perf_counter()
            members[way].one_pass()
            communicator.barrier()
            if k:  # the first round warms up
                took[way].append(time.perf_counter() - start)
    return took
