"""The models of the table: classifiers of torchvision, and U-Nets over encoders of timm.

Takes nothing; gives entries as plain values, the giants last. Of torchvision there are all, and two of them again with
the auxiliary heads that the registry leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

ENCODERS = (
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "seresnet50",
    "densenet121",
    "efficientnet_b0",
    "mobilenetv3_large_100",
    "regnety_004",
    "vgg16_bn",
    "inception_v3",
    "convnext_tiny",
    "pvt_v2_b0",
    "mobilevit_s",
    "swin_tiny_patch4_window7_224",
)
"""Of the U-Nets, each of another family."""

GIANTS = ("convnext_large", "vit_l_32", "vit_l_16", "vit_h_14", "regnet_y_128gf")
"""More than 150 million parameters: in float32, and last."""


STOCHASTIC_DEPTH = ("convnext", "efficientnet_b", "maxvit", "swin")
"""They leave out blocks tile by tile: with few tiles a block may be left out for all, and its gradients be zero."""

WITH_HEADS = ("benchmarks.exactness.models:googlenet", "benchmarks.model_zoo.heads:inception_v3")


@dataclass(frozen=True)
class Entry:
    """A model of the table.

    Attributes:
        model: as for ``--model``.
        tile: px; the smallest that the model takes and that leaves batch norm several values a channel.
        tiles: of a microbatch.
    """

    model: str
    tile: int
    tiles: int
    dtype: Literal["float64", "float32"] = "float64"


def all_entries() -> Iterator[Entry]:
    """Of the whole table."""
    from torchvision import models

    names = models.list_models(module=models)
    for name in sorted(names, key=lambda name: GIANTS.index(name) + 1 if name in GIANTS else 0):
        if name == GIANTS[0]:
            yield from map(_unet, ENCODERS)
            yield Entry(WITH_HEADS[0], 64, 2)
            yield Entry(WITH_HEADS[1], 299, 4)  # the least; the auxiliary head ends in a norm over 1 x 1 px
        yield _classifier(name)


def _unet(encoder: str) -> Entry:
    if encoder.startswith("swin"):
        return Entry(f"unet:{encoder}", 224, 1)
    return Entry(f"unet:{encoder}", 96 if encoder == "inception_v3" else 64, 2)


def _classifier(name: str) -> Entry:
    tile, tiles = 64, 2
    if name.startswith(("vit", "maxvit")):  # they take no other
        tile, tiles = 224, 1
    elif name == "inception_v3":
        tile = 75
    if name.startswith(STOCHASTIC_DEPTH):
        tiles = 4
    return Entry(f"torchvision:{name}", tile, tiles, "float32" if name in GIANTS else "float64")
