"""Running statistics of normalisation layers, exact when microbatches are spread over ranks.

The plain step updates running statistics once per microbatch, in microbatch order. With ranks working side by side no
rank sees all microbatches, so each records what its own would add, and every rank replays all of them in order.

With momentum a, one update is r <- (1 - a) r + a s. Started from r = 0 it leaves exactly the addend a s, whatever the
kind of layer; ``momentum=None`` (cumulative mean) has a = 1 / (updates so far + 1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from parallel.comm.communicator import Communicator


class OrderedStatistics:
    """Records the updates of local microbatches and replays those of all ranks.

    Args:
        module: the model; layers in training mode that track running statistics take part.
        communicator: the ranks that share the global batch.
        m: microbatches of a step over all ranks.
    """

    def __init__(self, module: nn.Module, communicator: Communicator, m: int) -> None:
        self._layers = [
            layer for layer in module.modules() if isinstance(layer, _NormBase) and layer.running_mean is not None
        ]
        self._communicator = communicator
        self._m = m
        self._before: list[tuple[Tensor, int]] = []
        self._addends: Tensor | None = None

    def begin_step(self) -> None:
        """Remember the statistics before the first microbatch."""
        self._active = [layer for layer in self._layers if layer.training]
        self._before = [(_statistics(layer).clone(), _updates(layer)) for layer in self._active]
        width = sum(before.numel() + 1 for before, _ in self._before)
        if width:
            self._addends = self._before[0][0].new_zeros((self._m, width))

    def begin_microbatch(self, i: int) -> None:
        """Clear the statistics so that the forward pass of microbatch ``i`` leaves its addend behind."""
        for layer, (_, updates) in zip(self._active, self._before, strict=True):
            _set(layer, torch.zeros_like(_statistics(layer)), updates + i)

    def end_microbatch(self, i: int) -> None:
        """Take down the addends of microbatch ``i`` and how often each layer was updated by it."""
        if self._addends is None:
            return
        row = [
            part
            for layer, (before, updates) in zip(self._active, self._before, strict=True)
            for part in (_statistics(layer), before.new_tensor([_updates(layer) - updates - i]))
        ]
        torch.cat(row, out=self._addends[i])

    def end_step(self) -> None:
        """Exchange the addends and bring the statistics of every rank to those of the plain step."""
        if self._addends is None:
            return
        self._communicator.all_reduce(self._addends)
        column = 0
        for layer, (statistics, updates) in zip(self._active, self._before, strict=True):
            width = statistics.numel()
            for row in self._addends:
                for _ in range(round(row[column + width].item())):
                    updates += 1
                    statistics = statistics * (1 - (1 / updates if layer.momentum is None else layer.momentum))
                statistics = statistics + row[column : column + width]
            _set(layer, statistics, updates)
            column += width + 1


def _statistics(layer: _NormBase) -> Tensor:
    """Running mean and variance in one vector (2 C)."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return torch.cat([layer.running_mean, layer.running_var])


def _updates(layer: _NormBase) -> int:
    assert layer.num_batches_tracked is not None
    return int(layer.num_batches_tracked.item())


def _set(layer: _NormBase, statistics: Tensor, updates: int) -> None:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    mean, variance = statistics.chunk(2)
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(variance)
    layer.num_batches_tracked.fill_(updates)
