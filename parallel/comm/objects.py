"""What is rare and not worth a layout of its own: whole objects to rank 0 or from it, many tensors to all."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallel.comm.communicator import Communicator

TAG = 32767
"""Kept clear of by the messages of a step."""


def gather_objects(communicator: Communicator, value: Any) -> list[Any] | None:
    """The ``value`` of every rank, in order, on rank 0; None on the others.

    Args:
        value: anything ``torch.save`` writes and ``torch.load`` reads back with ``weights_only``.
    """
    if communicator.rank:
        stream = io.BytesIO()
        torch.save(value, stream)
        data = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)  # as large as the model: not copied once more
        for tensor in (torch.tensor([data.numel()]), data):
            communicator.isend(tensor, 0, TAG).wait()
        return None
    return [value, *(_receive(communicator, rank) for rank in range(1, communicator.world))]


def broadcast_object(communicator: Communicator, value: Any, source: int = 0) -> Any:
    """Return the ``value`` of rank ``source``, on every rank; that of the others is not looked at.

    Args:
        value: as for ``gather_objects``.
    """
    if communicator.world == 1:
        return value
    stream = io.BytesIO()
    if communicator.rank == source:
        torch.save(value, stream)
    length = torch.tensor([stream.getbuffer().nbytes])
    communicator.broadcast(length, source)
    data = torch.empty(int(length), dtype=torch.uint8)
    if communicator.rank == source:
        data = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)
    communicator.broadcast(data, source)
    return torch.load(io.BytesIO(data.numpy().data), map_location="cpu", weights_only=True)


@torch.no_grad()
def broadcast_tensors(communicator: Communicator, tensors: Sequence[Tensor], source: int) -> None:
    """Give every rank the dense ``tensors`` of rank ``source``, in place, in one message per dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [in_memory_order(tensor) for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat(alike)
        communicator.broadcast(flat, source)
        for own, part in zip(alike, torch.split(flat, [tensor.numel() for tensor in alike]), strict=True):
            own.copy_(part)


def in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor's elements (n,) as they lie in memory, whatever the order of its dims."""
    return tensor.as_strided((tensor.numel(),), (1,))


def pinned_like(tensor: Tensor) -> Tensor:
    """Page-locked host memory for what ``tensor`` holds."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _receive(communicator: Communicator, rank: int) -> Any:
    length = torch.zeros(1, dtype=torch.int64)
    communicator.irecv(length, rank, TAG).wait()
    data = torch.empty(int(length), dtype=torch.uint8)
    communicator.irecv(data, rank, TAG).wait()
    return torch.load(io.BytesIO(data.numpy().data), map_location="cpu", weights_only=True)
