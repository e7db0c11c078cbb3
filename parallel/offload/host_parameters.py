"""Parameters that live on the host and come to the device layer by layer, for as long as a layer computes with them.

Takes a module whose parameters are on the CPU; a layer that asks for one while the module runs is given a copy on the
device, and the gradient goes back to the parameter on the host. A unit is what one layer asks for between two other
layers: the copies of the unit that followed it last time are begun when it begins, in backward those of the unit before
it. After Rajbhandari et al. 2021, ZeRO-Infinity, section 5.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from parallel.offload.copies import Copies
from parallel.offload.live_bytes import not_counted
from parallel.offload.packing import Packed, Packer
from parallel.offload.parameter_copies import Claim, DeviceCopy, Unit, on_device


class HostParameters:
    """Parameters of a module on the host. Names, ``parameters()`` and ``state_dict()`` stay those of the module.

    Outside of its forward pass the module's parameters are those on the host. What autograd keeps of a copy would hold
    it on the device: saved-tensor hooks ask ``claims`` first, or pack through ``packer``.

    Args:
        module: its parameters on the CPU, where they stay, page-locked if copies want it; buffers go to ``device``.
        device: that computes.
        copies: of ``device``.

    Attributes:
        device_bytes: of the copies that live now, whoever holds them.
        peak_device_bytes: the most of them since the start or ``reset_peak``.

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
        self.device_bytes = 0
        self.peak_device_bytes = 0
        self._copies = copies
        # Reentrant: a copy may be collected, and so counted off, while this thread is counting.
        self._lock = threading.RLock()
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
        self._hooks = [hook for part in module.modules() for hook in self._install(part)]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Return a context in which a part of the module is computed without a call of the module itself."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def claims(self, tensor: Tensor) -> Packed | None:
        """Return what is saved for backward in place of ``tensor`` if that is a view of a copy; else None."""
        storage = tensor.untyped_storage()
        copy = self._places.get(storage.data_ptr()) if storage.nbytes() else None
        if copy is None or self._unit is None:
            return None
        return Claim(self._unit.visit(copy.parameter, self._bring), tensor)

    def packer(self, inner: Packer) -> Packer:
        """Return a packer of what is claimed, and of the rest with ``inner``."""
        return lambda tensor: self.claims(tensor) or inner(tensor)

    def reset_peak(self) -> None:
        """Let ``peak_device_bytes`` start again from what lives now."""
        with self._lock:
            self.peak_device_bytes = self.device_bytes

    def remove(self) -> None:
        """Leave the module as an ordinary one on the host; its buffers stay where they are."""
        for hook in self._hooks:
            hook.remove()
        for part in self.module.modules():
            part._parameters = dict(part._parameters.items())

    def _install(self, part: nn.Module) -> Iterator[Any]:
        if part is not self.module and not any(p is not None for p in part._parameters.values()):
            return
        part._parameters = _Asked(part._parameters, self)
        yield part.register_forward_pre_hook(self._enter)
        yield part.register_forward_hook(self._leave, always_call=True)

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
        """Begin the unit of a layer that reads its first parameter."""
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
        """Return the copy of ``parameter`` on the device, or begin a new one."""
        copy = self._present.get(id(parameter))
        if copy is None:
            tensor, mark = self._copies.to_device(parameter.detach())
            copy = DeviceCopy(parameter, tensor, mark, self._copies)
            self._present[id(parameter)] = copy
            storage = tensor.untyped_storage()
            self._places[storage.data_ptr()] = copy
            self._count(storage.nbytes())
            weakref.finalize(storage, self._count, -storage.nbytes()).atexit = False
        return copy

    def _count(self, size: int) -> None:
        with self._lock:
            self.device_bytes += size
            self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)


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
