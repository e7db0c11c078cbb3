"""Cells of AmoebaNet-D: small graphs of convolutions and pools over what the last two cells gave.

A cell takes ``last``, float (n, last_channels, h, w), which the cell before it gave, and ``before``, which the one
before that gave: (n, before_channels, h, w), or twice that size where the cell between halved it. A normal cell gives
(n, 4 width, h, w), a reduction cell (n, 3 width, h/2, w/2), rounded up. Real et al. 2019, "Regularized evolution for
image classifier architecture search", figure of AmoebaNet-D; what leaves a normal cell is as in the authors' program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.blocks import Norm, make_norm

Step = tuple[int, tuple[int, int], int]
"""Channels given, kernel (height, width) and stride of one convolution."""


def convolutions(in_channels: int, steps: Sequence[Step], norm: Norm) -> nn.Sequential:
    """Return ReLU, convolution, norm for each of ``steps``; sides are kept or, by stride 2, halved and rounded up."""
    layers = nn.Sequential()
    for channels, (height, width), stride in steps:
        # The first one's input has other users in the cell.
        layers.append(nn.ReLU(inplace=len(layers) > 0))
        padding = (height // 2, width // 2)
        layers.append(nn.Conv2d(in_channels, channels, (height, width), stride, padding, bias=False))
        layers.append(make_norm(norm, channels))
        in_channels = channels
    return layers


def pointwise(in_channels: int, channels: int, norm: Norm) -> nn.Sequential:
    """Return ReLU, 1 x 1 convolution, norm."""
    return convolutions(in_channels, [(channels, (1, 1), 1)], norm)


def row_and_column(channels: int, norm: Norm) -> nn.Sequential:
    """Return 1 x 7 and 7 x 1 convolutions at a quarter of the channels."""
    quarter = channels // 4
    steps = [(quarter, (1, 1), 1), (quarter, (1, 7), 1), (quarter, (7, 1), 1), (channels, (1, 1), 1)]
    return convolutions(channels, steps, norm)


def halving(channels: int, norm: Norm) -> nn.Sequential:
    """Return a 3 x 3 convolution of stride 2 at a quarter of the channels."""
    quarter = channels // 4
    return convolutions(channels, [(quarter, (1, 1), 1), (quarter, (3, 3), 2), (channels, (1, 1), 1)], norm)


class FactorizedReduction(nn.Module):
    """A halving of the size that misses no diagonal: (n, in_channels, h, w) -> (n, channels, h/2, w/2), rounded up.

    Half of the channels look at the pixels of even row and column, half at those of odd row and column.
    """

    def __init__(self, in_channels: int, channels: int, norm: Norm) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(in_channels, channels // 2, 1, 2, bias=False)
        self.shift = nn.ZeroPad2d((-1, 1, -1, 1))
        self.odd = nn.Conv2d(in_channels, channels // 2, 1, 2, bias=False)
        self.norm = make_norm(norm, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, channels, h/2, w/2), rounded up."""
        x = self.relu(x)
        out: Tensor = self.norm(torch.cat((self.even(x), self.odd(self.shift(x))), dim=1))
        return out


class Cell(nn.Module):
    """The first layers of both kinds of cell, which bring the two inputs to ``width`` channels and one size.

    Args:
        last_channels: of what the cell before this one gives.
        before_channels: of what the cell before that gives.
        width: channels inside the cell, at least 4 and even.
        halve_before: what the cell before that gives has twice the size of what the cell before this one gives.

    Attributes:
        widths_out: channels of the output, in multiples of ``width``.
    """

    widths_out: int

    def __init__(self, last_channels: int, before_channels: int, width: int, halve_before: bool, norm: Norm) -> None:
        super().__init__()
        self.squeeze_last = pointwise(last_channels, width, norm)
        fit = FactorizedReduction if halve_before else pointwise
        self.squeeze_before = fit(before_channels, width, norm)


class NormalCell(Cell):
    """A cell that keeps the size: (n, last_channels, h, w) and what came before it -> (n, 4 width, h, w)."""

    widths_out = 4

    def __init__(self, last_channels: int, before_channels: int, width: int, halve_before: bool, norm: Norm) -> None:
        super().__init__(last_channels, before_channels, width, halve_before, norm)
        self.max_pool = nn.MaxPool2d(3, 1, 1)
        self.mean_pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.point_before = pointwise(width, width, norm)
        self.cross_first = row_and_column(width, norm)
        self.point_last = pointwise(width, width, norm)
        self.cross_second = row_and_column(width, norm)
        self.point_sum = pointwise(width, width, norm)

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        """Return (n, 4 width, h, w)."""
        last, before = self.squeeze_last(last), self.squeeze_before(before)
        pooled = self.point_before(before) + self.max_pool(before)
        first = before + self.cross_first(last)
        second = self.point_last(last) + self.cross_second(last)
        pooled = self.max_pool(pooled) + pooled
        third = self.mean_pool(before) + self.point_sum(pooled)
        return torch.cat((last, first, second, third), dim=1)


class ReductionCell(Cell):
    """A cell that halves the size: (n, last_channels, h, w) and what came before it -> (n, 3 width, h/2, w/2)."""

    widths_out = 3

    def __init__(self, last_channels: int, before_channels: int, width: int, halve_before: bool, norm: Norm) -> None:
        super().__init__(last_channels, before_channels, width, halve_before, norm)
        self.small_pool = nn.MaxPool2d(2, 2, ceil_mode=True)
        self.large_pool = nn.MaxPool2d(3, 2, 1)
        self.max_pool = nn.MaxPool2d(3, 1, 1)
        self.mean_pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.strided = halving(width, norm)
        self.cross = row_and_column(width, norm)
        self.point = pointwise(width, width, norm)

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        """Return (n, 3 width, h/2, w/2), rounded up."""
        last, before = self.squeeze_last(last), self.squeeze_before(before)
        pooled = self.small_pool(last) + self.large_pool(last)
        joined = pooled + self.strided(before)
        first = self.cross(pooled) + self.max_pool(pooled)
        second = joined + self.small_pool(before)
        third = self.mean_pool(pooled) + self.point(joined)
        return torch.cat((first, second, third), dim=1)
