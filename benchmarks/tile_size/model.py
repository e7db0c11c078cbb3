"""Networks of the tile size benchmark: narrow ResNets that a processor trains in minutes.

Take float (n, 3, h, w) of any size, give logits (n, classes). The first layer turns square patches into 16 numbers, as
a vision transformer's does (Dosovitskiy et al. 2021); residual blocks (He et al. 2015) follow, then an average over all
positions. The first norm is instance norm: a slide's own tint is no feature, and no tile depends on the others of its
batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.blocks import Norm, init_convolutions, make_norm
from models.resnet import BasicBlock

STEM = 16
"""Channels of the first layer."""


class NarrowResNet(nn.Module):
    """Blocks of ``widths`` channels behind patches of ``stem_px``, each but the first at half the resolution."""

    def __init__(self, stem_px: int, widths: tuple[int, ...], norm: Norm, head: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, STEM, stem_px, stem_px, bias=False)
        self.norm = make_norm("instance", STEM)
        channels = (STEM, *widths)
        strides = (1, *[2] * (len(widths) - 1))
        self.blocks = nn.Sequential(*map(BasicBlock, channels, widths, strides, [norm] * len(widths)))
        self.head = head
        init_convolutions(self, "fan_out")

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.norm(self.stem(x))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def coarse(*, classes: int) -> NarrowResNet:
    """Return a network whose last block sees more than 1,000 px."""
    return NarrowResNet(16, (16, 32, 32, 32), "instance", nn.Linear(32, classes))


def joining(*, classes: int) -> NarrowResNet:
    """Return a network whose last layers join what it saw anywhere: they can relate how much there is of one kind of
    tissue to how much there is of another."""
    head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, classes))
    return NarrowResNet(8, (16, 24, 32), "group", head)
