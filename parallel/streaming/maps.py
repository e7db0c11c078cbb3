"""Maps between the parts of a region, and their gradients: whole, on the host, written and read box by box."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from parallel.offload.live_bytes import not_counted
from parallel.streaming.images import Boxes
from parallel.streaming.patch import Box

Dims = Mapping[str, tuple[int, int]]


class Maps:
    """By name.

    Args:
        shapes: of whole maps.
        dims: of rows and columns.
        device: that computes; boxes are fetched there.
        here: names of maps that lie on that device.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dims: Dims,
        device: torch.device,
        here: frozenset[str] = frozenset(),
    ) -> None:
        self._shapes, self._dims, self._device, self._here = shapes, dims, device, here
        self._whole: dict[str, Tensor] = {}
        self._boxes: dict[str, Boxes] = {}

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

    def whole(self, name: str) -> Tensor:
        return self._whole[name]

    def write(self, name: str, box: Box, value: Tensor) -> None:
        """Boxes are disjoint."""
        if name not in self._whole:
            self._whole[name] = self._made(name, value, torch.empty)
        self._part(name, box).copy_(value)

    def add(self, name: str, box: Box, value: Tensor) -> None:
        """Boxes overlap, and add up."""
        if name not in self._whole:
            self._whole[name] = self._made(name, value, torch.zeros)
        part = self._part(name, box)
        part.add_(value.to(part.device))

    def fetch(self, name: str, box: Box) -> Tensor:
        """A copy of a box on the device that computes, detached."""
        if name in self._boxes:
            return self._boxes[name].box(*box)
        part = self._part(name, box).detach()
        layout = torch.channels_last if _channels_last(self._whole[name]) else torch.contiguous_format
        if part.device != self._device:
            return part.to(self._device).contiguous(memory_format=layout)
        if part.shape == self._whole[name].shape:
            return part
        return part.clone(memory_format=layout)

    def _part(self, name: str, box: Box) -> Tensor:
        part = self._whole[name]
        for dim, span in zip(self._dims[name], box, strict=True):
            if span.size != part.shape[dim]:
                part = part.narrow(dim, span.start, span.size)
        return part

    def _made(self, name: str, like: Tensor, make: Callable[..., Tensor]) -> Tensor:
        shape = self._shapes[name]
        layout = torch.channels_last if _channels_last(like) else torch.contiguous_format
        if name in self._here:
            whole: Tensor = make(shape, dtype=like.dtype, device=self._device)
            return whole.contiguous(memory_format=layout)
        with not_counted():
            flat: Tensor = make(shape, dtype=like.dtype, device="cpu")
            return flat.contiguous(memory_format=layout)


def _channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
