"""What runs on the ranks: every way to train of one problem, each built as ``app.train`` builds it, in turn.

Takes a communicator, the name of a problem, and candidates with their cuts; gives when the steps of each began and
ended on this rank, by how much the process grew, and what autograd kept. The first steps of each are not timed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from app.launch.host import usable_cores
from app.settings.optimization import OptimizerSettings
from app.training.engines import build_engine, build_optimizer
from benchmarks.plan_accuracy.problems import CLASSES, Problem, named
from models.losses import PixelClassLoss, TileClassLoss
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.engine.step import Microbatch
from parallel.offload.packing import ActivationMeter
from parallel.plan.plan import PlanRow
from parallel.profile.malloc import M_MMAP_MAX, M_TRIM_THRESHOLD, keep_freed_memory
from parallel.schedule.shares import split_batch
from parallel.strategy import Strategy

CPU = torch.device("cpu")
LEARNING_RATE = 1e-3
LOADING_PX = 64
WARM_UP = 3
"""Steps after which a process has all the memory it needs."""
M_MMAP_THRESHOLD = -3
"""Of malloc.h; see mallopt(3)."""
FREE = 0.4
"""Part of the machine's free memory that may be taken to keep all candidates of a problem at hand at once."""


class Contender:
    """One way to train, at work."""

    def __init__(self, problem: Problem, strategy: Strategy, communicator: Communicator) -> None:
        self.problem, self.strategy = problem, strategy
        self._communicator = communicator
        self._sizes = [len(part) for part in split_batch(problem.batch, strategy.m)]
        self._images, self._targets = _tiles(problem, max(self._sizes))
        trim()
        self._base = _status_bytes("VmRSS")
        self._times: list[tuple[float, float]] = []
        self._number = 0
        torch.manual_seed(0)
        model = build_model(problem.model, classes=CLASSES).to(memory_format=torch.channels_last)
        parameters = [weakref.ref(parameter) for parameter in model.parameters()]
        self._engine = build_engine(
            strategy,
            model,
            PixelClassLoss() if problem.segments else TileClassLoss(),
            functools.partial(_optimizer, problem.optimizer),
            communicator,
            batch=problem.batch,
            tile=problem.tile,
            seed=0,
            device=CPU,
        )
        del model
        trim()
        # Other stages than this rank's are gone by now.
        self._parameters = [parameter for ref in parameters if (parameter := ref()) is not None]

    def grow(self, steps: int) -> int:
        """Bytes by which the process is larger at most than before the model was there, in the last of ``steps``; the
        first makes the optimizer's state."""
        for _ in range(steps - 1):
            self._step()
        trim()
        _forget_peak()
        self._step()
        return _status_bytes("VmHWM") - self._base

    def kept(self) -> int | None:
        """Bytes that autograd keeps at most in a step. Of sharded parameters torch keeps more by itself: None."""
        if self.strategy.name == "fsdp":
            return None
        meter = ActivationMeter()
        meter.exclude(self._parameters)
        with meter.watching():
            self._step()
        return meter.peak_bytes

    def timed(self, counts: bool) -> None:
        """A step; its time is kept if it ``counts``."""
        self._communicator.barrier()
        begun = time.perf_counter()
        self._step()
        if counts:
            self._times.append((begun, time.perf_counter()))

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

    def times(self) -> list[tuple[float, float]]:
        """Begin and end of every timed step."""
        return self._times

    def close(self) -> None:
        self._engine.close()


def measure(communicator: Communicator, argument: dict[str, Any]) -> list[dict[str, Any]]:
    """What was measured of each of ``argument["rows"]``, on this rank.

    Candidates take turns, step by step, where all of them fit the machine at once; else one follows the other.
    """
    problem = named(argument["problem"])
    # As app.train starts its ranks: the cores of the machine are theirs together.
    torch.set_num_threads(max(1, usable_cores() // communicator.world))
    strategies = [PlanRow.from_json(row).strategy for row in argument["rows"]]
    # Loads code and its tables, which are of no candidate.
    _in_use(dataclasses.replace(problem, tile=LOADING_PX), strategies[0], communicator)
    told = []
    for lot in _lots(strategies, problem, communicator):
        found = [_in_use(problem, strategy, communicator) for strategy in lot]
        keep_freed_memory()
        contenders = []
        for strategy, about in zip(lot, found, strict=True):
            trim()
            contender = Contender(problem, strategy, communicator)
            about["growth_bytes"] = contender.grow(WARM_UP)
            contenders.append(contender)
        for number in range(-1, argument["steps"]):
            for contender in contenders:
                contender.timed(number >= 0)
        for contender, about in zip(contenders, found, strict=True):
            told.append(about | {"times": contender.times()})
            contender.close()
        del contender, contenders
    return told


def _in_use(problem: Problem, strategy: Strategy, communicator: Communicator) -> dict[str, int | None]:
    """What a step takes, and what of it autograd keeps, while the C library keeps nothing that tensors give back."""
    keep_nothing_freed()
    trim()
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


def _optimizer(name: Any, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return build_optimizer(OptimizerSettings(optimizer=name), parameters)


def _tiles(problem: Problem, n: int) -> tuple[Tensor, Tensor]:
    """Images (n, 3, h, w) in the layout of the convolutions, and targets."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(n, 3, problem.tile, problem.tile, generator=generator)
    shape = (n, problem.tile, problem.tile) if problem.segments else (n,)
    targets = torch.randint(CLASSES, shape, generator=generator, dtype=torch.uint8 if problem.segments else torch.int64)
    return images.to(memory_format=torch.channels_last), targets


def trim() -> None:
    """Give back what nothing uses: the allocator would keep it, and what comes next would grow into it unseen."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def keep_nothing_freed() -> None:
    """The opposite of ``keep_freed_memory``: the C library gives back what tensors give back."""
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in ((M_MMAP_MAX, 65536), (M_MMAP_THRESHOLD, 64 << 10), (M_TRIM_THRESHOLD, 128 << 10)):
        mallopt(option, value)


def _forget_peak() -> None:
    """Let ``VmHWM`` start again (Linux, Documentation/filesystems/proc.rst, clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(field: str) -> int:
    """A field of this process's status that the kernel gives in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field + ":")).split()[1])
