"""Workload of every contender: a model, one batch, a loss and an update, the same for all.

Takes the name of the model, the side of its tiles and the number of microbatches; a microbatch is one tile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from models.registry import build_model
from parallel.graph.partition import Partition, partition_equal
from parallel.trace.trace import trace

CLASSES = 2
LEARNING_RATE = 1e-3
CPU = torch.device("cpu")


class Contender(Protocol):
    """Something that does optimizer steps on the workload it was built for; every rank builds its own part."""

    name: str

    def step(self, number: int) -> None: ...


@dataclass(frozen=True)
class Workload:
    """One global batch.

    Attributes:
        px: side of a tile.
        m: microbatches, and so tiles.
    """

    model: str
    px: int
    m: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(n, 3, h, w) of a microbatch."""
        return (1, 3, self.px, self.px)

    def build(self) -> nn.Module:
        """The model, with the same weights whoever asks."""
        torch.manual_seed(0)
        return build_model(self.model, classes=CLASSES)

    @functools.cache  # noqa: B019  (as many as the benchmark has numbers of stages)
    def partition(self, stages: int) -> Partition:
        """Return the engine's cuts of the model."""
        return partition_equal(trace(self.build(), self.shape).graph, stages)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return images (m, 3, px, px) and labels (m,)."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.m, *self.shape[1:], generator=generator), torch.arange(self.m) % CLASSES

    def tiles(self, share: Iterable[int]) -> list[tuple[Tensor, Tensor]]:
        """Return image (1, 3, px, px) and label (1,) of each microbatch of ``share``."""
        images, labels = self.batch()
        return [(images[i : i + 1], labels[i : i + 1]) for i in share]

    def make_optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return SGD(parameters, lr=LEARNING_RATE)
