"""Module whose parameters, gradients and optimizer state lie in parts on the ranks: torch's own FSDP2.

After Zhao et al. 2023, PyTorch FSDP, and Rajbhandari et al. 2020, ZeRO, stage 3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from parallel.comm.communicator import Communicator
from parallel.comm.torch_comm import TorchCommunicator


def shard_module(
    module: nn.Module, units: Sequence[Sequence[nn.Module]], communicator: Communicator, device: torch.device
) -> Any:
    """Divide ``module`` among the ranks, in place, and return it as ``FSDPModule``. All ranks run its passes.

    Args:
        module: on the CPU or the device, the same on every rank.
        units: runs of submodules, inner ones first; each is gathered at its forward and again at its backward pass.
        device: where parts and gathered units live.

    Raises:
        ValueError: the ranks do not talk over torch.distributed, or share a GPU.
    """
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
    for unit in (*units, [module]):
        fully_shard(list(unit) if len(unit) > 1 else unit[0], mesh=mesh)
    for each in module.modules():
        if isinstance(each, FSDPModule):  # sums, not means: the caller weighs its loss, and Gloo has no mean
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)
    return module


def run_sharded(module: nn.Module, inputs: Tensor) -> Any:
    """Return what a divided ``module`` does; a ValueError where it uses parameters of a submodule without a call."""
    try:
        return module(inputs)
    except RuntimeError as fault:
        if "mixed torch.Tensor and DTensor" not in str(fault):
            raise
        raise ValueError(
            "--parallel fsdp gathers the parameters of a module when it is called; this model uses those of one "
            f"that it does not call ({str(fault).split(':')[0]}): have it call the module, or use --parallel ddp"
        ) from fault


def recompute_in_backward(module: nn.Module, recomputing: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
    """Let ``module`` save what enters it alone, and run its forward pass again before its backward pass.

    Call it before ``shard_module``: torch then gathers the parameters for the backward pass, which has both.

    Args:
        recomputing: called as the first pass begins, returns the context in which the second one runs; torch restores
            autocast and its own random numbers.
    """
    forward = module.forward
    contexts = lambda: (contextlib.nullcontext(), recomputing(module))  # noqa: E731

    def recomputed(*inputs: Any, **named: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)

    module.forward = recomputed


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter or gradient, in the same memory."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part.detach()


def divided_like(part: Tensor, parameter: Tensor) -> Tensor:
    """Return ``part``, this rank's part of a state of ``parameter``, as ``whole_tensor`` takes it."""
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        part.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return all of a parameter, gradient or state; every rank takes part. Plain tensors are returned as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of ``whole``, divided as ``parameter``; nothing is sent."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    return distribute_tensor(whole.to(parameter.device), mesh, parameter.placements, src_data_rank=None)
