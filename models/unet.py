"""Classic U-Net with padded convolutions: every pixel of the tile gets logits.

Takes float (n, in_channels, h, w) with h and w multiples of 2^depth px, gives logits (n, classes, h, w). Ronneberger
et al. 2015, figure 1: two 3 x 3 convolutions per level, 2 x 2 max pooling down, 2 x 2 transposed convolution up, skips
concatenated; a norm after each 3 x 3 convolution is the one addition, padding the one change.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.blocks import Norm, SideCheck, conv_norm_relu, init_convolutions


def double_convolution(in_channels: int, channels: int, norm: Norm) -> nn.Sequential:
    """Return twice 3 x 3 convolution, norm, ReLU: (n, in_channels, h, w) -> (n, channels, h, w)."""
    return nn.Sequential(conv_norm_relu(in_channels, channels, norm), conv_norm_relu(channels, channels, norm))


class Up(nn.Module):
    """A step up, which doubles the size, joins the skip and convolves twice.

    Takes (n, 2c, h, w) and the skip (n, c, 2h, 2w), gives (n, c, 2h, 2w).
    """

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, 2)
        self.convs = double_convolution(2 * channels, channels, norm)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Return the joined map (n, c, 2h, 2w)."""
        out: Tensor = self.convs(torch.cat((skip, self.up(x)), dim=1))
        return out


class UNet(nn.Module):
    """A U-Net: tiles (n, in_channels, h, w) -> logits (n, classes, h, w).

    Args:
        base: channels at full resolution; doubled at each level below.
        depth: how often the size is halved; h and w are multiples of 2^depth px.

    Raises:
        ValueError: ``base`` or ``depth`` below 1; in forward: a side that is no multiple of 2^depth px.
    """

    def __init__(
        self, *, classes: int, norm: Norm = "batch", in_channels: int = 3, base: int = 64, depth: int = 4
    ) -> None:
        super().__init__()
        if base < 1 or depth < 1:
            raise ValueError(f"a U-Net has base width and depth of at least 1; got base {base}, depth {depth}")
        channels = [base * 2**level for level in range(depth + 1)]
        self.check = SideCheck(2**depth)
        self.encoder = nn.ModuleList(
            double_convolution(before, after, norm)
            for before, after in zip([in_channels, *channels[:-1]], channels, strict=True)
        )
        self.down = nn.MaxPool2d(2)
        self.decoder = nn.ModuleList(Up(c, norm) for c in reversed(channels[:-1]))
        self.head = nn.Conv2d(base, classes, 1)
        init_convolutions(self, "fan_in")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, classes, h, w)."""
        x = self.check(x)
        skips: list[Tensor] = []
        for level, convs in enumerate(self.encoder):
            x = convs(x if level == 0 else self.down(x))
            skips.append(x)
        for up, skip in zip(self.decoder, skips[-2::-1], strict=True):
            x = up(x, skip)
        logits: Tensor = self.head(x)
        return logits
