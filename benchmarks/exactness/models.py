"""Models that the registry does not have: with auxiliary heads, dropout in many stages, two outputs.

Each takes the number of classes and gives a module for images (n, 3, h, w), as ``--model package.module:factory`` asks.
The registry's ``torchvision:NAME`` have no auxiliary heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models


def googlenet(classes: int) -> nn.Module:
    """torchvision's GoogLeNet with both auxiliary heads, which are outputs in training and nothing in evaluation."""
    return models.GoogLeNet(num_classes=classes, aux_logits=True, init_weights=True)


def inception_v3(classes: int) -> nn.Module:
    """Inception v3 for 299 px and larger: outputs (n, classes) of both heads in training, of the main one otherwise."""
    return models.Inception3(num_classes=classes, aux_logits=True, init_weights=True)


def fcn_resnet50(classes: int) -> nn.Module:
    """FCN: an ordered dict of the logits (n, classes, h, w) of its two heads."""
    return models.segmentation.fcn_resnet50(weights=None, weights_backbone=None, num_classes=classes, aux_loss=True)


def _block(channels: int, out: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU(inplace=True))


class Dropouts(nn.Module):
    """A small U-Net with two long skips and dropout all the way down and up: logits (n, classes, h, w)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.down1 = _block(3, 6)
        self.drop1 = nn.Dropout2d(0.3)
        self.down2 = _block(6, 8, 2)
        self.drop2 = nn.Dropout(0.2)
        self.bottom = _block(8, 8, 2)
        self.drop3 = nn.Dropout(0.2)
        self.up2 = _block(16, 8)
        self.drop4 = nn.Dropout2d(0.2)
        self.up1 = _block(14, 6)
        self.drop5 = nn.Dropout(0.1)
        self.head = nn.Conv2d(6, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.down1(images)
        second = self.down2(self.drop1(first))
        bottom = self.drop3(self.bottom(self.drop2(second)))
        up = self.up2(torch.cat([F.interpolate(bottom, scale_factor=2.0), second], 1))
        up = self.up1(torch.cat([F.interpolate(self.drop4(up), scale_factor=2.0), first], 1))
        logits: Tensor = self.head(self.drop5(up))
        return logits


class TwoOutputs(nn.Module):
    """A classifier with a second head a third of the way, and a parameter that no output depends on."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(_block(3, 6), _block(6, 6), _block(6, 8))
        self.early = nn.Linear(8, classes)
        self.body = nn.Sequential(_block(8, 8, 2), _block(8, 8), _block(8, 12, 2), _block(12, 12), _block(12, 12))
        self.late = nn.Linear(12, classes)
        self.unused = nn.Linear(4, 4)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        stem = self.stem(images)
        early = self.early(stem.mean((2, 3)))
        return {"out": self.late(self.body(stem).mean((2, 3))), "aux": early}
