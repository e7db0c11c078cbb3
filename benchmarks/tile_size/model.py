"""The network of the tile size benchmark: a narrow ResNet that a processor trains in minutes.

Takes float (n, 3, h, w), gives logits (n, classes). The first layer turns 16 x 16 px into 16 numbers, as a vision
transformer's does (Dosovitskiy et al. 2021); four residual blocks (He et al. 2015) follow, each at half the
resolution of the one before, so that the last one sees more than 1,000 px. Global average pooling takes any tile
size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.blocks import init_convolutions, make_norm
from models.resnet import BasicBlock

STEM_PX = 16
WIDTHS = (16, 32, 32, 32)


class CoarseResNet(nn.Module):
    """Instance norm: a slide's own tint is no feature, and no tile depends on the others of its batch."""

    def __init__(self, *, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTHS[0], STEM_PX, STEM_PX, bias=False)
        self.norm = make_norm("instance", WIDTHS[0])
        self.blocks = nn.Sequential()
        channels = WIDTHS[0]
        for i, width in enumerate(WIDTHS):
            self.blocks.append(BasicBlock(channels, width, 1 if i == 0 else 2, "instance"))
            channels = width
        self.head = nn.Linear(channels, classes)
        init_convolutions(self, "fan_out")

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.norm(self.stem(x))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits
