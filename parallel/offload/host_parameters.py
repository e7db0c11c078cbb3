"""Parameters that live on the host and come to the device layer by layer, for as long as a layer computes with them.

A layer that asks for a parameter while the module runs is given a copy on the device, and the gradient goes back to the
host. A unit is what one layer asks for between two other layers: the copies of the unit that followed it last time are
begun when it begins, in backward those of the unit before it. What autograd saved of copies is brought to the device
again when the backward pass comes to it. After Rajbhandari et al. 2021, ZeRO-Infinity, section 5.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from parallel.offload.copies import Copies, Mark
from parallel.offload.live_bytes import not_counted
from parallel.offload.packing import Packed, Packer, check_version, form_of, view_like


class DeviceCopy:
    """A parameter's copy on the device, which is freed with its last user."""

    def __init__(self, parameter: nn.Parameter, tensor: Tensor, mark: Mark, copies: Copies) -> None:
        self.parameter, self.tensor = parameter, tensor
        self._mark, self._copies = mark, copies

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
    """Parameters that one layer used in one forward pass; they were copied for the call ``scope`` of the layer."""

    def __init__(self, scope: object, before: Unit | None, first: int) -> None:
        self.scope, self.before, self.first = scope, before, first
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
        return self._visits.setdefault(id(parameter), Visit(parameter, self, bring))

    def come_back(self) -> None:
        """Bring what the backward pass of this unit needs, and begin to bring what the unit before it needs."""
        if self._returned:
            return
        self._returned = True
        before = self.before
        while before is not None and not before._visits:
            before = before.before
        for unit in (self, before):
            for visit in unit._visits.values() if unit is not None else ():
                visit.bring()


class Visit:
    """A parameter that the backward pass of one unit needs: on the device from its first to its last use there."""

    def __init__(self, parameter: nn.Parameter, unit: Unit, bring: Bring) -> None:
        self._parameter, self._unit, self._bring = parameter, unit, bring
        self._version = parameter._version
        self._copy: DeviceCopy | None = None

    def bring(self) -> DeviceCopy:
        if self._copy is None:
            self._copy = self._bring(self._parameter)
        return self._copy

    def tensor(self) -> Tensor:
        """Return the copy; a RuntimeError where the parameter was changed meanwhile."""
        check_version(self._parameter, self._version)
        self._unit.come_back()
        copy = self.bring()
        copy.arrive()
        return copy.tensor


class HostParameters:
    """Parameters of a module on the host. Names, ``parameters()`` and ``state_dict()`` stay those of the module.

    Args:
        module: its parameters on the CPU, where they stay, page-locked if copies want it; buffers go to ``device``.
        device: that computes.
        copies: of ``device``.

    Raises:
        ValueError: the module has a layer that does not ask for its parameters by name.
    """

    def __init__(self, module: nn.Module, device: torch.device, copies: Copies) -> None:
        assert all(parameter.device.type == "cpu" for parameter in module.parameters())
        stubborn = [name or "the model" for name, part in module.named_modules() if isinstance(part, nn.RNNBase)]
        if stubborn:
            raise ValueError(
                f"parameters cannot stay on the host: {', '.join(stubborn)} keeps a list of its own of them; "
                "leave the parameters on the device"
            )
        self.module = module
        self._copies = copies
        self._scopes: list[object] = []
        self._unit: Unit | None = None
        self._ahead: list[DeviceCopy] = []
        self._members: dict[int, dict[int, nn.Parameter]] = {}
        """First parameter of a unit -> all that were ever asked for in it."""
        self._next: dict[int, int] = {}
        """First parameter of a unit -> first one of the unit that followed last time."""
        self._present: weakref.WeakValueDictionary[int, DeviceCopy] = weakref.WeakValueDictionary()
        self._places: weakref.WeakValueDictionary[int, DeviceCopy] = weakref.WeakValueDictionary()
        buffers_to(module, device)
        if copies.pinned:
            with not_counted():
                for parameter in module.parameters():
                    parameter.data = parameter.data.pin_memory()
        for part in module.modules():
            if part is module or any(p is not None for p in part._parameters.values()):
                part._parameters = _Asked(part._parameters, self)
                part.register_forward_pre_hook(self._enter)
                part.register_forward_hook(self._leave, always_call=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Return a context in which a part of the module is computed without a call of the module itself."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def packer(self, inner: Packer) -> Packer:
        """Return a packer of views of copies, which autograd would hold on the device; ``inner`` packs the rest."""

        def pack(tensor: Tensor) -> Packed:
            storage = tensor.untyped_storage()
            copy = self._places.get(storage.data_ptr()) if storage.nbytes() else None
            if copy is None or self._unit is None:
                return inner(tensor)
            return Claim(self._unit.visit(copy.parameter, self._bring), tensor)

        return pack

    def _enter(self, *_: Any) -> None:
        self._scopes.append(object())

    def _leave(self, *_: Any) -> None:
        scope = self._scopes.pop()
        if self._unit is not None and self._unit.scope is scope:
            self._unit.release()
        if not self._scopes:
            self._unit = None
            self._ahead = []

    def _asked(self, parameter: nn.Parameter) -> Tensor:
        """Return what a layer gets that reads ``parameter``."""
        if not self._scopes:
            return parameter
        unit = self._unit
        if unit is None or unit.scope is not self._scopes[-1] or unit.released:
            unit = self._begin(parameter)
        key = id(parameter), torch.is_grad_enabled()
        if key not in unit.given:
            self._members[unit.first][id(parameter)] = parameter
            copy = self._bring(parameter)
            copy.arrive()
            unit.copies.append(copy)
            unit.given[key] = on_device(parameter, copy.tensor, self._copies)
        return unit.given[key]

    def _begin(self, parameter: nn.Parameter) -> Unit:
        before, first = self._unit, id(parameter)
        if before is not None:
            before.release()
            self._next[before.first] = first
        self._unit = unit = Unit(self._scopes[-1], before, first)
        members = self._members.setdefault(first, {first: parameter})
        unit.copies = [self._bring(each) for each in members.values()]
        following = self._members.get(self._next.get(first, first), {})
        self._ahead = [self._bring(each) for each in following.values()]
        return unit

    def _bring(self, parameter: nn.Parameter) -> DeviceCopy:
        copy = self._present.get(id(parameter))
        if copy is None:
            tensor, mark = self._copies.to_device(parameter.detach())
            copy = DeviceCopy(parameter, tensor, mark, self._copies)
            self._present[id(parameter)] = copy
            self._places[tensor.untyped_storage().data_ptr()] = copy
        return copy


class _Asked(dict[str, nn.Parameter | None]):
    """A module's parameters by name. Reading one by name gives its copy; iterating gives those on the host."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], host: HostParameters) -> None:
        super().__init__(parameters)
        self._host = host

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        return None if parameter is None else self._host._asked(parameter)


def buffers_to(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of ``module``, and nothing else, to ``device``."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer, buffer.to(device)
                part._buffers[name] = moved[id(buffer)][1]


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

    The way back has two nodes. That of the device begins the copy of the gradient and continues with the backward pass;
    that of the host, which autograd runs on another thread where the device is a GPU, waits for it and hands it to the
    parameter, whose hooks run as always.
    """
    under_way: list[tuple[Tensor, Mark]] = []  # a gradient is held until it is on the host
    # Each use has a tensor of its own: the copy itself may be given to several.
    tensor: Tensor = _ToDevice.apply(_OnHost.apply(parameter, copies, under_way), copy, copies, under_way)
    return tensor


class _OnHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copies: Copies, under_way: list[tuple[Tensor, Mark]]) -> Tensor:
        ctx.copies, ctx.under_way = copies, under_way
        return parameter.view_as(parameter)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.copies.synchronize(ctx.under_way[0][1])
        ctx.under_way.clear()
        return gradient, None, None


class _ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor, copies: Copies, under_way: list[Any]) -> Tensor:
        ctx.copies, ctx.under_way = copies, under_way
        return copy.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        into = ctx.copies.empty_like_on_host(gradient)
        ctx.under_way.append((gradient, ctx.copies.to_host(gradient, into)))
        return into, None, None, None
