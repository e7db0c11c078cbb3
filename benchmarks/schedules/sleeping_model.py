"""A model that takes time and does nothing: stages that sleep, so that any number of ranks fit one core.

Takes the number of stages and the seconds of each one's forward and backward pass. What is measured with it is the
order of a schedule and what the engine adds to it, not how fast a machine computes.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, fx, nn

AWAKE_S = 0.0005
"""Of each pass, at its end: a core that wakes from sleep is late, and slow for as long as its caches are cold, which a
stage that computes would never see."""


SHAPE = (1, 3, 2, 2)
"""Of a microbatch."""


def mean(output: Tensor, targets: Tensor) -> Tensor:
    """Return a loss that takes no time."""
    return output.mean()


def _take(seconds: float) -> None:
    """Return after ``seconds``, asleep for most of them."""
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - AWAKE_S))
    while time.perf_counter() < end:
        pass


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.backward_s = backward_s
        _take(forward_s)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        _take(ctx.backward_s)
        return gradient * weight, (gradient * x).sum().reshape(1), None, None


@fx.wrap
def sleep(x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
    """``x`` times ``weight``, after a while; tracing does not look into it."""
    slept: Tensor = _Sleep.apply(x, weight, forward_s, backward_s)
    return slept


class SleepingStage(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        return sleep(x, self.weight, self.forward_s, self.backward_s)


class SleepingModel(nn.Module):
    """``stages`` of them, one after the other: images (n, 3, h, w) -> the same shape."""

    def __init__(self, stages: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(SleepingStage(forward_s, backward_s) for _ in range(stages)))

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = self.stages(x)
        return slept

    @property
    def cuts(self) -> tuple[str, ...]:
        """Return the modules that begin each stage but the first."""
        return tuple(f"stages.{number}" for number in range(1, len(self.stages)))
