"""From a parameter on the host to a tensor on the device, in autograd: the gradient goes back to the host.

The way back has two nodes. That of the device begins the copy of the gradient and goes on with the backward pass; that
of the host, which autograd runs on another thread where the device is a GPU, waits for it and hands it to the
parameter, whose hooks run as always.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parallel.offload.copies import Copies, Mark
from parallel.offload.live_bytes import not_counted


def on_device(parameter: nn.Parameter, copy: Tensor, copies: Copies) -> Tensor:
    """``copy``, as a function of ``parameter``.

    Args:
        parameter: on the host.
        copy: of it, on the device.
        copies: bring the gradient to the host.
    """
    way = _Way(copies)
    # Each use has a tensor of its own: the copy itself may be given to several.
    tensor: Tensor = _ToDevice.apply(_Arrived.apply(parameter, way), copy, way)
    return tensor


class _Way:
    """A gradient on its way to the host."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._under_way: tuple[Tensor, Mark] | None = None

    def send(self, gradient: Tensor) -> Tensor:
        """Begin to copy ``gradient``, which is held until ``arrived``. Gives where it will be."""
        with not_counted():
            into = torch.empty_like(gradient, device="cpu", pin_memory=self._copies.pinned)
        self._under_way = gradient, self._copies.to_host(gradient, into)
        return into

    def arrived(self) -> None:
        """Return once the gradient is there."""
        assert self._under_way is not None
        self._copies.synchronize(self._under_way[1])
        self._under_way = None


class _Arrived(torch.autograd.Function):
    """The host's node."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return parameter.view_as(parameter)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.way.arrived()
        return gradient, None


class _ToDevice(torch.autograd.Function):
    """The device's node."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return copy.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.way.send(gradient), None, None
