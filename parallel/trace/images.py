"""Images and targets that exist box by box: a tile of 16,384 px would be 3.2 GB of floats, and is never made."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from parallel.space.grid import Span


@runtime_checkable
class Boxes(Protocol):
    """Images (n, c, h, w) or targets (n, h, w) whose boxes are made when they are asked for, each time anew."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole; rows and columns last."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the boxes."""
        ...

    @property
    def device(self) -> torch.device:
        """On which the boxes lie."""
        ...

    def box(self, rows: Span, columns: Span) -> Tensor:
        """Return these rows and columns of all, in memory of their own: the same numbers as a crop of the whole."""
        ...


def whole(value: Tensor | Boxes) -> Tensor:
    """Return all of it as a tensor."""
    if isinstance(value, Tensor):
        return value
    rows, columns = value.shape[-2:]
    return value.box(Span(0, rows), Span(0, columns))
