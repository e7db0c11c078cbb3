"""What every communicator must do. Run by each rank; returns what the caller compares over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parallel.comm.communicator import Communicator, agree


def check_communicator(communicator: Communicator, argument: Any = None) -> dict[str, Any]:
    """Assert the contract on this rank."""
    rank, world = communicator.rank, communicator.world
    assert 0 <= rank < world
    for dtype in (torch.float32, torch.float64, torch.int64):
        tensor = torch.full((3, 2), rank + 1, dtype=dtype)
        communicator.all_reduce(tensor)
        assert tensor.tolist() == [[world * (world + 1) // 2] * 2] * 3
    for source in range(world):
        tensor = torch.full((4,), float(rank))
        communicator.broadcast(tensor, source)
        assert tensor.tolist() == [source] * 4
    communicator.barrier()
    assert agree(communicator, rank == world - 1)
    assert not agree(communicator, False)

    layer = nn.Linear(2, 1, bias=False)
    nn.init.constant_(layer.weight, 0.5)
    replica = communicator.replicate(layer)  # held: its hooks live as long as it does
    replica(torch.full((1, 2), float(rank + 1))).sum().backward()
    assert layer.weight.grad is not None
    # The mean over ranks of rank + 1.
    assert layer.weight.grad.tolist() == [[(world + 1) / 2] * 2]
    return {"rank": rank, "world": world}
