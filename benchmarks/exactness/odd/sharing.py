"""Weights used more than once, or computed from others."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from benchmarks.exactness.odd.blocks import Framed, Head, Trunked, block, framed


class TiedWeights(Trunked):
    """One weight under two names, in the first and in the last block."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.second[0].weight = self.first[0].weight


class ReusedModule(Trunked):
    """A block, norm and all, that is applied three times."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for _ in range(3):
            x = x + self.first(x)
        return self.head(self.second(x))


class SharedNorm(Trunked):
    """One batch norm in two blocks."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.second[1] = self.first[1]


class Siamese(Trunked):
    """Both halves of the image through the same trunk."""

    def forward(self, images: Tensor) -> Tensor:
        left, right = (self.first(self.stem(half)) for half in images.chunk(2, 3))
        return self.head(self.second(left - right.flip(3)))


class TransposedTwin(nn.Module):
    """A decoder whose weight is the encoder's, transposed."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.encoder, self.body, self.head = nn.Conv2d(3, 8, 2, stride=2), block(8, 8), nn.Conv2d(3, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.body(torch.tanh(self.encoder(images)))
        return self.head(F.conv_transpose2d(x, self.encoder.weight, stride=2))


class ListedParameters(nn.Module):
    """Weights in a ``ParameterList`` and scales in a ``ParameterDict``."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.head = block(3, 8, 2), Head(8, classes)
        self.weights = nn.ParameterList(torch.randn(8, 8) * 0.3 for _ in range(4))
        self.scales = nn.ParameterDict({"odd": torch.ones(8, 1, 1), "even": torch.full((8, 1, 1), 0.5)})

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for k, weight in enumerate(self.weights):
            x = torch.tanh(torch.einsum("oc,nchw->nohw", weight, x)) * self.scales["odd" if k % 2 else "even"]
        return self.head(x)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.transpose(0, 1)


def weight_norm_by_hook(classes: int) -> nn.Module:
    """Direction and length of a weight, by the older hook."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return Framed(nn.utils.weight_norm(nn.Conv2d(8, 8, 3, padding=1)), classes)


weight_norm = framed(lambda: parametrizations.weight_norm(nn.Conv2d(8, 8, 3, padding=1)))
spectral_norm = framed(lambda: parametrizations.spectral_norm(nn.Conv2d(8, 8, 3, padding=1)))
spectral_norm_by_hook = framed(lambda: nn.utils.spectral_norm(nn.Conv2d(8, 8, 3, padding=1)))
orthogonal = framed(lambda: parametrizations.orthogonal(nn.Conv2d(8, 8, 1), orthogonal_map="matrix_exp"))


def symmetric(classes: int) -> nn.Module:
    """A parametrization of one's own."""
    convolution = nn.Conv2d(8, 8, 1)
    parametrize.register_parametrization(convolution, "weight", Symmetric())
    return Framed(convolution, classes)


class LowRank(nn.Module):
    """A frozen convolution with a trained low-rank one next to it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1, bias=False), nn.Conv2d(2, 8, 1)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapters(classes: int) -> nn.Module:
    """LoRA: everything is frozen but low-rank branches and the head."""
    model = Framed(nn.Sequential(LowRank(), nn.ReLU(), LowRank()), classes)
    for k in (0, 2, 3):
        model[k].requires_grad_(False)
    return model


class HyperWeights(nn.Module):
    """The image's own features give the weights that it is convolved with."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.body, self.head = block(3, 8, 2), block(8, 8), Head(8, classes)
        self.maker = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8 * 9))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        n, c, h, w = x.shape
        weights: Any = self.maker(x).view(n * c, 1, 3, 3)
        x = F.conv2d(x.reshape(1, n * c, h, w), weights, padding=1, groups=n * c).view(n, c, h, w)
        return self.head(self.body(x))


MODELS = (
    "TiedWeights", "ReusedModule", "SharedNorm", "Siamese", "TransposedTwin", "ListedParameters", "weight_norm",
    "weight_norm_by_hook", "spectral_norm", "spectral_norm_by_hook", "orthogonal", "symmetric", "adapters",
    "HyperWeights",
)  # fmt: skip
"""Names of the factories."""
