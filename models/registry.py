"""Models by name.

Takes what ``--model`` takes: a name of ours, ``torchvision:NAME``, ``timm:NAME``, ``unet:TIMM_NAME`` (a U-Net over that
encoder), ``smp:DECODER(ENCODER)`` or ``package.module:factory``; gives a plain ``nn.Module`` from float (n,
in_channels, h, w) to logits: (n, classes), or (n, classes, h, w) for U-Nets, segmentation-models-pytorch and
torchvision's segmentation networks. To add a model, write its file and give it a line in ``OURS``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any

from torch import nn

from models.amoebanet import AmoebaNet
from models.blocks import Norm
from models.external import (
    build_from_factory,
    build_smp,
    build_timm,
    build_torchvision,
    check_foreign,
    freeze_norms,
    replace_norm,
)
from models.heads import Head, replace_pool
from models.resnet import BLOCKS_BY_DEPTH, ResNet
from models.resnet_v2 import ResNetV2
from models.unet import UNet, build_encoder_unet
from models.unet_gpipe import UNetGPipe

OURS: dict[str, tuple[Callable[..., nn.Module], tuple[str, ...]]] = {
    r"resnet(\d+)": (ResNet, tuple(f"resnet{depth}" for depth in BLOCKS_BY_DEPTH)),
    r"resnet(\d+)_v2": (ResNetV2, ("resnet110_v2", "resnet164_v2", "resnet1001_v2")),
    r"unet": (UNet, ("unet",)),
    r"unet_w(\d+)": (lambda base, **common: UNet(base=base, **common), ("unet_w16", "unet_w32")),
    r"unet\((\d+), *(\d+)\)": (UNetGPipe, ("unet(5,64)",)),
    r"amoebanet\((\d+), *(\d+)\)": (AmoebaNet, ("amoebanet(6,190)", "amoebanet(18,256)")),
}
"""Pattern of the name -> (constructor, which takes its numbers, classes, norm and in_channels, names to show)."""

ELSEWHERE = ("unet:TIMM_NAME", "smp:DECODER(ENCODER)", "torchvision:NAME", "timm:NAME", "package.module:factory")


def model_names() -> tuple[str, ...]:
    """Return names of our own models; numbers in those of ResNet-v2 (9n+2), unet_w, unet(B,C), amoebanet(L,D) are
    free."""
    return tuple(name for _, shown in OURS.values() for name in shown)


def build_model(
    name: str,
    *,
    classes: int,
    norm: Norm = "batch",
    head: Head = "average",
    in_channels: int = 3,
    side: int | None = None,
) -> nn.Module:
    """Return the model called ``name`` with random weights, on the current default device.

    Args:
        name: one of ``model_names()``, or as in ``ELSEWHERE``: ``unet:TIMM_NAME``, ``smp:DECODER(ENCODER)``,
            ``torchvision:NAME``, ``timm:NAME``, ``package.module:factory``.
        classes: of the logits; 1 gives a single logit.
        norm: in our own models any; in others ``batch`` keeps what they have, ``group`` and ``layer`` replace their
            BatchNorm, and ``frozen`` keeps its running statistics as they are.
        head: what pools the last map of a classifier.
        in_channels: of the input; 3 for RGB.
        side: of the tiles, px, for models of timm and torchvision that are made for one size; None: their own.

    Raises:
        ValueError: unknown name (close ones are named), or a setting the model does not take.
    """
    if classes < 1:
        raise ValueError(f"a model needs at least one class; got classes {classes}")
    model = _ours(name, classes=classes, norm=norm, in_channels=in_channels)
    if model is None:
        model = _foreign(name, classes, norm, in_channels, side)
    replace_pool(model, name, head, in_channels)
    return model


def _ours(name: str, **settings: Any) -> nn.Module | None:
    for pattern, (build, _) in OURS.items():
        if match := re.fullmatch(pattern, name):
            return build(*(int(number) for number in match.groups()), **settings)
    return None


def _foreign(name: str, classes: int, norm: Norm, in_channels: int, side: int | None) -> nn.Module:
    if ":" not in name:
        matches = difflib.get_close_matches(name, model_names(), n=3)
        hint = f"did you mean {' or '.join(matches)}? " if matches else ""
        raise ValueError(f"unknown model {name!r}; {hint}known are {', '.join((*model_names(), *ELSEWHERE))}")
    source, _, rest = name.partition(":")
    check_foreign(name, norm=norm, in_channels=in_channels, any_channels=source in ("timm", "unet", "smp"))
    if source == "torchvision":
        model = build_torchvision(rest, classes=classes, side=side)
    elif source == "timm":
        model = build_timm(rest, classes=classes, in_channels=in_channels, side=side)
    elif source == "smp":
        model = build_smp(rest, classes=classes, in_channels=in_channels)
    elif source == "unet":
        model = build_encoder_unet(rest, classes=classes, in_channels=in_channels, side=side)
    else:
        model = build_from_factory(name, classes=classes)
    if norm in ("group", "layer"):
        replace_norm(model, name, norm)
    if norm == "frozen":
        freeze_norms(model, name)
    return model
