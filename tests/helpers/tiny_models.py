"""Models small enough that a test is about everything else: given to ``--model`` as a user's own factory."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def classifier(classes: int) -> nn.Module:
    """BatchNorm and dropout included, because they are what resume and ranks get wrong."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=4, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8, classes),
    )


def unhurried(classes: int) -> nn.Module:
    """``classifier``, weight for weight, that takes a fifth of a second for each microbatch."""
    net = classifier(classes)
    net.register_forward_pre_hook(lambda *_: time.sleep(0.2))
    return net


def segmenter(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, classes, 1)
    )


def top_heavy(classes: int) -> nn.Module:
    """Nearly all of its parameters are one linear layer's, as of a VGG."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(8),
        nn.Flatten(),
        nn.Linear(512, 2048),
        nn.ReLU(),
        nn.Linear(2048, classes),
    )


def killed(classes: int) -> nn.Module:
    """``classifier``, ended by signal 9 in its second microbatch, as the kernel ends what takes too much memory."""

    def end(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    return _failing(classes, end)


def without_memory(classes: int) -> nn.Module:
    """``classifier``, whose second microbatch finds no memory on its device."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    return _failing(classes, fail)


def _failing(classes: int, fail: Callable[..., None]) -> nn.Module:
    net, seen = classifier(classes), itertools.count()
    net.register_forward_pre_hook(lambda *_: fail() if net.training and next(seen) else None)
    return net


class Overflowing(nn.Module):
    """A classifier whose loss is NaN once it has seen four microbatches."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.inner = classifier(classes)
        self.seen = 0

    def forward(self, images: Tensor) -> Tensor:
        self.seen += self.training
        output: Tensor = self.inner(images)
        return output if self.seen <= 4 else output * torch.nan


def overflowing(classes: int) -> nn.Module:
    return Overflowing(classes)


class Telling(nn.Module):
    """A classifier that leaves the names of its process's threads in the folder ``$TOLD``."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.inner = classifier(classes)

    def forward(self, images: Tensor) -> Tensor:
        names = sorted(thread.name for thread in threading.enumerate())
        (Path(os.environ["TOLD"]) / f"{os.getpid()}.txt").write_text("\n".join(names))
        output: Tensor = self.inner(images)
        return output


def telling(classes: int) -> nn.Module:
    return Telling(classes)


def dropping_net(classes: int = 2, in_channels: int = 3) -> nn.Module:
    """Numbers drawn for each px of its widest map, when all before it is kept; few parameters."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, classes),
    )
