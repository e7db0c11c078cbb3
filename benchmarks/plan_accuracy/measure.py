"""Measure the strategies of a problem on this rank, in turn, each built as ``app.train`` builds it.

Takes a communicator, the name of a problem, and strategies with their cuts; gives when the steps of each began and
ended, by how much the process grew, and what autograd kept. The first steps of each are not timed.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch import Tensor

from app.launch.host import usable_cores
from app.settings.optimization import OptimizerSettings
from app.training.engines import build_engine, build_optimizer
from benchmarks.plan_accuracy.problems import ALL, CLASSES, Problem
from benchmarks.resident import keep_nothing_freed, resident, settle
from models.losses import PixelClassLoss, TileClassLoss
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.engine.step import Microbatch
from parallel.offload.packing import ActivationMeter
from parallel.plan.plan import PlanRow
from parallel.profile.cache import keep_freed_memory
from parallel.schedule.shares import split_batch
from parallel.strategy import Strategy

CPU = torch.device("cpu")
LEARNING_RATE = 1e-3
LOADING_PX = 64
WARM_UP = 3
"""Steps after which a process has all the memory it needs."""
FREE = 0.4
"""Part of the machine's free memory that may be taken to keep all candidates of a problem at hand at once."""


class Contender:
    """Engine of one strategy on this rank."""

    def __init__(self, problem: Problem, strategy: Strategy, communicator: Communicator) -> None:
        self.problem, self.strategy = problem, strategy
        self._communicator = communicator
        self._sizes = [len(part) for part in split_batch(problem.batch, strategy.m)]
        self._images, self._targets = _tiles(problem, max(self._sizes))
        settle()
        self._base = resident("VmRSS")
        self.times: list[tuple[float, float]] = []
        self._number = 0
        torch.manual_seed(0)
        model = build_model(problem.model, classes=CLASSES, norm=problem.norm).to(memory_format=torch.channels_last)
        parameters = [weakref.ref(parameter) for parameter in model.parameters()]
        self._engine = build_engine(
            strategy,
            model,
            PixelClassLoss() if problem.segments else TileClassLoss(),
            functools.partial(build_optimizer, OptimizerSettings(optimizer=problem.optimizer)),
            communicator,
            batch=problem.batch,
            tile=problem.tile,
            seed=0,
            device=CPU,
        )
        del model
        settle()
        # Other stages than this rank's are gone by now.
        self._parameters = [parameter for ref in parameters if (parameter := ref()) is not None]

    def grow(self, steps: int) -> int:
        """Return the bytes by which the process is larger, at most in the last of ``steps`` steps, than without the
        model; the first step makes the optimizer's state."""
        for _ in range(steps - 1):
            self._step()
        settle()
        self._step()
        return resident("VmHWM") - self._base

    def kept(self) -> int | None:
        """Return the bytes that autograd keeps at most in a step; None for fsdp, where torch keeps more by itself."""
        if self.strategy.name == "fsdp":
            return None
        meter = ActivationMeter()
        with meter.watching(self._parameters):
            self._step()
        return meter.peak_bytes

    def timed(self, counts: bool) -> None:
        """A step; its time is kept if it ``counts``."""
        self._communicator.barrier()
        begun = time.perf_counter()
        self._step()
        if counts:
            self.times.append((begun, time.perf_counter()))

    def _step(self) -> None:
        self._engine.step(self._microbatches(), self._number, LEARNING_RATE)
        self._number += 1

    def _microbatches(self) -> Iterator[Microbatch]:
        """Made as they are asked for, as tiles read from slides are."""
        for i in self._engine.share:
            n, wants = self._sizes[i], self._engine.wants(i)
            yield Microbatch(
                self._images[:n].clone() if wants.images else None,
                self._targets[:n] if wants.targets else None,
                (n, *self._images.shape[1:]),
            )

    def close(self) -> None:
        self._engine.close()


def measure(communicator: Communicator, argument: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of each of ``argument["rows"]`` on this rank.

    Candidates take turns, step by step, where all of them fit the machine at once; else one follows the other.
    """
    problem = ALL[argument["problem"]]
    # As app.train starts its ranks: the cores of the machine are theirs together.
    torch.set_num_threads(max(1, usable_cores() // communicator.world))
    strategies = [PlanRow.from_json(row).strategy for row in argument["rows"]]
    # Loads code and its tables, which are of no candidate.
    _in_use(dataclasses.replace(problem, tile=LOADING_PX), strategies[0].under(stream=None), communicator)
    rows = []
    for lot in _lots(strategies, problem, communicator):
        found = [_in_use(problem, strategy, communicator) for strategy in lot]
        keep_freed_memory()
        contenders = []
        for strategy, about in zip(lot, found, strict=True):
            settle()
            contender = Contender(problem, strategy, communicator)
            about["growth_bytes"] = contender.grow(WARM_UP)
            contenders.append(contender)
        for number in range(-1, argument["steps"]):
            for contender in contenders:
                contender.timed(number >= 0)
        for contender, about in zip(contenders, found, strict=True):
            rows.append(about | {"times": contender.times})
            contender.close()
        del contender, contenders
    return rows


def _in_use(problem: Problem, strategy: Strategy, communicator: Communicator) -> dict[str, int | None]:
    """Return the bytes of a step, and those that autograd keeps, while the C library keeps nothing that is freed."""
    keep_nothing_freed()
    settle()
    contender = Contender(problem, strategy, communicator)
    found = {"in_use_bytes": contender.grow(2), "kept_bytes": contender.kept()}
    contender.close()
    return found


def _lots(strategies: list[Strategy], problem: Problem, communicator: Communicator) -> list[list[Strategy]]:
    """All at once or each alone; the same on every rank."""
    with torch.device("meta"):
        model = build_model(problem.model, classes=CLASSES)
    values = 4 if problem.optimizer == "adamw" else 3  # parameters, gradients and state
    state = values * sum(parameter.nbytes for parameter in model.parameters())
    held = sum(state * problem.ranks / strategy.depth for strategy in strategies)
    together = torch.tensor([held < FREE * psutil.virtual_memory().available], dtype=torch.int64)
    communicator.broadcast(together)
    return [strategies] if together.item() else [[strategy] for strategy in strategies]


def _tiles(problem: Problem, n: int) -> tuple[Tensor, Tensor]:
    """Images (n, 3, h, w) in the layout of the convolutions, and targets."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(n, 3, problem.tile, problem.tile, generator=generator)
    shape = (n, problem.tile, problem.tile) if problem.segments else (n,)
    targets = torch.randint(CLASSES, shape, generator=generator, dtype=torch.uint8 if problem.segments else torch.int64)
    return images.to(memory_format=torch.channels_last), targets
