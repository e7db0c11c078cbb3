"""Parts that several models share: norm factory, convolution-norm-ReLU, initialisation, tile size check.

Takes channel counts and the kind of norm; gives plain torch modules that ``torch.fx.symbolic_trace`` can follow.
Norms: BatchNorm (Ioffe & Szegedy 2015), GroupNorm (Wu & He 2018), InstanceNorm without parameters (Ulyanov 2016),
LayerNorm over the channels of a px (Ba et al. 2016, as in ConvNeXt, Liu et al. 2022).
Initialisation: He et al. 2015.
"""

from __future__ import annotations

import math
from typing import Literal, TypeVar, get_args

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["batch", "group", "instance", "frozen", "layer"]
"""Kind of normalisation. All but batch look at one tile at a time, so no result depends on the microbatch size; frozen
and layer look at one px at a time, so that little has to be stored of a tile that is computed box by box."""

MAX_GROUPS = 32
"""GroupNorm's default in its paper, and what published GroupNorm weights use."""


def group_count(channels: int) -> int:
    """Return the number of groups: the largest common divisor with 32 that leaves two channels or more in a group.

    One channel per group would be instance norm, which a 1 x 1 px map turns into zeros.
    """
    return min(math.gcd(MAX_GROUPS, channels), max(1, channels // 2))


M = TypeVar("M", bound=nn.Module)


def stay_in_evaluation(module: M, mode: bool = True) -> M:
    """``train`` of a module that never is in training."""
    return nn.Module.train(module, False)


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm by its running statistics in training, too: scale and shift are trained, the statistics stay."""

    train = stay_in_evaluation

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.train(False)


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of each pixel of (n, c, h, w)."""

    def forward(self, x: Tensor) -> Tensor:
        channels_last = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return channels_last.permute(0, 3, 1, 2)


def make_norm(norm: Norm, channels: int) -> nn.Module:
    """Return a normalisation of (n, channels, h, w).

    Raises:
        ValueError: ``norm`` is none of them.
    """
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "group":
        return nn.GroupNorm(group_count(channels), channels)
    if norm == "instance":
        return nn.InstanceNorm2d(channels)
    if norm == "frozen":
        return FrozenBatchNorm2d(channels)
    if norm == "layer":
        return ChannelNorm(channels)
    raise ValueError(f"norm must be one of {', '.join(get_args(Norm))}; got {norm!r}")


def conv_norm_relu(in_channels: int, channels: int, norm: Norm, *, bias: bool = False) -> nn.Sequential:
    """Return 3 x 3 convolution that keeps the size, norm, ReLU: (n, in_channels, h, w) -> (n, channels, h, w)."""
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, 3, padding=1, bias=bias), make_norm(norm, channels), nn.ReLU(inplace=True)
    )


def init_convolutions(model: nn.Module, mode: Literal["fan_in", "fan_out"]) -> None:
    """Draw every convolution of ``model`` from a normal of variance 2 / fan (He et al. 2015), biases zero.

    Args:
        mode: ``fan_in`` keeps the variance of activations, ``fan_out`` that of gradients. A network that ends in a
            convolution wants the first: with few classes the second makes its first logits huge.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def check_sides(x: Tensor, multiple: int) -> Tensor:
    """Return ``x`` itself, when both sides are multiples of ``multiple`` px.

    Raises:
        ValueError: a side is not; halving it and doubling it again would give another size than the skip has.
    """
    height, width = x.shape[-2:]
    if height % multiple or width % multiple:
        below = max(multiple, min(height, width) // multiple * multiple)
        raise ValueError(
            f"both sides of a tile must be multiples of {multiple} px for this U-Net, which halves them "
            f"{multiple.bit_length() - 1} times; got {width} x {height} px: use --tile {below} or {below + multiple}"
        )
    return x


# A graph node of its own: its branch depends on the size, which symbolic tracing cannot follow.
torch.fx.wrap("check_sides")


class SideCheck(nn.Module):
    """A layer that passes (n, c, h, w) on after ``check_sides``; ``multiple`` is a power of two."""

    def __init__(self, multiple: int) -> None:
        super().__init__()
        self.multiple = multiple

    def forward(self, x: Tensor) -> Tensor:
        return check_sides(x, self.multiple)
