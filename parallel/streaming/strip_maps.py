"""Maps of a GPU on the host: copied on side streams while boxes are computed, in strips of columns that lie dense.

A copy overlaps with the computation only between dense memory of the device and dense, page-locked memory of the host.
So a map lies on the host in strips, cut at the columns where boxes begin and end, with rows first: some rows of a strip
are one copy. Boxes are packed and unpacked, and overlapping gradients added, on the device. Boxes that are written
leave while the next is computed; those that are fetched come one box ahead. The host waits for none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from parallel.offload.copies import Mark
from parallel.offload.host_memory import HostMemory
from parallel.space.team import Box
from parallel.streaming.maps import Maps
from parallel.streaming.part_plan import PartPlan
from parallel.trace.stage_module import layout_of

UNDER_WAY = 2
"""Boxes that may be on their way to the host: one is copied while the next is packed."""


@dataclass
class Strip:
    """Columns of a map on the host.

    Attributes:
        start, stop: of the columns.
        rows: (rows, ...); those before ``filled`` are written, the others are zeros.
        written: when the last copy to it is done.
    """

    start: int
    stop: int
    rows: Tensor
    filled: int = 0
    written: Mark = None


@dataclass
class Coming:
    """Some rows of a strip on their way to the device, of which columns ``start`` to ``stop`` are asked for."""

    strip: Strip
    start: int
    stop: int
    rows: Tensor
    mark: Mark


class HostStrips:
    """A map on the host.

    Args:
        dtype, layout: of its boxes.
        shape: of what is held of the map.
        dims: of rows and columns.
        origin: first row and column that are held.
        cuts: columns at which boxes begin and end.
        host: where it lies.
        device: that computes.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        layout: torch.memory_format,
        shape: Sequence[int],
        dims: tuple[int, int],
        origin: tuple[int, int],
        cuts: Collection[int],
        host: HostMemory,
        device: torch.device,
    ) -> None:
        self.dtype, self.layout, self._shape, self._dims, self._top = dtype, layout, tuple(shape), dims, origin[0]
        self._copies, self._device = host.copies, device
        in_order = (0, 2, 3, 1) if layout == torch.channels_last else range(len(shape))
        others = (dim for dim in in_order if dim != dims[0])
        self._order = dims[0], *others
        self._columns = self._order.index(dims[1])
        left, right = origin[1], origin[1] + shape[dims[1]]
        self._strips: list[Strip] = []
        for start, stop in pairwise(sorted({left, right}.union(cut for cut in cuts if left < cut < right))):
            strip = [shape[dim] for dim in self._order]
            strip[self._columns] = stop - start
            self._strips.append(Strip(start, stop, host.empty(tuple(strip), dtype)))

    def empty(self, box: Box) -> Tensor:
        """Return memory of the device for a box."""
        shape = list(self._shape)
        for dim, (start, stop) in zip(self._dims, box, strict=True):
            shape[dim] = stop - start
        return torch.empty(shape, dtype=self.dtype, device=self._device, memory_format=self.layout)

    def begin(self, box: Box) -> list[Coming]:
        """Begin to copy a box to the device."""
        coming, (top, bottom) = [], self._rows(box)
        for strip, start, stop in self._overlapping(box):
            if top < (last := min(bottom, strip.filled)):
                coming.append(Coming(strip, start, stop, *self._read(strip, top, last)))
        return coming

    def finish(self, box: Box, coming: Sequence[Coming]) -> Tensor:
        """Return a box whose copies have begun."""
        value, (top, bottom) = self.empty(box), self._rows(box)
        columns = sum(part.stop - part.start for part in coming)
        if columns < box[1].size or any(len(part.rows) < bottom - top for part in coming):
            value.zero_()
        packed = value.permute(self._order)
        for part in coming:
            self._copies.wait(part.mark)
            rows = part.rows.narrow(self._columns, part.start - part.strip.start, part.stop - part.start)
            packed[: len(rows)].narrow(self._columns, part.start - box[1].start, part.stop - part.start).copy_(rows)
        return value

    def update(self, box: Box, value: Tensor, *, add: bool) -> list[tuple[Tensor, Mark]]:
        """Begin to write a box, or what there is with it added; return what is to be held until it is on the host."""
        leaving, (top, bottom) = [], self._rows(box)
        if value.dim() == 0:
            value = value.to(self._device).expand_as(self.empty(box))
        packed = value.permute(self._order).to(self.dtype)
        for strip, start, stop in self._overlapping(box):
            piece = packed.narrow(self._columns, start - box[1].start, stop - start)
            first = min(top, strip.filled)  # rows that nobody wrote before are zeros
            there = min(bottom, strip.filled)
            whole = (start, stop) == (strip.start, strip.stop) and first == top
            if whole and (there <= first or not add):
                rows = piece.contiguous()
            else:
                shape = [bottom - first, *strip.rows.shape[1:]]
                rows = torch.zeros(shape, dtype=self.dtype, device=self._device)
                if first < there:
                    before, mark = self._read(strip, first, there)
                    self._copies.wait(mark)
                    rows[: there - first].copy_(before)
                target = rows[top - first :].narrow(self._columns, start - strip.start, stop - start)
                target.add_(piece) if add else target.copy_(piece)
            strip.written = self._copies.to_host(rows, strip.rows[first:bottom])
            strip.filled = max(strip.filled, bottom)
            leaving.append((rows, strip.written))
        return leaving

    def _read(self, strip: Strip, first: int, last: int) -> tuple[Tensor, Mark]:
        self._copies.wait(strip.written)
        return self._copies.to_device(strip.rows[first:last])

    def _rows(self, box: Box) -> tuple[int, int]:
        return box[0].start - self._top, box[0].stop - self._top

    def _overlapping(self, box: Box) -> Iterator[tuple[Strip, int, int]]:
        """Yield the strips that have columns of a box, and which."""
        for strip in self._strips:
            start, stop = max(strip.start, box[1].start), min(strip.stop, box[1].stop)
            if start < stop:
                yield strip, start, stop


class StripMaps(Maps):
    """Maps of a device whose copies overlap with its computation.

    Args:
        cuts: columns at which boxes of a map begin and end, by name.
    """

    ahead = True

    def __init__(self, *args: Any, cuts: Mapping[str, Collection[int]], **options: Any) -> None:
        super().__init__(*args, **options)
        self._cuts = cuts
        self._strips: dict[str, HostStrips] = {}
        self._coming: dict[tuple[str, Box], list[Coming]] = {}
        self._leaving: deque[list[tuple[Tensor, Mark]]] = deque()

    def __contains__(self, name: str) -> bool:
        return name in self._strips or super().__contains__(name)

    def take(self, name: str) -> Tensor | None:
        # The next map in its memory is written on the stream that this one was, after all that was read of it.
        self._strips.pop(name, None)
        for key in [key for key in self._coming if key[0] == name]:
            for part in self._coming.pop(key):
                self._host.copies.wait(part.mark)
        return super().take(name)

    def put_zeros(self, name: str, like: Maps) -> None:
        assert isinstance(like, StripMaps)
        if name not in like._strips:
            super().put_zeros(name, like)
            return
        self._strips[name] = self._new(name, like._strips[name].dtype, like._strips[name].layout)

    def empty(self, name: str, box: Box) -> Tensor:
        return self._strips[name].empty(box) if name in self._strips else super().empty(name, box)

    def begin(self, name: str, box: Box) -> None:
        if name in self._strips and (name, box) not in self._coming:
            self._coming[name, box] = self._strips[name].begin(box)

    def fetch(self, name: str, box: Box) -> Tensor:
        strips = self._strips.get(name)
        if strips is None:
            return super().fetch(name, box)
        coming = self._coming.pop((name, box)) if (name, box) in self._coming else strips.begin(box)
        return strips.finish(box, coming)

    def write(self, name: str, box: Box, value: Tensor) -> None:
        if not self._update(name, box, value, add=False):
            super().write(name, box, value)

    def add(self, name: str, box: Box, value: Tensor) -> None:
        if not self._update(name, box, value, add=True):
            super().add(name, box, value)

    def _update(self, name: str, box: Box, value: Tensor, *, add: bool) -> bool:
        """Write or add a box of a map on the host; return whether it is one."""
        if name in self._here or name in self._whole:
            return False
        if name not in self._strips:
            self._strips[name] = self._new(name, value.dtype, layout_of(value))
        self._leaving.append(self._strips[name].update(box, value, add=add))
        while len(self._leaving) > UNDER_WAY:
            for _, mark in self._leaving.popleft():
                self._host.copies.wait(mark)
        return True

    def _new(self, name: str, dtype: torch.dtype, layout: torch.memory_format) -> HostStrips:
        shape = self._held_shape(name)
        held = self._held.get(name)
        origin = (held[0].start, held[1].start) if held else (0, 0)
        dims, cuts = self._dims[name], self._cuts.get(name, ())
        return HostStrips(dtype, layout, shape, dims, origin, cuts, self._host, self._device)


def column_cuts(parts: Iterable[PartPlan]) -> dict[str, set[int]]:
    """Return the columns at which boxes of each map begin and end."""
    cuts: dict[str, set[int]] = {}
    for part in parts:
        for spans in part.columns:
            for name in (*part.entering, *(step.name for step in part.live_steps)):
                if name in spans and name in part.region.dims:
                    cuts.setdefault(name, set()).update(spans[name])
        for name, (_, columns) in part.box_spans.items():
            cuts.setdefault(name, set()).update(*columns)
    return cuts
