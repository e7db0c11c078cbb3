"""Deferred batch norm: each microbatch is normalised by itself, and the running statistics are updated once per step
with those of the whole batch, over all microbatches and ranks.

Takes a module and the ranks that hold a copy of it. Follows torchgpipe's deferred batch norm (Kim et al. 2020,
arXiv 2004.09910). A pass starts from zeroed statistics, leaves its own, and the layers are put back after it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from parallel.comm.communicator import Communicator
from parallel.stage.running_buffers import (
    buffers_of,
    channels_of,
    clear_buffers,
    exchanged_records,
    untouched,
)
from parallel.trace.updated_search import tracking_layers

_DEFERRABLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class DeferredStatistics:
    """Running statistics updated once per step, with mean and unbiased variance of all values of the batch, over all
    microbatches and ranks.

    Momentum 1 makes a pass leave its own mean and variance in the layer. Those of all microbatches are combined as in
    Chan, Golub and LeVeque (1983): counts, means and sums of squared deviations, never sums of squares.

    Args:
        module: its BatchNorm layers that track running statistics take part while they are in training mode.
        communicator: the ranks that hold a copy of ``module``.

    Raises:
        ValueError: other layers with running statistics. Those of InstanceNorm are means over tiles, not over the
            values of a batch, and SyncBatchNorm already sees more than a microbatch.
    """

    def __init__(self, module: nn.Module, communicator: Communicator) -> None:
        self._layers = tracking_layers(module)
        others = sorted({type(layer).__name__ for layer in self._layers if not isinstance(layer, _DEFERRABLE)})
        if others:
            raise ValueError(
                f"deferred statistics are for BatchNorm1d, BatchNorm2d and BatchNorm3d, got {', '.join(others)}: "
                "use per-microbatch statistics, or track_running_stats=False in these layers"
            )
        self._communicator = communicator

    def begin_step(self, m: int) -> None:
        """Begin a step of ``m`` microbatches over all ranks, for the layers now in training mode."""
        self._active = [layer for layer in self._layers if layer.training]
        self._m = m
        self._records: dict[int, Tensor] = {}

    @contextmanager
    def microbatch(self, i: int, tiles: int) -> Iterator[None]:
        """Record the moments of what layers see while the block runs, and put the layers back."""
        moments = {layer: _no_moments(layer) for layer in self._active}

        def add_moments(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            assert isinstance(layer, _NormBase)
            mean, variance, _ = buffers_of(layer)
            count = inputs[0].numel() // channels_of(layer)
            seen = torch.cat([mean.new_full((1,), count), mean, variance * (count - 1)]).double()
            moments[layer] = _combined(moments[layer], seen, channels_of(layer))

        momenta = [layer.momentum for layer in self._active]
        with untouched(self._active):
            hooks = [layer.register_forward_hook(add_moments) for layer in self._active]
            try:
                for layer in self._active:
                    clear_buffers(layer)
                    layer.momentum = 1.0
                yield
            finally:
                for layer, hook, momentum in zip(self._active, hooks, momenta, strict=True):
                    hook.remove()
                    layer.momentum = momentum
        if self._active:
            self._records[i] = torch.cat(list(moments.values()))

    def frozen(self, within: Container[nn.Module] | None = None) -> AbstractContextManager[None]:
        """Return a context that leaves no trace of a recomputed pass in the layers, those of ``within`` where given."""
        return untouched([layer for layer in self._active if within is None or layer in within])

    def end_step(self) -> None:
        """Update the layers with the moments of all microbatches; all ranks call it."""
        if not self._active:
            return
        sizes = [2 * channels_of(layer) + 1 for layer in self._active]
        total = [_no_moments(layer) for layer in self._active]
        for record in exchanged_records(self._records, self._m, self._active, self._communicator):
            total = [
                _combined(a, b, channels_of(layer))
                for layer, a, b in zip(self._active, total, torch.split(record, sizes), strict=True)
            ]
        for layer, moments in zip(self._active, total, strict=True):
            count, mean, squares = torch.split(moments, [1, channels_of(layer), channels_of(layer)])
            if not count:
                continue
            *buffers, updates = buffers_of(layer)
            updates.add_(1)
            momentum = 1 / int(updates) if layer.momentum is None else layer.momentum
            for buffer, value in zip(buffers, (mean, squares / (count - 1)), strict=True):
                buffer.mul_(1 - momentum).add_(value, alpha=momentum)


def _no_moments(layer: _NormBase) -> Tensor:
    """Return count, mean and sum of squared deviations of no values: (1 + 2 C), float64."""
    return buffers_of(layer)[0].new_zeros(1 + 2 * channels_of(layer), dtype=torch.float64)


def _combined(a: Tensor, b: Tensor, channels: int) -> Tensor:
    """Return count, mean and sum of squared deviations of the values of ``a`` and ``b`` together."""
    a_count, a_mean, a_squares = torch.split(a, [1, channels, channels])
    b_count, b_mean, b_squares = torch.split(b, [1, channels, channels])
    count = a_count + b_count
    share = b_count / count.clamp(min=1)
    difference = b_mean - a_mean
    return torch.cat([count, a_mean + difference * share, a_squares + b_squares + difference**2 * a_count * share])
