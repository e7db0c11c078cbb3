"""Device copies of the host parameters that one layer uses, in its forward pass and again in its backward pass.

A unit holds its copies while the layer computes; then only what autograd saved of them is remembered, and brought to
the device again when the backward pass comes to it, for as long as somebody there needs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parallel.offload.copies import Copies, Mark
from parallel.offload.live_bytes import not_counted
from parallel.offload.packing import check_version, form_of, view_like


class DeviceCopy:
    """A parameter's copy on the device, which is freed with its last user."""

    def __init__(self, parameter: nn.Parameter, tensor: Tensor, mark: Mark, copies: Copies) -> None:
        self.parameter = parameter
        self.tensor = tensor
        self._mark = mark
        self._copies = copies

    def arrive(self) -> None:
        """Let computation wait for the copy."""
        mark, self._mark = self._mark, None
        if mark is not None:
            self._copies.wait(mark)

    def __del__(self) -> None:
        # Its memory is used again by what is computed next, which must not be before the copy is done.
        self.arrive()


Bring = Callable[[nn.Parameter], DeviceCopy]
"""Gives the parameter's copy on the device, perhaps still under way."""


class Unit:
    """Parameters that one layer used in one forward pass.

    Attributes:
        scope: the call of the layer.
        before: the unit before it in the same pass.
        first: the parameter asked for first.
        copies: held until ``release``.
        given: to the layer, by parameter and whether gradients were wanted.
    """

    def __init__(self, scope: object, before: Unit | None, first: int) -> None:
        self.scope = scope
        self.before = before
        self.first = first
        self.released = False
        self.copies: list[DeviceCopy] = []
        self.given: dict[tuple[int, bool], Tensor] = {}
        self._visits: weakref.WeakValueDictionary[int, Visit] = weakref.WeakValueDictionary()
        self._returned = False

    def release(self) -> None:
        """The layer has computed: its copies are held by what it saved only."""
        self.released = True
        self.copies.clear()
        self.given.clear()

    def visit(self, parameter: nn.Parameter, bring: Bring) -> Visit:
        """Return what the backward pass of this unit needs of ``parameter``."""
        visit = self._visits.get(id(parameter))
        if visit is None:
            self._visits[id(parameter)] = visit = Visit(parameter, self, bring)
        return visit

    def come_back(self) -> None:
        """Bring what the backward pass of this unit needs, and begin to bring what the unit before it needs."""
        if self._returned:
            return
        self._returned = True
        self._bring()
        before = self.before
        while before is not None and not before._visits:
            before = before.before
        if before is not None:
            before._bring()

    def _bring(self) -> None:
        for visit in self._visits.values():
            visit.bring()


class Visit:
    """A parameter that the backward pass of one unit needs: on the device from its first to its last use there."""

    def __init__(self, parameter: nn.Parameter, unit: Unit, bring: Bring) -> None:
        self._parameter, self._unit = parameter, unit
        self._bring = bring
        self._version = parameter._version
        self._copy: DeviceCopy | None = None

    def bring(self) -> DeviceCopy:
        if self._copy is None:
            self._copy = self._bring(self._parameter)
        return self._copy

    def tensor(self) -> Tensor:
        """Return the copy.

        Raises:
            RuntimeError: the parameter was changed meanwhile.
        """
        check_version(self._parameter, self._version)
        self._unit.come_back()
        copy = self.bring()
        copy.arrive()
        return copy.tensor


class Claim:
    """A tensor that autograd saved and that lies in a parameter's copy."""

    def __init__(self, visit: Visit, tensor: Tensor) -> None:
        self._visit = visit
        self._form = form_of(tensor)

    def unpack(self) -> Tensor:
        """Return the same view of the parameter, on the device again."""
        return view_like(self._visit.tensor(), self._form)


def on_device(parameter: nn.Parameter, copy: Tensor, copies: Copies) -> Tensor:
    """Return ``copy`` as a function of ``parameter`` in autograd: the gradient goes back to the host.

    The way back has two nodes. That of the device begins the copy of the gradient and goes on with the backward pass;
    that of the host, which autograd runs on another thread where the device is a GPU, waits for it and hands it to the
    parameter, whose hooks run as always.

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
        """Begin to copy ``gradient``, which is held until ``arrived``; return where it will be."""
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
    """Node of the host."""

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
    """Node of the device."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return copy.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.way.send(gradient), None, None
