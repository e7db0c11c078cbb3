"""U-Net over any encoder of timm that gives features at several sizes: every pixel of the tile gets logits.

Takes float (n, in_channels, h, w), gives logits (n, classes, h, w). Ronneberger et al. 2015 with the contracting half
replaced by a classifier's body, as has become usual (Iglovikov & Shvets 2018, TernausNet): each step up takes the size
of the skip it joins, so that sides need not be multiples of anything the encoder does not ask for itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.blocks import Norm, conv_norm_relu, init_convolutions
from models.external import check_timm, create_timm

WIDTHS = (256, 128, 64, 32, 16)
"""Channels of the decoder, deepest step first."""


class Step(nn.Module):
    """A step up to the size of the skip, which it joins and convolves twice.

    Takes (n, c, h, w) and the skip (n, s, H, W), gives (n, out, H, W).
    """

    def __init__(self, channels: int, out: int, norm: Norm) -> None:
        super().__init__()
        self.convs = nn.Sequential(conv_norm_relu(channels, out, norm), conv_norm_relu(out, out, norm))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Return the joined map (n, out, H, W)."""
        up = F.interpolate(x, size=skip.shape[-2:], mode="nearest")
        joined: Tensor = self.convs(torch.cat((up, skip), dim=1))
        return joined


class EncoderUNet(nn.Module):
    """A U-Net over an encoder: tiles (n, in_channels, h, w) -> logits (n, classes, h, w).

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
        """Return logits (n, classes, h, w)."""
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


def build_encoder_unet(
    name: str, *, classes: int, norm: Norm = "batch", in_channels: int = 3, side: int | None = None
) -> EncoderUNet:
    """Return the U-Net over timm's ``name``, with random weights.

    Args:
        norm: of the decoder.
        side: of the tiles, px, for encoders that are made for one size.

    Raises:
        ValueError: timm has no such model, or it does not give features at several sizes, or only through hooks.
    """
    from timm.layers import Format
    from timm.models import FeatureHookNet

    check_timm(f"unet:{name}", name)
    encoder: Any = create_timm(name, side, features_only=True, in_chans=in_channels)
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
        norm=norm,
        channels_last=Format(getattr(encoder, "output_fmt", "NCHW")) is Format.NHWC,
    )
