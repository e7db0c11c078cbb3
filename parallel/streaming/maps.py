"""Maps between the parts of a region, and their gradients: whole, on the host or the device, written and read box by
box.

Images may be there without being anywhere: boxes of them are made when they are fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from parallel.offload.host_memory import HostMemory
from parallel.space.team import Box
from parallel.streaming.moments import HALVES
from parallel.trace.stage_module import Boxes, layout_of

Dims = Mapping[str, tuple[int, int]]


class Maps:
    """Maps by name.

    Args:
        shapes: of whole maps.
        dims: of rows and columns.
        device: that computes; boxes are fetched there.
        host: where the others lie.
        here: names of maps that lie on that device.
        held: rows and columns of a map that are here, by name; of others all.

    Attributes:
        ahead: copies run while others are computed, so that it helps to begin them before.
    """

    ahead = False

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dims: Dims,
        device: torch.device,
        host: HostMemory,
        here: frozenset[str] = frozenset(),
        held: Mapping[str, Box] = MappingProxyType({}),
    ) -> None:
        self._held = held
        self._shapes, self._dims, self._device, self._host, self._here = shapes, dims, device, host, here
        self._whole: dict[str, Tensor] = {}
        self._boxes: dict[str, Boxes] = {}
        self._layouts: dict[str, torch.memory_format] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._whole

    def put(self, name: str, whole: Tensor | Boxes) -> None:
        if isinstance(whole, Tensor):
            self._whole[name] = whole
        else:
            self._boxes[name] = whole

    def take(self, name: str) -> Tensor | None:
        """The whole map, which is let go of here."""
        return self._whole.pop(name, None)

    def write(self, name: str, box: Box, value: Tensor) -> None:
        """Boxes are disjoint."""
        if name not in self._whole:
            self._whole[name] = self._made(name, value)
        self.part(name, box).copy_(value)

    def add(self, name: str, box: Box, value: Tensor) -> None:
        """Boxes overlap, and add up."""
        if name not in self._whole:
            self._whole[name] = self._made(name, value)
        part = self.part(name, box)
        part.add_(value.to(part.device))

    def put_zeros(self, name: str, like: Maps) -> None:
        """Put zeros in the form of a map that ``like`` has."""
        self.put(name, torch.zeros_like(like._whole[name]))

    def empty(self, name: str, box: Box) -> Tensor:
        """Return memory for a box, dense and on the device that computes."""
        part = self.part(name, box)
        return torch.empty(part.shape, dtype=part.dtype, device=self._device)

    def begin(self, name: str, box: Box) -> None:
        """Begin to fetch a box, where copies run while others are computed."""

    def fetch(self, name: str, box: Box) -> Tensor:
        """A box on the device that computes, detached; a copy of its own but for a whole map that lies there."""
        whole = self._whole.get(name)
        if whole is None:
            return self._boxes[name].box(*box)
        part, held, dims = whole.detach(), self._held.get(name), self._dims[name]
        for axis, (start, stop) in enumerate(box):
            if stop - start != part.shape[dims[axis]]:
                part = part.narrow(dims[axis], start - (held[axis].start if held else 0), stop - start)
        if name in self._here and part.shape == whole.shape:
            return part
        layout = self._layouts.get(name)
        if layout is None:
            layout = self._layouts[name] = layout_of(whole)
        return part.to(self._device, copy=True, memory_format=layout)

    def part(self, name: str, box: Box) -> Tensor:
        """A view of a box, where it lies."""
        part, held = self._whole[name], self._held.get(name)
        for axis, (dim, (start, stop)) in enumerate(zip(self._dims[name], box, strict=True)):
            if stop - start != part.shape[dim]:
                part = part.narrow(dim, start - (held[axis].start if held else 0), stop - start)
        return part

    def _made(self, name: str, like: Tensor) -> Tensor:
        """Zeros, in the type and layout of a box."""
        shape = self._held_shape(name)
        if layout_of(like) is torch.contiguous_format:
            return self._zeros(name, shape, like.dtype)
        n, c, h, w = shape
        return self._zeros(name, (n, h, w, c), like.dtype).permute(0, 3, 1, 2)

    def _held_shape(self, name: str) -> tuple[int, ...]:
        shape = list(self._shapes[name])
        for dim, span in zip(self._dims[name], self._held.get(name, ()), strict=False):
            shape[dim] = span.size
        return tuple(shape)

    def _zeros(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name in self._here:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        return self._host.zeros(shape, dtype)


@dataclass
class Gradients:
    """Gradients that add up while boxes go back.

    Attributes:
        maps: of maps.
        known: of values without rows.
        sums: of parameters.
    """

    maps: Maps
    known: dict[str, Tensor]
    sums: dict[Tensor, Tensor]

    def count(
        self, leaves: Mapping[str, Tensor], parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> None:
        """Add ``gradients``: of ``leaves``, and then of ``parameters``."""
        for name, gradient in zip(leaves, gradients, strict=False):
            if gradient is not None:
                before = self.known.get(name)
                if before is not None:
                    gradient = (before.float() if before.dtype in HALVES else before) + gradient
                self.known[name] = gradient
        sums: list[Tensor] = []
        addends: list[Tensor] = []
        for parameter, gradient in zip(parameters, gradients[len(leaves) :], strict=True):
            if gradient is None:
                continue
            if parameter in self.sums:
                sums.append(self.sums[parameter])
                addends.append(gradient)
            else:
                self.sums[parameter] = gradient.clone()  # autograd may give two parameters one tensor
        if sums:
            torch._foreach_add_(sums, addends)

    def narrow(self, leaves: Mapping[str, Tensor]) -> None:
        """Give the sums of ``leaves`` their types again, once all boxes are counted."""
        for name in leaves.keys() & self.known.keys():
            self.known[name] = self.known[name].to(leaves[name].dtype)
