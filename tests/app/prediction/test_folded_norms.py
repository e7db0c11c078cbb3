"""Batch norms in convolutions: the same values, and left alone where folding would change them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from app.prediction.computation import with_folded_norms
from models.registry import build_model


def settled(module: nn.Module) -> nn.Module:
    """``module`` in evaluation mode, its norms with statistics that change what goes through them."""
    generator = torch.Generator().manual_seed(1)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(generator=generator)
            layer.running_var.uniform_(0.5, 2, generator=generator)
    return module.eval()


def norms(module: nn.Module) -> int:
    return sum(isinstance(layer, nn.BatchNorm2d) for layer in module.modules())


def test_a_model_without_its_norms_gives_the_same():
    module = settled(build_model("unet_w4", classes=2))
    images = torch.rand(2, 3, 64, 64)
    folded = with_folded_norms(module, images[:1])
    assert (norms(module), norms(folded)) == (18, 0)
    with torch.inference_mode():
        torch.testing.assert_close(folded(images), module(images), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(folded(images[:, :, :32]), module(images[:, :, :32]), rtol=1e-4, atol=1e-5)


class SharedConvolution(nn.Module):
    """One convolution before two norms: its weights cannot take over both."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norms[0](self.convolution(x)) + self.norms[1](self.convolution(x + 1))


class Branching(nn.Sequential):
    """What it does depends on the values that it sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.mean() > 0 else x


@pytest.mark.parametrize("module", [SharedConvolution(), Branching(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))])
def test_what_cannot_be_folded_stays_as_it_is(module):
    assert with_folded_norms(settled(module), torch.rand(1, 3, 16, 16)) is module
