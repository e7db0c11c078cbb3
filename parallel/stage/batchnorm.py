"""Running statistics of normalisation layers, exact whichever rank computes which microbatch, in any order.

Takes a module and the ranks that hold a copy of it. ``RunningStatistics`` has the results of the plain step: one update
per microbatch, in microbatch order. ``DeferredStatistics`` gives torchgpipe's deferred batch norm (Kim et al. 2020,
arXiv 2004.09910): each microbatch is normalised alone, and layers are updated once per step. A pass that is not to
update the layers itself starts from zeros and is put back after, past autograd's version counters: batch norm saves
these buffers and never reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from parallel.comm.communicator import Communicator
from parallel.trace.updated_search import tracking_layers

_DEFERRABLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def running_statistics(
    module: nn.Module, communicator: Communicator, mode: Literal["per-microbatch", "deferred"], contributes: bool = True
) -> RunningStatistics:
    """Return the running statistics of ``module``, of which every rank of ``communicator`` holds a copy.

    Args:
        contributes: this rank's passes are recorded; of a team, whose members all find the same, that is one rank.

    Raises:
        ValueError: ``deferred`` with layers other than BatchNorm1d, 2d and 3d.
    """
    kind = DeferredStatistics if mode == "deferred" else RunningStatistics
    return kind(module, communicator, contributes)


class RunningStatistics:
    """Running statistics of one module, updated once per microbatch, in microbatch order.

    With momentum a, one update is r <- (1 - a) r + a s. Started from r = 0 it leaves exactly the addend a s, whatever
    the kind of layer, and ranks exchange addends. ``momentum=None`` keeps the mean over all updates: started from
    nothing it leaves the mean over this microbatch's.

    Args:
        module: its layers that track running statistics take part while they are in training mode.
        communicator: the ranks that hold a copy of ``module``.
        contributes: this rank sends the others what its passes leave.

    Attributes:
        alone: layers may update themselves, since this rank has all microbatches; else ``end_step`` updates them.
    """

    def __init__(self, module: nn.Module, communicator: Communicator, contributes: bool = True) -> None:
        self._layers = tracking_layers(module)
        self._communicator, self._contributes = communicator, contributes
        self.alone, self._active = communicator.world == 1, self._layers[:0]
        self._flat: FlatBuffers | None = None

    def begin_step(self, m: int) -> None:
        """Begin a step of ``m`` microbatches over all ranks, for the layers now in training mode."""
        self._active = [layer for layer in self._layers if layer.training]
        if self._flat is None or self._flat.layers != self._active:
            self._flat = FlatBuffers(self._active) if self._active else None
        else:
            self._flat.find_buffers()
        # Where no sum of several ranks comes before the update, layers update themselves within the step.
        self._before = self._flat.read() if self._flat and self.alone else None
        self._m, self._next = m, 0
        self._records: dict[int, Tensor] = {}

    def frozen(self, within: Container[nn.Module] | None = None) -> AbstractContextManager[None]:
        """Return a context for a recomputed forward pass: its outputs are the same, and nothing is counted.

        Args:
            within: modules of which some are computed; None: all.
        """
        return untouched([layer for layer in self._active if within is None or layer in within])

    def rollback(self) -> None:
        """Give the step up before ``end_step``: statistics are as they were before it."""
        if self._flat and self._before:
            self._flat.write(*self._before)

    def renumber(self, order: Sequence[int]) -> None:
        """Let ``end_step`` take microbatch i as number ``order[i]``."""
        self._records = {order[i]: record for i, record in self._records.items()}

    @contextmanager
    def microbatch(self, i: int) -> Iterator[None]:
        """Return a context for the forward pass of microbatch ``i``, numbered over all ranks; in any order."""
        # A rank that has all microbatches lets the layers update themselves for as long as the order is right.
        if self._flat is None or (self.alone and i == self._next):
            yield
            self._next = i + 1
        else:
            with untouched(self._active, self._flat), _counted(self._active):
                self._flat.clear()
                yield
                if self._contributes:
                    values, updates = self._flat.read()
                    self._records[i] = torch.cat([values.double(), updates.double()])
        if self.alone:
            while self._flat is not None and self._next in self._records:
                self._replay(*self._flat.exchanged({0: self._records.pop(self._next)}, 1, self._communicator))
                self._next += 1

    def end_step(self) -> None:
        """Update the layers with what all ranks recorded, in microbatch order; all ranks call it."""
        if self._flat is None:
            return
        if self.alone:
            assert not self._records, f"microbatch {self._next} of {self._m} is missing"
            return
        self._replay(*self._flat.exchanged(self._records, self._m, self._communicator))

    def _replay(self, addends: Tensor, counts: Tensor) -> None:
        """Update every layer by what microbatches left behind, in order: (m, 2 S) addends of (m, L) updates.

        The chain r <- (1 - a)^n_i r + s_i has the closed form (1 - a)^(n_1 + ... + n_m) r + sum of
        (1 - a)^(n_(i+1) + ... + n_m) s_i.
        """
        flat = self._flat
        assert flat is not None
        values, updates = flat.read()
        total = counts.sum(0)
        # InstanceNorm never counts its updates, and takes momentum=None for 0.
        instance = [isinstance(layer, _InstanceNorm) for layer in flat.layers]
        cumulative = [
            layer.momentum is None and not of_instance for layer, of_instance in zip(flat.layers, instance, strict=True)
        ]
        base = flat.constant(*(1 - (layer.momentum or 0.0) for layer in flat.layers))
        keep, weights = base**total, base ** (total - counts.cumsum(0))
        if any(cumulative):
            of_mean = flat.constant(*map(float, cumulative)) > 0
            all_updates = (updates + total).clamp(min=1)
            keep = torch.where(of_mean, 1 - total / all_updates, keep)
            weights = torch.where(of_mean, counts / all_updates, weights)
        values = values.double() * flat.spread(keep) + (addends * flat.spread(weights)).sum(0)
        flat.write(values, updates + (total * flat.constant(*(float(not each) for each in instance))).long())


@contextmanager
def _counted(layers: list[_NormBase]) -> Iterator[None]:
    """Count the updates of InstanceNorm layers too, which do not do so themselves."""

    def count(layer: nn.Module, inputs: Any, output: Any) -> None:
        assert isinstance(layer, _NormBase)
        buffers_of(layer)[2].add_(1)

    hooks = [layer.register_forward_hook(count) for layer in layers if isinstance(layer, _InstanceNorm)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class DeferredStatistics(RunningStatistics):
    """Running statistics updated once per step, with mean and unbiased variance of all values of the batch, over all
    microbatches and ranks.

    Momentum 1 makes a pass leave its own mean and variance in the layer. Those of all microbatches are combined as in
    Chan, Golub and LeVeque (1983): counts, means and sums of squared deviations, never sums of squares.

    Raises:
        ValueError: other layers with running statistics. Those of InstanceNorm are means over tiles, not over the
            values of a batch, and SyncBatchNorm already sees more than a microbatch.
    """

    def __init__(self, module: nn.Module, communicator: Communicator, contributes: bool = True) -> None:
        super().__init__(module, communicator, contributes)
        others = sorted({type(layer).__name__ for layer in self._layers if not isinstance(layer, _DEFERRABLE)})
        if others:
            raise ValueError(
                f"deferred statistics are for BatchNorm1d, BatchNorm2d and BatchNorm3d, got {', '.join(others)}: "
                "use per-microbatch statistics, or track_running_stats=False in these layers"
            )

    @contextmanager
    def microbatch(self, i: int) -> Iterator[None]:
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
        with untouched(self._active, self._flat):
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


def buffers_of(layer: _NormBase) -> tuple[Tensor, Tensor, Tensor]:
    """Return running mean and variance (C,) and the number of updates (), for changes that autograd does not see."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    return layer.running_mean.data, layer.running_var.data, layer.num_batches_tracked.data


class FlatBuffers:
    """Running statistics of ``layers`` as two flat tensors: means, then variances, (2 S,) for S channels over all
    layers, and numbers of updates, (L,).

    Args:
        layers: at least one, on one device.
    """

    def __init__(self, layers: Sequence[_NormBase]) -> None:
        self.layers = list(layers)
        channels = [layer.num_features for layer in layers]
        self.sizes = [*channels, *channels]
        self.width = sum(self.sizes)
        self._constants: dict[tuple[float, ...], Tensor] = {}
        self.find_buffers()

    def find_buffers(self) -> None:
        """Find the layers' buffers, which are others once a module has been moved."""
        means, variances, updates = zip(*map(buffers_of, self.layers), strict=True)
        self._values: list[Tensor] = [*means, *variances]
        self._updates: list[Tensor] = list(updates)
        self._dtype = functools.reduce(torch.promote_types, [buffer.dtype for buffer in self._values])

    def read(self) -> tuple[Tensor, Tensor]:
        """Return copies of the values and of the numbers of updates."""
        return torch.cat(self._values), torch.stack(self._updates)

    def write(self, values: Tensor, updates: Tensor) -> None:
        """Set what ``read`` gives."""
        torch._foreach_copy_(self._values, torch.split(values.to(self._dtype), self.sizes))
        torch._foreach_copy_(self._updates, updates.unbind())

    def clear(self) -> None:
        """Set the running statistics to 0."""
        torch._foreach_zero_([*self._values, *self._updates])

    def constant(self, *numbers: float) -> Tensor:
        """Return ``numbers``, float64, on the device; they are copied there once."""
        if numbers not in self._constants:
            self._constants[numbers] = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        return self._constants[numbers]

    def spread(self, of_layers: Tensor) -> Tensor:
        """Return one number per value, (..., 2 S), from one per layer, (..., L)."""
        return of_layers.index_select(-1, self._layer_of_value)

    @functools.cached_property
    def _layer_of_value(self) -> Tensor:
        numbers = [k % len(self.layers) for k, size in enumerate(self.sizes) for _ in range(size)]
        return torch.tensor(numbers, device=self._device)

    @property
    def _device(self) -> torch.device:
        return self._values[0].device

    def exchanged(self, records: dict[int, Tensor], m: int, ranks: Communicator) -> tuple[Tensor, Tensor]:
        """Return the records of all microbatches, in order: (m, 2 S) values and (m, L) counts. All ranks call it.

        Args:
            records: by microbatch, those made on this rank, (2 S + L,) float64 each; no other rank has made them.
            m: number of microbatches over all ranks.
            ranks: that made records.
        """
        width = self.width + len(self.layers)
        table = torch.zeros((m, width), dtype=torch.float64, device=self._device)
        for i, record in records.items():
            table[i] = record
        if ranks.world > 1:
            ranks.all_reduce(table)
        return table[:, : self.width], table[:, self.width :]


@contextmanager
def untouched(layers: Sequence[_NormBase], flat: FlatBuffers | None = None) -> Iterator[None]:
    """Put the layers' buffers, which are those of ``flat``, back at the end of the block."""
    if not layers:
        yield
        return
    flat = flat or FlatBuffers(layers)
    before = flat.read()
    try:
        yield
    finally:
        flat.write(*before)
