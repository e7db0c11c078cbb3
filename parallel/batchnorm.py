"""Running statistics of normalisation layers, exact whoever computes which microbatch in which order.

Takes a module and the ranks that hold a copy of it. ``OrderedStatistics`` gives what the plain step gives: one update
per microbatch, in microbatch order. ``DeferredStatistics`` follows torchgpipe's deferred batch norm (Kim et al. 2020):
each microbatch is normalised by itself, and one update per step uses the statistics of the whole batch.

A pass that is not to update the layers itself starts from zeros and is put back after; what it left is kept. Values
are put back past autograd's version counters, because batch norm saves these buffers and never reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from parallel.comm.communicator import Communicator

_DEFERRABLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class RunningStatistics(Protocol):
    """The running statistics of one module. Touches no layer of another."""

    def begin_step(self, m: int) -> None:
        """``m`` microbatches follow, over all ranks. Layers now in training mode take part."""
        ...

    def microbatch(self, i: int, tiles: int) -> AbstractContextManager[None]:
        """Around the forward pass of microbatch ``i`` of ``tiles`` tiles, numbered over all ranks; in any order."""
        ...

    def frozen(self) -> AbstractContextManager[None]:
        """Around a recomputed forward pass: its outputs are the same, and nothing is counted."""
        ...

    def end_step(self) -> None:
        """Bring the statistics of every rank to those after the step; all ranks call it."""
        ...


def running_statistics(
    module: nn.Module, communicator: Communicator, mode: Literal["per-microbatch", "deferred"]
) -> RunningStatistics:
    """The running statistics of ``module``, of which every rank of ``communicator`` holds a copy.

    Raises:
        ValueError: ``deferred`` with layers other than BatchNorm1d, 2d and 3d.
    """
    if mode == "deferred":
        return DeferredStatistics(module, communicator)
    return OrderedStatistics(module, communicator)


class OrderedStatistics:
    """Once per microbatch, in microbatch order.

    With momentum a, one update is r <- (1 - a) r + a s. Started from r = 0 it leaves exactly the addend a s, whatever
    the kind of layer, and ranks exchange addends. ``momentum=None`` keeps the mean over all updates: started from
    nothing it leaves the mean over this microbatch's.

    Args:
        module: its layers that track running statistics take part while they are in training mode.
        communicator: the ranks that hold a copy of ``module``.
    """

    def __init__(self, module: nn.Module, communicator: Communicator) -> None:
        self._layers = _tracking(module)
        self._communicator = communicator

    def begin_step(self, m: int) -> None:
        self._active = [layer for layer in self._layers if layer.training]
        self._m = m
        self._next = 0
        self._records: dict[int, Tensor] = {}

    @contextmanager
    def microbatch(self, i: int, tiles: int) -> Iterator[None]:
        # A rank that has all microbatches lets the layers update themselves for as long as the order is right.
        if not self._active or (self._communicator.world == 1 and i == self._next):
            yield
            self._next = i + 1
        else:
            with _untouched(self._active), _counted(self._active):
                for layer in self._active:
                    _clear(layer)
                yield
                self._records[i] = torch.cat([_flat(layer) for layer in self._active])
        if self._communicator.world == 1:
            while self._next in self._records:
                self._replay(self._records.pop(self._next))
                self._next += 1

    def frozen(self) -> AbstractContextManager[None]:
        return _untouched(self._active)

    def end_step(self) -> None:
        if not self._active:
            return
        if self._communicator.world == 1:
            assert not self._records, f"microbatch {self._next} of {self._m} is missing"
            return
        for record in _exchanged(self._records, self._m, self._active, self._communicator):
            self._replay(record)

    def _replay(self, record: Tensor) -> None:
        """Update every layer by what one microbatch left behind."""
        parts = torch.split(record, [2 * _channels(layer) + 1 for layer in self._active])
        counts = torch.stack([part[-1] for part in parts]).tolist()
        for layer, part, count in zip(self._active, parts, counts, strict=True):
            mean, variance = part[:-1].chunk(2)
            if not count:
                continue
            running_mean, running_variance, updates = _buffers(layer)
            if not isinstance(layer, _InstanceNorm):
                updates.add_(int(count))
            if layer.momentum is not None:
                keep, add = (1 - layer.momentum) ** count, 1.0
            elif isinstance(layer, _InstanceNorm):  # never updated: torch takes None for 0 there
                keep, add = 1.0, 0.0
            else:
                add = count / int(updates)
                keep = 1 - add
            running_mean.mul_(keep).add_(mean, alpha=add)
            running_variance.mul_(keep).add_(variance, alpha=add)


class DeferredStatistics:
    """Once per step, with mean and unbiased variance of all values of the batch, over all microbatches and ranks.

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
        self._layers = _tracking(module)
        others = sorted({type(layer).__name__ for layer in self._layers if not isinstance(layer, _DEFERRABLE)})
        if others:
            raise ValueError(
                f"deferred statistics are for BatchNorm1d, BatchNorm2d and BatchNorm3d, got {', '.join(others)}: "
                "use per-microbatch statistics, or track_running_stats=False in these layers"
            )
        self._communicator = communicator

    def begin_step(self, m: int) -> None:
        self._active = [layer for layer in self._layers if layer.training]
        self._m = m
        self._records: dict[int, Tensor] = {}

    @contextmanager
    def microbatch(self, i: int, tiles: int) -> Iterator[None]:
        moments = {layer: _no_moments(layer) for layer in self._active}

        def take(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            assert isinstance(layer, _NormBase)
            mean, variance, _ = _buffers(layer)
            count = inputs[0].numel() // _channels(layer)
            left = torch.cat([mean.new_tensor([count]), mean, variance * (count - 1)]).double()
            moments[layer] = _combined(moments[layer], left, _channels(layer))

        momenta = [layer.momentum for layer in self._active]
        with _untouched(self._active):
            hooks = [layer.register_forward_hook(take) for layer in self._active]
            try:
                for layer in self._active:
                    _clear(layer)
                    layer.momentum = 1.0
                yield
            finally:
                for layer, hook, momentum in zip(self._active, hooks, momenta, strict=True):
                    hook.remove()
                    layer.momentum = momentum
        if self._active:
            self._records[i] = torch.cat(list(moments.values()))

    def frozen(self) -> AbstractContextManager[None]:
        return _untouched(self._active)

    def end_step(self) -> None:
        if not self._active:
            return
        sizes = [2 * _channels(layer) + 1 for layer in self._active]
        total = [_no_moments(layer) for layer in self._active]
        for record in _exchanged(self._records, self._m, self._active, self._communicator):
            total = [
                _combined(a, b, _channels(layer))
                for layer, a, b in zip(self._active, total, torch.split(record, sizes), strict=True)
            ]
        for layer, moments in zip(self._active, total, strict=True):
            count, mean, squares = torch.split(moments, [1, _channels(layer), _channels(layer)])
            if not count:
                continue
            *buffers, updates = _buffers(layer)
            updates.add_(1)
            momentum = 1 / int(updates) if layer.momentum is None else layer.momentum
            for buffer, value in zip(buffers, (mean, squares / (count - 1)), strict=True):
                buffer.mul_(1 - momentum).add_(value, alpha=momentum)


def _tracking(module: nn.Module) -> list[_NormBase]:
    return [layer for layer in module.modules() if isinstance(layer, _NormBase) and layer.running_mean is not None]


def _channels(layer: _NormBase) -> int:
    return layer.num_features


def _buffers(layer: _NormBase) -> tuple[Tensor, Tensor, Tensor]:
    """Running mean and variance (C,) and the number of updates (), for changes that autograd does not see."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    return layer.running_mean.data, layer.running_var.data, layer.num_batches_tracked.data


def _clear(layer: _NormBase) -> None:
    for buffer in _buffers(layer):
        buffer.zero_()


def _flat(layer: _NormBase) -> Tensor:
    """Running mean, running variance and the number of updates in one vector (2 C + 1), float64."""
    mean, variance, updates = _buffers(layer)
    return torch.cat([mean.double(), variance.double(), updates.double()[None]])


def _no_moments(layer: _NormBase) -> Tensor:
    """Count, mean and sum of squared deviations of no values: (1 + 2 C), float64."""
    return _buffers(layer)[0].new_zeros(1 + 2 * _channels(layer), dtype=torch.float64)


def _combined(a: Tensor, b: Tensor, channels: int) -> Tensor:
    """Count, mean and sum of squared deviations of the values of ``a`` and ``b`` together."""
    a_count, a_mean, a_squares = torch.split(a, [1, channels, channels])
    b_count, b_mean, b_squares = torch.split(b, [1, channels, channels])
    count = a_count + b_count
    share = b_count / count.clamp(min=1)
    apart = b_mean - a_mean
    return torch.cat([count, a_mean + apart * share, a_squares + b_squares + apart**2 * a_count * share])


def _exchanged(records: dict[int, Tensor], m: int, layers: list[_NormBase], ranks: Communicator) -> Tensor:
    """The records of all microbatches, in order: (m, width) float64. Each was made on one rank."""
    width = sum(2 * _channels(layer) + 1 for layer in layers)
    table = _buffers(layers[0])[0].new_zeros((m, width), dtype=torch.float64)
    for i, record in records.items():
        table[i] = record
    if ranks.world > 1:
        ranks.all_reduce(table)
    return table


@contextmanager
def _untouched(layers: list[_NormBase]) -> Iterator[None]:
    """Put the layers' buffers back at the end of the block."""
    before = [[buffer.clone() for buffer in _buffers(layer)] for layer in layers]
    try:
        yield
    finally:
        for layer, values in zip(layers, before, strict=True):
            for buffer, value in zip(_buffers(layer), values, strict=True):
                buffer.copy_(value)


@contextmanager
def _counted(layers: list[_NormBase]) -> Iterator[None]:
    """Count the updates of InstanceNorm layers too, which do not do so themselves."""

    def count(layer: nn.Module, inputs: Any, output: Any) -> None:
        assert isinstance(layer, _NormBase)
        _buffers(layer)[2].add_(1)

    hooks = [layer.register_forward_hook(count) for layer in layers if isinstance(layer, _InstanceNorm)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
