"""U-Net(B, C) of the torchgpipe paper: B convolutions per cell, C channels at full resolution.

Takes float (n, in_channels, h, w) with h and w multiples of 32 px, gives logits (n, classes, h, w). Kim et al. 2020,
"torchgpipe: on-the-fly pipeline parallelism for training giant models", section 4 and its benchmark tables: grows to
any depth and width, and its skips cross every cut. With instance norm, as published, and one class the parameter
counts are those of the tables: (6, 72) 362.2M, (11, 128) 2.21B, (24, 128) 4.99B.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from models.blocks import Norm, SideCheck, init_convolutions, make_norm

DEPTH = 5
DROPOUT = 0.1
NEGATIVE_SLOPE = 0.01


def cell(in_channels: int, width: int, channels: int, convs: int, norm: Norm) -> nn.Sequential:
    """Return ``convs`` times convolution, channel dropout, norm, leaky ReLU.

    Takes (n, in_channels, h, w), gives (n, channels, h, w). The last convolution gives ``channels``, those before it
    ``width``.
    """
    sizes = [in_channels, *[width] * (convs - 1), channels]
    layers = nn.Sequential()
    for before, after in pairwise(sizes):
        layers.append(nn.Conv2d(before, after, 3, padding=1, bias=False))
        layers.append(nn.Dropout2d(DROPOUT))
        layers.append(make_norm(norm, after))
        layers.append(nn.LeakyReLU(NEGATIVE_SLOPE, inplace=True))
    return layers


class UNetGPipe(nn.Module):
    """A U-Net(B, C): tiles (n, in_channels, h, w) -> logits (n, classes, h, w).

    Args:
        convs: B, the convolutions of each of the eleven cells.
        base: C, channels at full resolution, doubled at each of five levels below; even, as the last cell gives C/2.
        norm: ``instance`` is the published network; it needs tiles of at least 64 px to train.

    Raises:
        ValueError: ``convs`` below 1, ``base`` odd or below 2; in forward: a side that is no multiple of 32 px.
    """

    def __init__(self, convs: int, base: int, *, classes: int, norm: Norm = "instance", in_channels: int = 3) -> None:
        super().__init__()
        if convs < 1 or base < 2 or base % 2:
            raise ValueError(f"U-Net(B, C) has B of at least 1 and C even, at least 2; got B {convs}, C {base}")
        channels = [base * 2**level for level in range(DEPTH)]
        deepest = channels[-1]
        self.check = SideCheck(2**DEPTH)
        self.encoder = nn.ModuleList(
            cell(before, after, after, convs, norm)
            for before, after in zip([in_channels, *channels[:-1]], channels, strict=True)
        )
        self.down = nn.MaxPool2d(2)
        self.bottleneck = cell(deepest, 2 * deepest, deepest, convs, norm)
        self.up = nn.Upsample(scale_factor=2)
        self.decoder = nn.ModuleList(cell(2 * c, c // 2, c // 2, convs, norm) for c in reversed(channels))
        self.head = nn.Conv2d(base // 2, classes, 1, bias=False)
        init_convolutions(self, "fan_in")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, classes, h, w)."""
        x = self.check(x)
        skips: list[Tensor] = []
        for convs in self.encoder:
            skip = convs(x)
            skips.append(skip)
            x = self.down(skip)
        x = self.bottleneck(x)
        for convs, skip in zip(self.decoder, reversed(skips), strict=True):
            x = convs(torch.cat((self.up(x), skip), dim=1))
        logits: Tensor = self.head(x)
        return logits
