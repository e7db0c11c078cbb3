"""Is the engine as fast as torch's DistributedDataParallel where every rank computes the whole model?

Takes nothing; gives, for one and for four microbatches a rank, the median over rounds of how many times as many images
per second the engine trains: gloo, two ranks of one thread, both in turn on the same tiles.

    python -m benchmarks.schedules.replicas [--model resnet18] [--tile 256] [--rounds 9]
"""

from __future__ import annotations

import contextlib
import copy
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.machine import measured_on
from benchmarks.ranks import run_on_ranks
from benchmarks.results import parser_of
from benchmarks.whole_engine import whole_engine
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch

RANKS, LR, WARM_UP, STEPS = 2, 1e-4, 2, 2
MICROBATCHES = (1, 4)
"""Of a rank, one tile each."""


class TorchReplica:
    """The step written out over torch's replica."""

    def __init__(self, model: nn.Module, m: int) -> None:
        self._replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        self._weight = RANKS / m

    def step(self, microbatches: Sequence[Microbatch], step: int, learning_rate: float) -> None:
        self._optimizer.zero_grad()
        for n, microbatch in enumerate(microbatches, 1):
            with contextlib.nullcontext() if n == len(microbatches) else self._replica.no_sync():
                loss = F.cross_entropy(self._replica(microbatch.images), microbatch.targets)
                (loss * self._weight).backward()
        self._optimizer.step()


def contenders_of(communicator: Communicator, model: str, tile: int, m: int) -> dict[str, TorchReplica | Engine]:
    """Both, with the same weights; ``m`` microbatches of one tile over all ranks."""
    torch.manual_seed(0)
    module = build_model(model, classes=2).to(memory_format=torch.channels_last)
    rule, shape = functools.partial(torch.optim.AdamW, lr=LR), (1, 3, tile, tile)
    replica = TorchReplica(copy.deepcopy(module), m)
    return {
        "torch DDP": replica,
        "engine": whole_engine(module, F.cross_entropy, rule, communicator, batch=m, m=m, shape=shape),
    }


def measure(communicator: Communicator, argument: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of ``STEPS`` steps of each engine, by round."""
    tile, m = argument["tile"], argument["each"] * communicator.world
    contenders = contenders_of(communicator, argument["model"], tile, m)
    images = torch.randn(1, 3, tile, tile).contiguous(memory_format=torch.channels_last)
    microbatches = [Microbatch(images, torch.zeros(1, dtype=torch.int64), tuple(images.shape))] * argument["each"]
    rounds_s: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(WARM_UP + argument["rounds"]):
        for name in list(contenders)[:: 1 if number % 2 else -1]:
            communicator.barrier()
            begun = time.perf_counter()
            for step in range(STEPS):
                contenders[name].step(microbatches, step, LR)
            communicator.barrier()
            if number >= WARM_UP:
                rounds_s[name].append(time.perf_counter() - begun)
    return rounds_s


def main() -> None:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--tile", type=int, default=256, help="px")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    for each in MICROBATCHES:
        rounds_s = run_on_ranks(RANKS, "benchmarks.schedules.replicas:measure", {**vars(arguments), "each": each})[0]
        ratios = [ddp / ours for ddp, ours in zip(rounds_s["torch DDP"], rounds_s["engine"], strict=True)]
        step_s = {name: statistics.median(seconds) / STEPS for name, seconds in rounds_s.items()}
        print(
            f"{each} microbatches a rank: {statistics.median(ratios):.3f} times as fast "
            f"({min(ratios):.3f} to {max(ratios):.3f}), steps of "
            + ", ".join(f"{seconds:.3f} s ({name})" for name, seconds in step_s.items())
        )
    print(measured_on())


if __name__ == "__main__":
    main()
