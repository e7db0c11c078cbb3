"""U-Nets: the classic one with padded convolutions, one over any encoder of timm, and that of GPipe.

Takes float (n, 3, h, w) with h and w multiples of 2^depth px, gives logits (n, classes, h, w). Classic:
Ronneberger et al. 2015, figure 1, with padding and a norm after each 3 x 3 convolution. U-Net(B, C) has B convolutions
per cell, C channels at full resolution and skips that cross every cut: Kim et al. 2020, "torchgpipe: on-the-fly
pipeline parallelism for training giant models", section 4. With instance norm and one class the parameter counts are
those of its tables: (6, 72) 362.2M, (11, 128) 2.21B, (24, 128) 4.99B.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.blocks import Norm, SideCheck, conv_norm_relu, init_convolutions, make_norm
from models.external import check_timm, create_timm


def double_convolution(in_channels: int, channels: int, norm: Norm) -> nn.Sequential:
    """Return twice 3 x 3 convolution, norm, ReLU: (n, in_channels, h, w) -> (n, channels, h, w)."""
    return nn.Sequential(conv_norm_relu(in_channels, channels, norm), conv_norm_relu(channels, channels, norm))


class Up(nn.Module):
    """A step up, which joins the skip and convolves twice: (n, 2c, h, w) and (n, c, 2h, 2w) -> (n, c, 2h, 2w)."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, 2)
        self.convs = double_convolution(2 * channels, channels, norm)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        out: Tensor = self.convs(torch.cat((skip, self.up(x)), dim=1))
        return out


class UNet(nn.Module):
    """A U-Net: tiles (n, 3, h, w) -> logits (n, classes, h, w).

    Args:
        base: channels at full resolution; doubled at each level below.
        depth: how often the size is halved; h and w are multiples of 2^depth px.

    Raises:
        ValueError: ``base`` or ``depth`` below 1; in forward: a side that is no multiple of 2^depth px.
    """

    def __init__(self, *, classes: int, norm: Norm = "batch", base: int = 64, depth: int = 4) -> None:
        super().__init__()
        if base < 1 or depth < 1:
            raise ValueError(f"a U-Net has base width and depth of at least 1; got base {base}, depth {depth}")
        channels = [base * 2**level for level in range(depth + 1)]
        self.check = SideCheck(2**depth)
        self.encoder = nn.ModuleList(
            double_convolution(before, after, norm) for before, after in zip([3, *channels[:-1]], channels, strict=True)
        )
        self.down = nn.MaxPool2d(2)
        self.decoder = nn.ModuleList(Up(c, norm) for c in reversed(channels[:-1]))
        self.head = nn.Conv2d(base, classes, 1)
        init_convolutions(self, "fan_in")

    def forward(self, x: Tensor) -> Tensor:
        x = self.check(x)
        skips: list[Tensor] = []
        for level, convs in enumerate(self.encoder):
            x = convs(x if level == 0 else self.down(x))
            skips.append(x)
        for up, skip in zip(self.decoder, skips[-2::-1], strict=True):
            x = up(x, skip)
        logits: Tensor = self.head(x)
        return logits


WIDTHS = (256, 128, 64, 32, 16)
"""Channels of the decoder, deepest step first."""


class Step(nn.Module):
    """A step up, which joins the skip and convolves twice: (n, c, h, w) and (n, s, H, W) -> (n, out, H, W)."""

    def __init__(self, channels: int, out: int, norm: Norm) -> None:
        super().__init__()
        self.convs = double_convolution(channels, out, norm)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        up = F.interpolate(x, size=skip.shape[-2:], mode="nearest")
        joined: Tensor = self.convs(torch.cat((up, skip), dim=1))
        return joined


class EncoderUNet(nn.Module):
    """A U-Net over an encoder: tiles (n, 3, h, w) -> logits (n, classes, h, w).

    Args:
        encoder: images -> features, largest first, as timm's ``features_only`` gives them.
        channels: of each of them.
        reduction: of the size of the first feature against the tile; 1 where they are equal.
        channels_last: features are (n, h, w, c), as those of Swin.
    """

    def __init__(
        self,
        encoder: nn.Module,
        channels: list[int],
        reduction: int,
        *,
        classes: int,
        norm: Norm = "batch",
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.channels_last = channels_last
        *skips, deepest = channels
        widths = [WIDTHS[min(step, len(WIDTHS) - 1)] for step in range(len(skips) + 1)]
        before = [deepest, *widths]
        self.decoder = nn.ModuleList(
            Step(before[step] + skip, widths[step], norm) for step, skip in enumerate(reversed(skips))
        )
        last = before[len(skips)]
        self.full = conv_norm_relu(last, widths[-1], norm) if reduction > 1 else None
        self.head = nn.Conv2d(last if self.full is None else widths[-1], classes, 1)
        for module in (self.decoder, self.full, self.head):
            if module is not None:
                init_convolutions(module, "fan_in")

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]  # here: a stage that needed it later would be sent the images
        features: list[Tensor] = self.encoder(x)
        if self.channels_last:
            features = [feature.permute(0, 3, 1, 2) for feature in features]
        *skips, out = features
        for step, skip in zip(self.decoder, reversed(skips), strict=True):
            out = step(out, skip)
        if self.full is not None:
            out = self.full(F.interpolate(out, size=size, mode="nearest"))
        logits: Tensor = self.head(out)
        return logits


def build_encoder_unet(name: str, *, classes: int, side: int | None = None) -> EncoderUNet:
    """Return the U-Net over timm's ``name``, with random weights.

    Raises:
        ValueError: timm has no such model, or it does not give features at several sizes, or only through hooks.
    """
    from timm.layers import Format
    from timm.models import FeatureHookNet

    check_timm(f"unet:{name}", name)
    encoder: Any = create_timm(name, side, features_only=True)
    reductions = encoder.feature_info.reduction()
    fault = ""
    if isinstance(encoder, FeatureHookNet):
        fault = f"timm takes those of {name} out through hooks, which would run in no stage of a split model"
    elif len(set(reductions)) < 2:
        fault = f"those of {name} are all 1/{reductions[0]} of the tile"
    if fault:
        raise ValueError(
            f"model unet:{name}: a U-Net needs features at several sizes, and {fault}: choose an encoder such as "
            "resnet34, efficientnet_b0 or convnext_tiny"
        )
    return EncoderUNet(
        encoder,
        encoder.feature_info.channels(),
        reductions[0],
        classes=classes,
        channels_last=Format(getattr(encoder, "output_fmt", "NCHW")) is Format.NHWC,
    )


DEPTH = 5
DROPOUT = 0.1
NEGATIVE_SLOPE = 0.01


def cell(in_channels: int, width: int, channels: int, convs: int, norm: Norm) -> nn.Sequential:
    """Return ``convs`` times convolution, channel dropout, norm, leaky ReLU: (n, in_channels, h, w) -> (n, channels,
    h, w). The last convolution gives ``channels``, those before it ``width``."""
    sizes = [in_channels, *[width] * (convs - 1), channels]
    layers = nn.Sequential()
    for before, after in pairwise(sizes):
        layers.append(nn.Conv2d(before, after, 3, padding=1, bias=False))
        layers.append(nn.Dropout2d(DROPOUT))
        layers.append(make_norm(norm, after))
        layers.append(nn.LeakyReLU(NEGATIVE_SLOPE, inplace=True))
    return layers


class UNetGPipe(nn.Module):
    """A U-Net(B, C): tiles (n, 3, h, w) -> logits (n, classes, h, w).

    Args:
        convs: B, the convolutions of each of the eleven cells.
        base: C, channels at full resolution, doubled at each of five levels below; even, as the last cell gives C/2.
        norm: ``instance`` is the published network; it needs tiles of at least 64 px to train.

    Raises:
        ValueError: ``convs`` below 1, ``base`` odd or below 2; in forward: a side that is no multiple of 32 px.
    """

    def __init__(self, convs: int, base: int, *, classes: int, norm: Norm = "instance") -> None:
        super().__init__()
        if convs < 1 or base < 2 or base % 2:
            raise ValueError(f"U-Net(B, C) has B of at least 1 and C even, at least 2; got B {convs}, C {base}")
        channels = [base * 2**level for level in range(DEPTH)]
        deepest = channels[-1]
        self.check = SideCheck(2**DEPTH)
        self.encoder = nn.ModuleList(
            cell(before, after, after, convs, norm) for before, after in zip([3, *channels[:-1]], channels, strict=True)
        )
        self.down = nn.MaxPool2d(2)
        self.bottleneck = cell(deepest, 2 * deepest, deepest, convs, norm)
        self.up = nn.Upsample(scale_factor=2)
        self.decoder = nn.ModuleList(cell(2 * c, c // 2, c // 2, convs, norm) for c in reversed(channels))
        self.head = nn.Conv2d(base // 2, classes, 1, bias=False)
        init_convolutions(self, "fan_in")

    def forward(self, x: Tensor) -> Tensor:
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
