"""AmoebaNet-D(L, D) for tiles of any size: L normal cells, and a width that grows with D.

Takes float (n, 3, h, w), gives logits (n, classes). Real et al. 2019, "Regularized evolution for image
classifier architecture search", in the sizes of Huang et al. 2019 (GPipe, table 1) and Kim et al. 2020 (torchgpipe,
section 4). With 1000 classes the parameter counts are those of torchgpipe's table: (18, 208) 81.5M, (18, 416) 319.0M,
(18, 544) 542.7M, (36, 544) 1.06B, (72, 512) 1.84B. There is no auxiliary classifier, as there. Max pools of 3 x 3 px
take maxima, as in the first paper; torchgpipe's take means, and cut negative values of the image off before the stem.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.blocks import Norm, init_convolutions, make_norm

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
        x = self.relu(x)
        out: Tensor = self.norm(torch.cat((self.even(x), self.odd(self.shift(x))), dim=1))
        return out


class Cell(nn.Module):
    """The first layers of both kinds of cell, which bring the two inputs to ``width`` channels and one size.

    Args:
        width: channels inside the cell, at least 4 and even.
        halve_before: what the cell before the last gives has twice the size of what the last one gives.
    """

    widths_out: int
    """Channels of the output, in multiples of ``width``."""

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
        last, before = self.squeeze_last(last), self.squeeze_before(before)
        pooled = self.small_pool(last) + self.large_pool(last)
        joined = pooled + self.strided(before)
        first = self.cross(pooled) + self.max_pool(pooled)
        second = joined + self.small_pool(before)
        third = self.mean_pool(pooled) + self.point(joined)
        return torch.cat((first, second, third), dim=1)


class AmoebaNet(nn.Module):
    """An AmoebaNet-D: tiles (n, 3, h, w) -> logits (n, classes); global average pooling, so any h and w.

    The size is halved five times, by the stem and four reduction cells. Two of these follow the stem, one stands after
    each of the first two thirds of the normal cells.

    Args:
        normal_cells: L, a multiple of 3.
        filters: D, at least 8. The stem has D // 4 channels; the width of cells doubles from there with each reduction.
        norm: ``batch`` is the published network; ``instance`` needs tiles larger than 32 px to train.

    Raises:
        ValueError: L that is no multiple of 3 or below 3, D below 8.
    """

    def __init__(self, normal_cells: int, filters: int, *, classes: int, norm: Norm = "batch") -> None:
        super().__init__()
        if normal_cells < 3 or normal_cells % 3 or filters < 8:
            raise ValueError(
                "AmoebaNet-D(L, D) has L a multiple of 3, a third at each of three resolutions, and D of at least 8; "
                f"got L {normal_cells}, D {filters}: use L {max(3, normal_cells // 3 * 3)}, D {max(8, filters)}"
            )
        width = filters // 4
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), make_norm(norm, width))
        third = [NormalCell] * (normal_cells // 3)
        self.cells = nn.ModuleList()
        last = before = width
        halved = False
        for kind in [ReductionCell, ReductionCell, *third, ReductionCell, *third, ReductionCell, *third]:
            reduces = kind is ReductionCell
            width *= 2 if reduces else 1
            self.cells.append(kind(last, before, width, halved, norm))
            last, before, halved = kind.widths_out * width, last, reduces
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(last, classes)
        init_convolutions(self, "fan_out")

    def forward(self, x: Tensor) -> Tensor:
        last = before = self.stem(x)
        for cell in self.cells:
            last, before = cell(last, before), last
        logits: Tensor = self.fc(torch.flatten(self.pool(last), 1))
        return logits
