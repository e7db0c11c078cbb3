"""Pre-activation ResNet of depth 9n+2 (110, 164, 1001, ...): the networks of the GEMS papers.

Takes float (n, in_channels, h, w), gives logits (n, classes). He et al. 2016, "Identity mappings in deep residual
networks", with the widths and biases of the Keras CIFAR-10 example that GEMS (Jain et al., SC'20) trains: bottlenecks
of 16, 64 and 128 channels where the paper has 16, 32 and 64. So ResNet-110 has 3.30M parameters and ResNet-1001 30.3M
(paper: 10.2M). The resolution is only halved twice: activations, not parameters, fill the memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.blocks import Norm, conv_norm_relu, init_convolutions, make_norm

STEM_CHANNELS = 16

WIDTHS = ((16, 64), (64, 128), (128, 256))
"""(inside the bottleneck, between blocks) at each of the three resolutions."""


class PreActivation(nn.Module):
    """A convolution behind norm and ReLU: (n, in_channels, h, w) -> (n, channels, h/stride, w/stride)."""

    def __init__(self, in_channels: int, channels: int, kernel: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm = make_norm(norm, in_channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(in_channels, channels, kernel, stride, kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, channels, h/stride, w/stride)."""
        out: Tensor = self.conv(self.relu(self.norm(x)))
        return out


class PreActivationBottleneck(nn.Module):
    """A block of 1 x 1, 3 x 3 and 1 x 1 convolutions with nothing after the sum.

    Takes (n, in_channels, h, w), gives (n, channels, h/stride, w/stride).

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
        """Return (n, channels, h/stride, w/stride)."""
        residual = x if self.shortcut is None else self.shortcut(x)
        out: Tensor = residual + self.expand(self.mix(self.reduce(x)))
        return out


class ResNetV2(nn.Module):
    """A ResNet-v2: tiles (n, in_channels, h, w) -> logits (n, classes); global average pooling, so any h and w.

    Args:
        depth: 9n+2, with n bottlenecks at each of the three resolutions.

    Raises:
        ValueError: another depth.
    """

    def __init__(self, depth: int, *, classes: int, norm: Norm = "batch", in_channels: int = 3) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 9)
        if rest or blocks < 1:
            below = 9 * max(1, blocks) + 2
            raise ValueError(
                f"a ResNet-v2 has depth 9n+2, n at least 1 (20, 56, 110, 164, 1001); got {depth}: "
                f"the nearest are {below} and {below + 9}"
            )
        self.stem = conv_norm_relu(in_channels, STEM_CHANNELS, norm, bias=True)
        self.layers = nn.Sequential()
        channels_in = STEM_CHANNELS
        for resolution, (width, channels) in enumerate(WIDTHS):
            for i in range(blocks):
                stride = 2 if i == 0 and resolution > 0 else 1
                first = i == 0
                self.layers.append(
                    PreActivationBottleneck(
                        channels_in,
                        width,
                        channels,
                        stride,
                        norm,
                        after_stem=first and resolution == 0,
                        project=first,
                    )
                )
                channels_in = channels
        self.norm = make_norm(norm, channels_in)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels_in, classes)
        init_convolutions(self, "fan_in")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, classes)."""
        x = self.relu(self.norm(self.layers(self.stem(x))))
        logits: Tensor = self.fc(torch.flatten(self.pool(x), 1))
        return logits
