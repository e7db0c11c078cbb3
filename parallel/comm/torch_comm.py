"""The communicator over torch.distributed: Gloo between CPUs, NCCL between GPUs.

The group is described by the environment that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).
This is the only module that imports torch.distributed.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from parallel.comm.communicator import CommunicationError

PARAMETERS = inspect.signature(DistributedDataParallel).parameters
NO_SYNC: dict[str, Any] = {
    # torch 2.15 renamed it and warns about the old name.
    ("forward_sync_buffers" if "forward_sync_buffers" in PARAMETERS else "broadcast_buffers"): False
}
"""Switched off: running statistics are made equal by ``batchnorm.OrderedStatistics``, exactly."""


class TorchCommunicator:
    """All ranks of a torchrun job.

    Args:
        device: where the tensors of gradients live; CPU tensors always go over Gloo.
        timeout_s: how long an operation waits for the other ranks before it fails.

    Raises:
        CommunicationError: the ranks did not all arrive within ``timeout_s``.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self._device = device
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with self._named("joining the group"):
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))

    @contextlib.contextmanager
    def _named(self, operation: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as fault:  # what torch.distributed raises on time-outs and lost peers alike
            raise CommunicationError(
                f"rank {self.rank} of {self.world}: {operation} failed: {str(fault).splitlines()[0]}; "
                "another rank has ended or hangs: its own message says why"
            ) from fault

    def all_reduce(self, tensor: Tensor) -> None:
        with self._named("all_reduce"):
            dist.all_reduce(tensor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        with self._named("broadcast"):
            dist.broadcast(tensor, source)

    def barrier(self) -> None:
        with self._named("barrier"):
            dist.barrier()

    def replicate(self, module: nn.Module) -> nn.Module:
        device_ids = [self._device] if self._device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=device_ids, gradient_as_bucket_view=True, **NO_SYNC)

    def close(self) -> None:
        self.barrier()  # a rank that is still talking must not find the others gone
        dist.destroy_process_group()


def is_lost_peer(fault: BaseException) -> bool:
    """True for what torch.distributed raises within a backward pass, where DistributedDataParallel sums gradients, when
    another rank is gone or silent: NCCL has a type for it, Gloo only words."""
    return isinstance(fault, dist.DistError) or (isinstance(fault, RuntimeError) and "gloo" in str(fault).lower())
