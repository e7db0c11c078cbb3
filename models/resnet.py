"""ResNet 18, 34, 50, 101 and 152, and pre-activation ResNet of depth 9n+2, for tiles of any size.

They take float (n, 3, h, w) and return logits (n, classes). ``ResNet``: He et al. 2015, "Deep residual
learning for image recognition", table 1, with the stride on the 3 x 3 convolution of a bottleneck ("v1.5"). Parameters
have torchvision's names and shapes, so that its weight files load. ``ResNetV2``, the networks of the GEMS papers: He et
al. 2016, "Identity mappings in deep residual networks", with the widths and biases of the Keras CIFAR-10 example that
GEMS (Jain et al., SC'20) trains: bottlenecks of 16, 64 and 128 channels where the paper has 16, 32 and 64. ResNet-110
has 3.30M parameters and ResNet-1001 30.3M (paper: 10.2M). Its resolution is halved twice only: activations fill memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.blocks import Norm, conv_norm_relu, init_convolutions, make_norm

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
        residual = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        out: Tensor = self.relu(self.bn3(self.conv3(y)) + residual)
        return out


class ResNet(nn.Module):
    """A ResNet: tiles (n, 3, h, w) -> logits (n, classes); global average pooling, so any h and w.

    Raises:
        ValueError: ``depth`` is none of ``BLOCKS_BY_DEPTH``.
    """

    def __init__(self, depth: int, *, classes: int, norm: Norm = "batch") -> None:
        super().__init__()
        if depth not in BLOCKS_BY_DEPTH:
            raise ValueError(f"a ResNet has depth {', '.join(map(str, BLOCKS_BY_DEPTH))}; got {depth}")
        block: type[BasicBlock] | type[Bottleneck] = BasicBlock if depth < 50 else Bottleneck
        layers: list[nn.Sequential] = []
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
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
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


STEM_CHANNELS = 16

V2_WIDTHS = ((16, 64), (64, 128), (128, 256))
"""(inside the bottleneck, between blocks) at each of the three resolutions."""


class PreActivation(nn.Module):
    """A convolution behind norm and ReLU: (n, in_channels, h, w) -> (n, channels, h/stride, w/stride)."""

    def __init__(self, in_channels: int, channels: int, kernel: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm = make_norm(norm, in_channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(in_channels, channels, kernel, stride, kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(self.relu(self.norm(x)))
        return out


class PreActivationBottleneck(nn.Module):
    """A block of 1 x 1, 3 x 3 and 1 x 1 convolutions with nothing after the sum: (n, in_channels, h, w) ->
    (n, channels, h/stride, w/stride).

    Args:
        after_stem: the input is already normalised and rectified, so the first convolution takes it as it is.
        project: the first block of a resolution: the shortcut is a 1 x 1 convolution instead of the identity.
    """

    def __init__(
        self, in_channels: int, width: int, channels: int, stride: int, norm: Norm, *, after_stem: bool, project: bool
    ) -> None:
        super().__init__()
        self.reduce = (
            nn.Conv2d(in_channels, width, 1, stride)
            if after_stem
            else PreActivation(in_channels, width, 1, stride, norm)
        )
        self.mix = PreActivation(width, width, 3, 1, norm)
        self.expand = PreActivation(width, channels, 1, 1, norm)
        self.shortcut = nn.Conv2d(in_channels, channels, 1, stride) if project else None

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.shortcut is None else self.shortcut(x)
        out: Tensor = residual + self.expand(self.mix(self.reduce(x)))
        return out


class ResNetV2(nn.Module):
    """A ResNet-v2: tiles (n, 3, h, w) -> logits (n, classes); global average pooling, so any h and w.

    Raises:
        ValueError: ``depth`` is not 9n+2, with n bottlenecks at each of the three resolutions.
    """

    def __init__(self, depth: int, *, classes: int, norm: Norm = "batch") -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 9)
        if rest or blocks < 1:
            below = 9 * max(1, blocks) + 2
            raise ValueError(
                f"a ResNet-v2 has depth 9n+2, n at least 1 (20, 56, 110, 164, 1001); got {depth}: "
                f"the nearest are {below} and {below + 9}"
            )
        self.stem = conv_norm_relu(3, STEM_CHANNELS, norm, bias=True)
        self.layers = nn.Sequential()
        channels_in = STEM_CHANNELS
        for resolution, (width, channels) in enumerate(V2_WIDTHS):
            for i in range(blocks):
                stride = 2 if i == 0 and resolution > 0 else 1
                first = i == 0
                self.layers.append(
                    PreActivationBottleneck(
                        channels_in, width, channels, stride, norm, after_stem=first and resolution == 0, project=first
                    )
                )
                channels_in = channels
        self.norm = make_norm(norm, channels_in)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels_in, classes)
        init_convolutions(self, "fan_in")

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.layers(self.stem(x))))
        logits: Tensor = self.fc(torch.flatten(self.pool(x), 1))
        return logits
