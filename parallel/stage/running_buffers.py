"""The running statistics inside normalisation layers: read, cleared, put back and exchanged between ranks.

``FlatBuffers`` does each for all layers of a stage at once, in a few operations however many layers there are, none of
which waits for a GPU. Values are put back past autograd's version counters, because batch norm saves these buffers and
never reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from parallel.comm.communicator import Communicator


def buffers_of(layer: _NormBase) -> tuple[Tensor, Tensor, Tensor]:
    """Return running mean and variance (C,) and the number of updates (), for changes that autograd does not see."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    return layer.running_mean.data, layer.running_var.data, layer.num_batches_tracked.data


class FlatBuffers:
    """Running statistics of ``layers`` as two flat tensors: the means of all layers with the variances of all behind
    them, (2 S,) for S channels over all layers, and the numbers of updates, (L,).

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
        self._values, self._updates = [*means, *variances], list(updates)
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
        device: torch.device = self._values[0].device
        return device

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
