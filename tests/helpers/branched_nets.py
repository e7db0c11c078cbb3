"""Models with branches: small ones with what makes sharing them hard, and those that the field knows, as small as they
go."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from models.amoebanet import AmoebaNet
from tests.helpers.small_nets import batch_of, pixel_loss


def unit(channels_in: int, channels: int, kernel: int = 1, **more: Any) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels, kernel, padding=kernel // 2, bias=False, **more)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


class Module(nn.Module):
    """An Inception module in small, with a branch that branches again, and one without parameters."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.point = unit(channels, 4)
        self.wide = nn.Sequential(unit(channels, 3), unit(3, 6, 3))
        self.before, self.rows, self.columns = unit(channels, 4), unit(4, 3, 3), unit(4, 5, 3)
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), unit(channels, 2))
        self.mean = nn.AvgPool2d(3, 1, 1)
        self.channels = 4 + 6 + 3 + 5 + 2 + channels

    def forward(self, x: Tensor) -> Tensor:
        before = self.before(x)
        both = torch.cat((self.rows(before), self.columns(before)), 1)
        return torch.cat((self.point(x), self.wide(x), both, self.pool(x), self.mean(x)), 1)


class Inception(nn.Module):
    """Shared layers with norms and dropout around two Inception modules, a skip past both, a parameter of no layer;
    logits (n, 3, h, w)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 6, 3)
        self.first = Module(6)
        self.between = nn.Sequential(nn.Dropout2d(0.3), unit(self.first.channels, 6))
        self.second = Module(6)
        self.late = nn.Dropout(0.2)
        self.head = nn.Conv2d(self.second.channels + 6, 3, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        stem = self.stem(images)
        second = self.second(self.between(self.first(stem)))
        logits: Tensor = self.head(self.late(torch.cat((second, stem), 1)))
        return logits


class Flattened(Inception):
    """Inception, and a layer of all that it computes of a sample; logits (n, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3 * 12 * 12, 3)

    def forward(self, images: Tensor) -> Tensor:
        maps = super().forward(images)
        logits: Tensor = self.last(maps.view(maps.size(0), -1))
        return logits


class Segmenter(nn.Module):
    """DeepLabV3's ASPP and head over a small encoder; logits (n, 3, h, w)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(unit(3, 8, 3), unit(8, 12, 3, stride=2))
        self.head = torchvision.models.segmentation.deeplabv3.DeepLabHead(12, 3, atrous_rates=(1, 2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return F.interpolate(self.head(self.encoder(images)), size=images.shape[-2:], mode="bilinear")


def of_tiles(logits: Any, targets: Tensor) -> Tensor:
    """The loss of tiles by the class of their first pixel; of GoogLeNet and Inception v3 with what their early heads
    give."""
    labels = targets[:, 0, 0]
    if isinstance(logits, Tensor):
        return F.cross_entropy(logits, labels)
    return sum(F.cross_entropy(each, labels) * (1.0 if k == 0 else 0.3) for k, each in enumerate(logits))


def google(**more: Any) -> nn.Module:
    return torchvision.models.googlenet(num_classes=3, init_weights=False, **more)


def third(**more: Any) -> nn.Module:
    return torchvision.models.inception_v3(num_classes=3, init_weights=False, **more)


BRANCHED_NETS = {
    "inception": (Inception, pixel_loss),
    "flattened": (Flattened, of_tiles),
    "aspp": (Segmenter, pixel_loss),
    "amoebanet": (lambda: AmoebaNet(3, 32, classes=3), of_tiles),
    "googlenet": (lambda: google(aux_logits=False), of_tiles),
    "inception-v3": (lambda: third(aux_logits=False), of_tiles),
    "googlenet-heads": (lambda: google(aux_logits=True), of_tiles),
}
SIDES = {"amoebanet": 64, "googlenet": 64, "inception-v3": 80, "googlenet-heads": 64}
"""Sides of tiles, px; 12 of others."""


def steps_for(name: str, sizes: list[int], steps: int = 2) -> list[Any]:
    """One step of deep networks: where batch norm sees few values, an update enlarges rounding beyond all bounds."""
    count = 1 if name in SIDES else steps
    return [batch_of(sizes, SIDES.get(name, 12), 100 + step, torch.float64) for step in range(count)]
