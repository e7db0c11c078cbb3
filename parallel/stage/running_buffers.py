"""The running statistics inside normalisation layers: read, cleared, put back and exchanged between ranks.

What both kinds of ``batchnorm`` and ``deferred_batchnorm`` do to a layer, and nothing of when they do it. Values are
put back past autograd's version counters, because batch norm saves these buffers and never reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from parallel.comm.communicator import Communicator


def channels_of(layer: _NormBase) -> int:
    """Return the number of channels C that ``layer`` normalises."""
    return layer.num_features


def buffers_of(layer: _NormBase) -> tuple[Tensor, Tensor, Tensor]:
    """Return running mean and variance (C,) and the number of updates (), for changes that autograd does not see."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    return layer.running_mean.data, layer.running_var.data, layer.num_batches_tracked.data


def clear_buffers(layer: _NormBase) -> None:
    """Set the running statistics of ``layer`` to 0."""
    for buffer in buffers_of(layer):
        buffer.zero_()


def exchanged_records(records: dict[int, Tensor], m: int, layers: list[_NormBase], ranks: Communicator) -> Tensor:
    """Return the records of all microbatches, in order: (m, width) float64. All ranks call it.

    Args:
        records: by microbatch, those made on this rank, (width,) each; no other rank has made them.
        m: number of microbatches over all ranks.
        layers: width is the sum of 2 C + 1 over them.
        ranks: that made records.
    """
    width = sum(2 * channels_of(layer) + 1 for layer in layers)
    table = buffers_of(layers[0])[0].new_zeros((m, width), dtype=torch.float64)
    for i, record in records.items():
        table[i] = record
    if ranks.world > 1:
        ranks.all_reduce(table)
    return table


@contextmanager
def untouched(layers: list[_NormBase]) -> Iterator[None]:
    """Put the layers' buffers back at the end of the block."""
    before = [[buffer.clone() for buffer in buffers_of(layer)] for layer in layers]
    try:
        yield
    finally:
        for layer, values in zip(layers, before, strict=True):
            for buffer, value in zip(buffers_of(layer), values, strict=True):
                buffer.copy_(value)
