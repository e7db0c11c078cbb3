"""Deferred batch norm: each microbatch is normalised by itself, and the running statistics are updated once per step
with those of the whole batch, over all microbatches and ranks.

Takes a module and the ranks that hold a copy of it. Follows torchgpipe's deferred batch norm (Kim et al. 2020,
arXiv 2004.09910). A pass starts from zeroed statistics, leaves its own, and the layers are put back after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from parallel.comm.communicator import Communicator
from parallel.stage.running_buffers import RunningStatistics, buffers_of, untouched

_DEFERRABLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class DeferredStatistics(RunningStatistics):
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
        super().__init__(module, communicator)
        others = sorted({type(layer).__name__ for layer in self._layers if not isinstance(layer, _DEFERRABLE)})
        if others:
            raise ValueError(
                f"deferred statistics are for BatchNorm1d, BatchNorm2d and BatchNorm3d, got {', '.join(others)}: "
                "use per-microbatch statistics, or track_running_stats=False in these layers"
            )

    @contextmanager
    def microbatch(self, i: int, tiles: int) -> Iterator[None]:
        """Record the moments of what layers see while the block runs, and put the layers back."""
        if self._flat is None:
            yield
            return
        seen: dict[nn.Module, list[tuple[float, Tensor]]] = {layer: [] for layer in self._active}

        def add_moments(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            assert isinstance(layer, _NormBase)
            mean, variance, _ = buffers_of(layer)
            count = inputs[0].numel() // layer.num_features
            seen[layer].append((count, torch.stack([mean, variance * (count - 1)]).double()))

        momenta = [layer.momentum for layer in self._active]
        with untouched(self._active):
            hooks = [layer.register_forward_hook(add_moments) for layer in self._active]
            try:
                self._flat.clear()
                for layer in self._active:
                    layer.momentum = 1.0
                yield
            finally:
                for layer, hook, momentum in zip(self._active, hooks, momenta, strict=True):
                    hook.remove()
                    layer.momentum = momentum
        uses = [self._pooled_uses(layer, seen[layer]) for layer in self._active]
        counts = self._flat.constant(*(float(count) for count, _ in uses))
        self._records[i] = torch.cat(
            [*(moments[0] for _, moments in uses), *(moments[1] for _, moments in uses), counts]
        )

    def _pooled_uses(self, layer: _NormBase, uses: list[tuple[float, Tensor]]) -> tuple[float, Tensor]:
        """Return count, mean and sum of squared deviations, (2, C), over all uses of ``layer`` in a microbatch."""
        assert self._flat is not None
        if len(uses) == 1:
            return uses[0]
        if not uses:
            return 0.0, buffers_of(layer)[0].new_zeros((2, layer.num_features), dtype=torch.float64)
        counts = self._flat.constant(*(count for count, _ in uses))
        means, squares = torch.stack([moments for _, moments in uses], 1)
        return sum(count for count, _ in uses), torch.stack(_pooled(counts[:, None], means, squares))

    def end_step(self) -> None:
        """Update the layers with the moments of all microbatches; all ranks call it."""
        flat = self._flat
        if flat is None:
            return
        moments, counts = flat.exchanged(self._records, self._m, self._communicator)
        values, updates = flat.read()
        means, squares = moments.chunk(2, 1)
        of_channels = flat.spread(counts)[:, : means.shape[1]]
        mean, squared = _pooled(of_channels, means, squares)
        batch = torch.cat([mean, squared / (of_channels.sum(0) - 1).clamp(min=1)])
        used = counts.sum(0) > 0
        updates = updates + used
        momentum = flat.constant(*(layer.momentum or 0.0 for layer in flat.layers))
        if any(layer.momentum is None for layer in flat.layers):
            cumulative = flat.constant(*(float(layer.momentum is None) for layer in flat.layers)) > 0
            momentum = torch.where(cumulative, 1 / updates.clamp(min=1).double(), momentum)
        share = flat.spread(momentum * used)
        flat.write(values * (1 - share) + batch * share, updates)


def _pooled(counts: Tensor, means: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squared deviations over parts of given counts: all (parts, C), or counts (parts, 1)."""
    mean = (counts * means).sum(0) / counts.sum(0).clamp(min=1)
    return mean, (squares + counts * (means - mean).square()).sum(0)
