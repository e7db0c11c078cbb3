"""Seconds of a pass by 2 ranks of a thread each beside one process of 2 threads, in turns."""

from __future__ import annotations

import time
from typing import Any

import torch

from app.launch.place import take_cores
from benchmarks.teams.passes import Problem
from parallel.comm.communicator import Communicator
from parallel.space.team import Grid


def on_rank(communicator: Communicator, argument: dict[str, Any]) -> dict[str, list[float]]:
    """Return seconds of each round, on the wall and of this rank's processor: of the team, and of rank 0 alone with as
    many threads as the team has ranks."""
    take_cores(torch.device("cpu"))  # as app.train does
    problem = Problem(argument["model"], argument["side"])
    member = problem.member(communicator, Grid.parse(argument["grid"]))
    took: dict[str, list[float]] = {"team": [], "team cpu": [], "alone": [], "alone cpu": []}
    for k in range(argument["rounds"] + 1):
        for way in ("team", "alone") if k % 2 else ("alone", "team"):
            communicator.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            if way == "team":
                member.one_pass()
            elif communicator.rank == 0:
                torch.set_num_threads(communicator.world)
                problem.plain_pass()
                torch.set_num_threads(1)
            used = time.process_time() - cpu
            if way == "team":
                communicator.barrier()
            wall = time.perf_counter() - start
            if k:  # the first round warms up
                took[way].append(wall)
                took[way + " cpu"].append(used)
    return took
