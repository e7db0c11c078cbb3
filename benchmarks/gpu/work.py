"""A model at work on one device, as ``app.train`` runs it on one rank, with what it keeps for backward as asked.

Takes a model's name, a tile's side and an ``ActivationPolicy``; gives steps of SGD on random tiles. Ways to keep share
the model: weights, optimizer and traced graph are those of a ``Problem``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from app.training.exactness import CroppedImages
from benchmarks.gpu.copy_clock import CopyClock
from benchmarks.gpu.setting import GIB, Row, Setting
from models.registry import build_model
from parallel.build import put_to_work
from parallel.comm.thread_comm import LocalCommunicator
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch
from parallel.memory.policy import SMALLEST, ActivationPolicy
from parallel.offload.packing import ActivationMeter
from parallel.strategy import Strategy
from parallel.trace.trace import trace

CLASSES = 2
RATE = 1e-4
USUAL = GIB
"""Window of offload, bytes."""
LEAST_TURNS, MOST_TURNS = 2, 12


class Problem:
    """A model on the device, its optimizer with all its state, and one microbatch.

    Args:
        px: side of a tile.
        tiles: of a step, which is one microbatch.
    """

    def __init__(self, setting: Setting, model: str, px: int, *, tiles: int = 1) -> None:
        torch.manual_seed(0)
        self.setting, self.tiles = setting, tiles
        module = build_model(model, classes=CLASSES).to(memory_format=torch.channels_last)
        self.traced = trace(module, (tiles, 3, px, px))
        module.to(setting.device)
        self.optimizer = torch.optim.SGD(module.named_parameters(), lr=RATE, momentum=0.9)
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()  # its state is there from the first step on, as in all steps but one of a run
        self.optimizer.zero_grad(set_to_none=True)
        self._pixelwise = model.startswith("unet")
        self.microbatch: Microbatch
        self.set_side(px)

    def set_side(self, px: int) -> None:
        """Take tiles of another side from now on."""
        device, shape = self.setting.device, (self.tiles, 3, px, px)
        places = (self.tiles, px, px) if self._pixelwise else (self.tiles,)
        targets = torch.zeros(places, dtype=torch.int64, device=device)
        images = torch.empty(shape, device=device, memory_format=torch.channels_last).normal_()
        self.microbatch = Microbatch(images, targets, shape)


class Work:
    """Steps of a problem.

    Args:
        meter: counts the bytes that are kept, which takes time.

    Attributes:
        clock: of copies to the host and back.
    """

    def __init__(
        self,
        problem: Problem,
        policy: ActivationPolicy,
        *,
        autocast: torch.dtype | None = None,
        meter: ActivationMeter | None = None,
    ) -> None:
        self._problem, self._number, self._in_boxes = problem, 0, policy.stream is not None
        program = put_to_work(
            problem.traced,
            F.cross_entropy,
            lambda _: problem.optimizer,
            LocalCommunicator(),
            Strategy("single", 1, 1, 1, policy=policy),
            batch=problem.tiles,
            shape=problem.microbatch.shape,
            device=problem.setting.device,
            autocast=autocast,
            meter=meter,
        )
        saved_tensors = program.stages[0]._saved_tensors
        self.clock = CopyClock(saved_tensors.copies if saved_tensors else None)
        self._engine = Engine(program, LocalCommunicator())

    def step(self) -> None:
        """Forward, backward and update."""
        microbatch = self._problem.microbatch
        if self._in_boxes:
            microbatch = microbatch._replace(images=CroppedImages(microbatch.images))
        self._engine.step([microbatch], self._number, RATE)
        self._number += 1

    def peak_bytes(self) -> int | None:
        """Return what the allocator gave out at most in a step; None on a CPU."""
        setting = self._problem.setting
        setting.settle()
        if setting.full:
            torch.cuda.reset_peak_memory_stats(setting.device)
        self.step()
        return torch.cuda.max_memory_allocated(setting.device) if setting.full else None

    def close(self) -> None:
        self._engine.close()


def in_turns(setting: Setting, steps: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the seconds of steps that take turns until the time is over."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(MOST_TURNS):
        if turn >= LEAST_TURNS and setting.left_s <= 0:
            break
        for name, step in steps.items():
            taken[name].append(setting.seconds_of(step))
    return taken


def offloading(tiny: bool, **more: Any) -> ActivationPolicy:
    """Return a policy that offloads. If ``tiny``, small tensors are moved too, as there are no others."""
    return ActivationPolicy(
        offload="overlap", **{"ahead": 0 if tiny else USUAL, "smallest": 1 if tiny else SMALLEST} | more
    )


def copied(clock: CopyClock) -> Row:
    """Return bytes out to the host and back that the clock has noted, and their bandwidth; None: nothing was copied."""
    found: Row = {}
    for way in ("out", "back"):
        own = [copy for copy in clock.times if copy.direction == way]
        found[f"{way}_bytes"], seconds = sum(copy.bytes for copy in own), sum(copy.seconds for copy in own)
        found[f"{way}_bytes_per_s"] = found[f"{way}_bytes"] / seconds if seconds else None
    return found


def kept_bytes(problem: Problem, policy: ActivationPolicy, autocast: torch.dtype | None = None) -> int:
    """Activations on the device at most in a step, counted storage by storage as autograd keeps them."""
    meter = ActivationMeter()
    work = Work(problem, policy, autocast=autocast, meter=meter)
    work.step()
    work.close()
    return meter.peak_bytes
