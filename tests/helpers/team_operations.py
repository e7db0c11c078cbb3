"""Operations that teams compute: each between two convolutions, so that its parts are of odd sizes.

Takes nothing; gives modules for (n, 2, h, w) by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import SqueezeExcitation, StochasticDepth


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Network(nn.Module):
    """A convolution before the operation and one behind it."""

    def __init__(self, operation: nn.Module, channels: int) -> None:
        super().__init__()
        self.before = nn.Conv2d(2, 4, 3, padding=1)
        self.operation = operation
        self.after = nn.Conv2d(channels, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.operation(self.before(x)))
        return y


class ChannelsLast(nn.Module):
    """Layer norm and a linear layer over channels, rows and columns in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x.permute(0, 2, 3, 1)))
        return y.permute(0, 3, 1, 2)


class Skip(nn.Module):
    """A stride and back again, joined with what went in: even and odd sides alike."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.interpolate(self.up(self.down(x).relu()), size=x.shape[-2:], mode="bilinear", align_corners=False)
        return torch.cat([x, y], 1)


class UpToSize(nn.Module):
    """A transposed convolution that is asked for a size, one px more than its least."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 4, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x, output_size=(2 * x.shape[2], 2 * x.shape[3]))
        return y


class PooledBranch(nn.Module):
    """The end of a pyramid of pools: the mean of the image next to every px."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.pooled(F.adaptive_avg_pool2d(x, 1)).relu()
        whole = F.interpolate(mean, size=x.shape[-2:], mode="bilinear", align_corners=False)
        return torch.cat([x, whole], 1)


class Together(nn.Module):
    """Convolution, batch norm and ReLU, twice: rows outside the image are zero at each of them."""

    def __init__(self) -> None:
        super().__init__()
        layers = [part for _ in range(2) for part in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(True))]
        self.layers = nn.Sequential(*layers)
        for norm in (layers[1], layers[4]):
            assert isinstance(norm, nn.BatchNorm2d)
            nn.init.uniform_(norm.bias, 0.5, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


@dataclass(frozen=True)
class Subject:
    """An operation; ``channels``: that it gives of 4."""

    make: Callable[[], nn.Module]
    channels: int = 4

    def network(self) -> nn.Module:
        """Return it between two convolutions."""
        return Network(self.make(), self.channels)


def _conv(*numbers: object, **named: object) -> Subject:
    return Subject(lambda: nn.Conv2d(4, 4, *numbers, **named))  # type: ignore[arg-type]


def _up(*numbers: object, **named: object) -> Subject:
    return Subject(lambda: nn.ConvTranspose2d(4, 4, *numbers, **named))  # type: ignore[arg-type]


def _call(function: Callable[[Tensor], Tensor], channels: int = 4) -> Subject:
    return Subject(lambda: Call(function), channels)


OPERATIONS: dict[str, Subject] = {
    "convolution 3x3": _conv(3, padding=1),
    "convolution 7x7, stride 2": _conv(7, 2, 3),
    "convolution 4x4, stride 2": _conv(4, 2, 1),
    "convolution 3x3, stride 2, no pad": _conv(3, 2),
    "convolution 1x1, stride 2": _conv(1, 2),
    "convolution 5x3, stride (1, 2)": _conv((5, 3), (1, 2), (2, 1)),
    "convolution, dilation 12": _conv(3, padding=12, dilation=12),
    "convolution by channel": _conv(3, padding=1, groups=4),
    "convolution, pad beyond the kernel": _conv(1, padding=3),
    "convolution 4x4, 'same'": _conv(4, padding="same"),
    "convolution, reflected": _conv(3, padding=1, padding_mode="reflect"),
    "transposed convolution 2x2, stride 2": _up(2, 2),
    "transposed convolution 3x3, stride 2": _up(3, 2, 1, 1),
    "transposed convolution, stride beyond the kernel": _up(2, 3, 0, 2),
    "transposed convolution to a size": Subject(UpToSize),
    "max pool 3x3, stride 2": Subject(lambda: nn.MaxPool2d(3, 2, 1)),
    "max pool, ceil": Subject(lambda: nn.MaxPool2d(3, 2, ceil_mode=True)),
    "mean pool, pads count": Subject(lambda: nn.AvgPool2d(3, 2, 1)),
    "mean pool, ceil, pads do not count": Subject(
        lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)
    ),
    "mean pool to 5x7 cells": Subject(lambda: nn.AdaptiveAvgPool2d((5, 7))),
    "bilinear, factor 2": Subject(lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
    "bilinear, corners aligned, odd size": Subject(lambda: nn.Upsample((77, 59), mode="bilinear", align_corners=True)),
    "nearest, factor 1.5": Subject(lambda: nn.Upsample(scale_factor=1.5)),
    "pixel shuffle": Subject(lambda: nn.PixelShuffle(2), 1),
    "joined skip": Subject(Skip, 8),
    "crop": _call(lambda x: x[:, :, 3:-4, 5:-2]),
    "batch norm": Subject(lambda: nn.BatchNorm2d(4)),
    "convolution, batch norm, ReLU": Subject(Together),
    "group norm": Subject(lambda: nn.GroupNorm(2, 4)),
    "instance norm": Subject(lambda: nn.InstanceNorm2d(4, affine=True)),
    "layer norm and linear layer by px": Subject(ChannelsLast),
    "squeeze and excitation": Subject(lambda: SqueezeExcitation(4, 2)),
    "pooled branch": Subject(PooledBranch, 6),
    "deviation over the image": _call(lambda x: x / (1 + x.std((2, 3), keepdim=True))),
    "softmax over channels": _call(lambda x: x.softmax(1)),
    "dropout": Subject(lambda: nn.Dropout(0.3)),
    "dropout of channels": Subject(lambda: nn.Dropout2d(0.3)),
    "stochastic depth": Subject(lambda: StochasticDepth(0.4, "row")),
}
