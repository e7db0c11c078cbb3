"""Send whole Python objects to rank 0 or from it; helpers for tensors as they are sent."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from parallel.comm.communicator import Communicator

TAG = 32767
"""The messages of a step have lower tags."""


def gather_objects(communicator: Communicator, value: Any) -> list[Any] | None:
    """Return the ``value`` of every rank, in order, on rank 0; None on the others.

    Args:
        value: anything ``torch.load`` reads back with ``weights_only``.
    """
    if communicator.rank:
        data = _to_bytes(value)
        for tensor in (torch.tensor([data.numel()]), data):
            communicator.isend(tensor, 0, TAG).wait()
        return None
    values = [value]
    for rank in range(1, communicator.world):
        length = torch.zeros(1, dtype=torch.int64)
        communicator.irecv(length, rank, TAG).wait()
        data = torch.empty(int(length), dtype=torch.uint8)
        communicator.irecv(data, rank, TAG).wait()
        values.append(_from_bytes(data))
    return values


def broadcast_object(communicator: Communicator, value: Any) -> Any:
    """Return the ``value`` of rank 0, as ``gather_objects`` takes it, on every rank; others may have any."""
    if communicator.world == 1:
        return value
    data = torch.empty(0, dtype=torch.uint8) if communicator.rank else _to_bytes(value)
    length = torch.tensor([data.numel()])
    communicator.broadcast(length)
    data = torch.empty(int(length), dtype=torch.uint8) if communicator.rank else data
    communicator.broadcast(data)
    return _from_bytes(data)


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return the elements (n,) of a dense tensor in the order of its memory, whatever the order of its dims."""
    return tensor.as_strided((tensor.numel(),), (1,))


def pinned_like(tensor: Tensor) -> Tensor:
    """Return page-locked host memory of the size of ``tensor``."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _to_bytes(value: Any) -> Tensor:
    stream = io.BytesIO()
    torch.save(value, stream)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)  # as large as the model: not copied once more


def _from_bytes(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().data), map_location="cpu", weights_only=True)
