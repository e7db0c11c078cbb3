"""Python calls into ``parallel`` in a training step, counted: 4 microbatches of 1 tile of 32 px, 9 layers, 2 norms.

PYTHONPATH=. python -m tests.helpers.calls spatial@2x1 spatial@2x1+16 1f1b
"""

from __future__ import annotations

import collections
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import parallel
from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import Microbatch
from parallel.space.team import Grid
from parallel.strategy import Strategy

ROOT = str(Path(parallel.__file__).parent)
Calls = collections.Counter[tuple[str, str]]
"""(file, function) -> calls."""


def nine_layers() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(*block(3, 4), *block(4, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))


def calls_of_a_step(strategy: Strategy) -> list[Calls]:
    """Return the calls of each rank in its second step."""

    def rank(communicator: Communicator, _: Any) -> Calls:
        torch.manual_seed(0)
        engine = assemble(
            nine_layers(),
            F.cross_entropy,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            communicator,
            strategy,
            shape=(1, 3, 32, 32),
            batch=strategy.m,
            device=torch.device("cpu"),
        )
        calls: Calls = collections.Counter()

        def count(frame: types.FrameType, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(ROOT):
                calls[frame.f_code.co_filename[len(ROOT) + 1 :], frame.f_code.co_qualname] += 1

        for step in range(2):
            microbatches = [
                Microbatch(torch.randn(1, 3, 32, 32), torch.tensor([i % 2]), (1, 3, 32, 32)) for i in engine.share
            ]
            sys.setprofile(count if step else None)
            engine.step(microbatches, step, 0.1)
            sys.setprofile(None)
        engine.close()
        return calls

    return run_on_threads(strategy.ranks, rank)


def strategy_of(text: str) -> Strategy:
    """Return the strategy that ``single``, ``ddp``, ``1f1b``, ``spatial@2x1`` or, in boxes of 16 px, ``spatial@2x1+16``
    is; of two ranks, but for ``single``."""
    text, _, box = text.partition("+")
    name, _, grid = text.partition("@")
    ranks, depth = 1 if name == "single" else 2, 1 if grid or name in ("single", "ddp") else 2
    strategy = Strategy(name, ranks, depth, 4, grid=Grid.parse(grid) if grid else None)
    return strategy.under(stream=int(box)) if box else strategy


def main() -> None:
    for text in sys.argv[1:]:
        for rank, calls in enumerate(calls_of_a_step(strategy_of(text))):
            files: collections.Counter[str] = collections.Counter()
            for (file, _), count in calls.items():
                files[file] += count
            print(f"{text} rank {rank}: {calls.total():,} calls, {len(files)} files")
            print(*(f"  {count:6,} {file}" for file, count in files.most_common()), sep="\n")
            print(*(f"  {count:6,} {file}:{name}" for (file, name), count in calls.most_common(40)), sep="\n")


if __name__ == "__main__":
    main()
