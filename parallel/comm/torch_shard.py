"""A module whose parameters, gradients and optimizer state lie in parts on the ranks: torch's own FSDP2.

Takes a module, the units it is gathered in, and the ranks; the module's parameters become DTensors, each rank
with its rows of the first dim. After Zhao et al. 2023, PyTorch FSDP, and Rajbhandari et al. 2020, ZeRO, stage 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from parallel.comm.communicator import Communicator
from parallel.comm.torch_comm import TorchCommunicator


class TorchShards:
    """The parts of ``module`` on this rank. Its forward and backward passes are collective.

    Args:
        module: on the CPU or the device, the same on every rank; changed in place.
        units: runs of submodules, inner ones first; each is gathered at its forward and again at its backward pass.
        communicator: the ranks.
        device: where parts and gathered units live.

    Raises:
        ValueError: the ranks do not talk over torch.distributed, or share a GPU.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Sequence[nn.Module]],
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        if not isinstance(communicator, TorchCommunicator):
            raise ValueError(
                "--parallel fsdp is torch's own and talks over torch.distributed between 2 processes or more; got "
                f"{communicator.world} ranks of a {type(communicator).__name__}: start them with --ranks or torchrun "
                "(app.verify: --communicator gloo), or use --parallel ddp"
            )
        if device.type == "cuda" and not communicator.nccl:
            raise ValueError(
                "--parallel fsdp sums parts of gradients over NCCL, which refuses ranks that share a GPU; a model in "
                "parts on one GPU saves nothing: use one rank per GPU, or --device cpu"
            )
        mesh = DeviceMesh.from_group(communicator.group, device.type)
        for unit in units:
            fully_shard(list(unit) if len(unit) > 1 else unit[0], mesh=mesh)
        fully_shard(module, mesh=mesh)
        assert isinstance(module, FSDPModule)
        self._module = module
        # Sums, not means: whoever computes a loss knows its weight. Gloo has no mean, either.
        for each in module.modules():
            if isinstance(each, FSDPModule):
                each.set_gradient_divide_factor(1.0)
                each.set_force_sum_reduction_for_comms(True)

    def forward(self, *inputs: Any) -> Any:
        """Return what the module does, gathered unit by unit.

        Raises:
            ValueError: the module uses parameters of a submodule that it does not call.
        """
        try:
            return self._module(*inputs)
        except RuntimeError as fault:
            if "mixed torch.Tensor and DTensor" not in str(fault):
                raise
            raise ValueError(
                "--parallel fsdp gathers the parameters of a module when it is called; this model uses those of one "
                f"that it does not call ({str(fault).split(':')[0]}): have it call the module, or use --parallel ddp"
            ) from fault

    def reduce_gradients(self, wanted: bool) -> None:
        """Set whether the backward passes that follow sum gradients over the ranks, or add them up whole here."""
        self._module.set_requires_gradient_sync(wanted)

    def release(self) -> None:
        """Free what the last forward pass left gathered."""
        self._module.reshard()

    def whole(self, tensor: Tensor) -> Tensor:
        """Return all of a parameter, gradient or state; every rank takes part. Other tensors are returned as they
        are."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part_like(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """Return this rank's part of ``whole``, divided as ``parameter``; nothing is sent."""
        if not isinstance(parameter, DTensor):
            return whole
        mesh = parameter.device_mesh
        return distribute_tensor(whole.to(parameter.device), mesh, parameter.placements, src_data_rank=None)
