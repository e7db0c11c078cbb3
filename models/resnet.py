"""ResNet 18, 34, 50, 101 and 152 for tiles of any size.

Takes float (n, in_channels, h, w), gives logits (n, classes). He et al. 2015, "Deep residual learning for image
recognition", table 1, with the stride on the 3 x 3 convolution of a bottleneck ("v1.5"). Parameters have torchvision's
names and shapes, so that its weight files load.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.blocks import Norm, init_convolutions, make_norm

WIDTHS = (64, 128, 256, 512)

BLOCKS_BY_DEPTH = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Depth -> residual blocks at each of the four resolutions. From 50 on the blocks are bottlenecks."""


def shortcut(in_channels: int, channels: int, stride: int, norm: Norm) -> nn.Sequential | None:
    """Return the projection for a block whose sum would not fit; None where the identity does."""
    if stride == 1 and in_channels == channels:
        return None
    return nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride, bias=False), make_norm(norm, channels))


class BasicBlock(nn.Module):
    """A block of two 3 x 3 convolutions: (n, in_channels, h, w) -> (n, width, h/stride, w/stride)."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, 1, bias=False)
        self.bn1 = make_norm(norm, width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = make_norm(norm, width)
        self.downsample = shortcut(in_channels, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, width, h/stride, w/stride)."""
        residual = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        out: Tensor = self.relu(self.bn2(self.conv2(y)) + residual)
        return out


class Bottleneck(nn.Module):
    """A block of 1 x 1, 3 x 3 and 1 x 1 convolutions: (n, in_channels, h, w) -> (n, 4 width, h/stride, w/stride)."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = make_norm(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = make_norm(norm, width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = make_norm(norm, 4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(in_channels, 4 * width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 4 width, h/stride, w/stride)."""
        residual = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        out: Tensor = self.relu(self.bn3(self.conv3(y)) + residual)
        return out


class ResNet(nn.Module):
    """A ResNet: tiles (n, in_channels, h, w) -> logits (n, classes); global average pooling, so any h and w.

    Args:
        depth: 18, 34, 50, 101 or 152.

    Raises:
        ValueError: another depth.
    """

    def __init__(self, depth: int, *, classes: int, norm: Norm = "batch", in_channels: int = 3) -> None:
        super().__init__()
        if depth not in BLOCKS_BY_DEPTH:
            raise ValueError(f"a ResNet has depth {', '.join(map(str, BLOCKS_BY_DEPTH))}; got {depth}")
        block: type[BasicBlock] | type[Bottleneck] = BasicBlock if depth < 50 else Bottleneck
        layers: list[nn.Sequential] = []
        self.conv1 = nn.Conv2d(in_channels, 64, 7, 2, 3, bias=False)
        self.bn1 = make_norm(norm, 64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = 64
        for width, blocks in zip(WIDTHS, BLOCKS_BY_DEPTH[depth], strict=True):
            layer = nn.Sequential()
            for i in range(blocks):
                layer.append(block(channels, width, 2 if i == 0 and layers else 1, norm))
                channels = width * block.expansion
            layers.append(layer)
        self.layer1, self.layer2, self.layer3, self.layer4 = layers
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)
        init_convolutions(self, "fan_out")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits
