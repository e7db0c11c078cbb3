"""The network of the slide context benchmark: a narrow ResNet whose last layer joins what it saw anywhere.

Takes float (n, 3, h, w) of any size, gives logits (n, classes). The first layer turns 8 x 8 px into 16 numbers, as a
vision transformer's does (Dosovitskiy et al. 2021); three residual blocks (He et al. 2015) follow, each but the first
at half the resolution; the averages over all positions go through two linear layers. So it can tell how much of one
kind of tissue there is in its tile, and relate that to how much there is of another.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.blocks import init_convolutions, make_norm
from models.resnet import BasicBlock

STEM_PX = 8
WIDTHS = (16, 24, 32)
HIDDEN = 64


class JoiningResNet(nn.Module):
    """Instance norm first: the tint of a slide is no feature. No tile depends on the others of its batch."""

    def __init__(self, *, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTHS[0], STEM_PX, STEM_PX, bias=False)
        self.norm = make_norm("instance", WIDTHS[0])
        self.blocks = nn.Sequential()
        channels = WIDTHS[0]
        for i, width in enumerate(WIDTHS):
            self.blocks.append(BasicBlock(channels, width, 1 if i == 0 else 2, "group"))
            channels = width
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.join = nn.Sequential(nn.Linear(channels, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes))
        init_convolutions(self, "fan_out")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, classes)."""
        x = self.blocks(torch.relu(self.norm(self.stem(x))))
        logits: Tensor = self.join(torch.flatten(self.avgpool(x), 1))
        return logits
