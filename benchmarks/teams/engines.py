"""Steps of a team through the engine beside those of pipelines on the same ranks, in turns."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from app.launch.place import take_cores
from benchmarks.teams.passes import Problem
from models.losses import PixelClassLoss
from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch
from parallel.schedule.simulate import simulate
from parallel.schedule.timeline import StageCost
from parallel.space.team import Grid
from parallel.stage.stage import Loss
from parallel.strategy import Strategy

M = 4
PIPELINES = ("1f1b", "mp-basic", "master")
RULE = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


def on_rank(communicator: Communicator, argument: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return seconds of each round on the wall, and of this rank's processor, by strategy."""
    take_cores(torch.device("cpu"))
    problem, depth = Problem(argument["model"], argument["side"]), communicator.world
    strategies = {name: Strategy(name, depth, depth, M) for name in PIPELINES}
    strategies["spatial"] = Strategy("spatial", depth, 1, M, grid=Grid.parse(argument["grid"]))
    engines = {name: engine_of(problem, communicator, strategy) for name, strategy in strategies.items()}
    took: dict[str, dict[str, list[float]]] = {"wall": {}, "cpu": {}}
    for k in range(argument["rounds"] + 1):
        for name in sorted(engines, reverse=bool(k % 2)):
            engine = engines[name]
            microbatches = [microbatch_of(problem, engine, i) for i in engine.share]
            communicator.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            engine.step(microbatches, k, 1e-3)
            used = time.process_time() - cpu
            communicator.barrier()
            wall = time.perf_counter() - start
            if k:  # the first round warms up
                took["wall"].setdefault(name, []).append(wall)
                took["cpu"].setdefault(name, []).append(used)
    return took


def replayed_s(name: str, cpu: Sequence[float], of_stages: Sequence[float]) -> float:
    """Return the seconds of a step of ``name`` if every rank had a core of its own: its processor time played along its
    schedule, with a third of each stage forward; of a team, that of its busier member.

    Args:
        cpu: processor seconds of a step, by rank.
        of_stages: any multiple of the seconds of each stage.
    """
    if name == "spatial":
        return max(cpu)
    strategy = Strategy(name, len(cpu), len(cpu), M)
    costs = []
    for share in of_stages:
        second = share / sum(of_stages) * sum(cpu) / M
        costs.append(StageCost(second / 3, second * 2 / 3, second / 3, second / 3, 0))
    schedule = strategy.schedule({(stage, stage + 1): True for stage in range(len(cpu) - 1)})
    return simulate(schedule, strategy.mesh, costs).makespan_s


def engine_of(problem: Problem, communicator: Communicator, strategy: Strategy) -> Engine:
    """Return an engine that computes a step of ``problem``."""
    loss: Loss = PixelClassLoss() if problem.labels_px else F.cross_entropy
    model = copy.deepcopy(problem.model)
    return assemble(
        model, loss, RULE, communicator, strategy, shape=problem.shape, batch=strategy.m, device=torch.device("cpu")
    )


def microbatch_of(problem: Problem, engine: Engine, i: int) -> Microbatch:
    """Return what ``engine`` wants of microbatch ``i``."""
    wants = engine.wants(i)
    return Microbatch(
        problem.images if wants.images else None, problem.targets if wants.targets else None, problem.shape
    )
