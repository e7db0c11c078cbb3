"""A module whose parameters, gradients and optimizer state lie in parts on the ranks: torch's own FSDP2.

Takes a module, the units it is gathered in, and a process group; the module's parameters become DTensors, each rank
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


class TorchShards:
    """The parts of ``module`` on this rank. Its forward and backward passes are collective.

    Args:
        module: on the CPU or the device, the same on every rank; changed in place.
        units: runs of submodules, inner ones first; each is gathered at its forward and again at its backward pass.
        group: the ranks.
        device: where parts and gathered units live.
    """

    def __init__(
        self, module: nn.Module, units: Sequence[Sequence[nn.Module]], group: Any, device: torch.device
    ) -> None:
        mesh = DeviceMesh.from_group(group, device.type)
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
        self._module.set_requires_gradient_sync(wanted)

    def release(self) -> None:
        self._module.reshard()

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part_like(self, whole: Tensor, parameter: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return whole
        mesh = parameter.device_mesh
        return distribute_tensor(whole.to(parameter.device), mesh, parameter.placements, src_data_rank=None)
