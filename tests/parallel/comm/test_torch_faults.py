"""Faults of the own device are not reported as the end of another rank; device_ids of DDP only for GPU parameters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from parallel.comm.communicator import CommunicationError, Operation
from parallel.comm.torch_comm import TorchWork, is_lost_peer

NCCL_MEMORY = dist.DistBackendError(
    "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 4194304 bytes"
)
CUDA_MEMORY = dist.DistBackendError("NCCL error\nLast error:\nCuda failure 2 'out of memory'")
LOST = dist.DistBackendError("NCCL communicator was aborted on rank 1")
GLOO = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
DEVICE = torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)


@pytest.mark.parametrize(
    ("fault", "expected", "is_lost"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, False),
        (NCCL_MEMORY, torch.OutOfMemoryError, False),
        (CUDA_MEMORY, torch.OutOfMemoryError, False),
        (DEVICE, torch.AcceleratorError, False),
        (LOST, CommunicationError, True),
        (GLOO, CommunicationError, True),
    ],
)
def test_faults_keep_their_kind(fault: RuntimeError, expected: type[RuntimeError], is_lost: bool) -> None:
    def wait() -> None:
        raise fault

    with pytest.raises(expected, match=r"(?i)memory|rank|peer"):
        TorchWork(SimpleNamespace(wait=wait), [], Operation(0, 2, "irecv")).wait()
    assert is_lost_peer(fault) == is_lost
