from __future__ import annotations

import pytest
import torch
import torch.fx
from torch import nn

from models.unet import UNet


def test_has_the_papers_23_convolutional_layers_and_widths() -> None:
    """Ronneberger et al. 2015, section 2: "In total the network has 23 convolutional layers"."""
    with torch.device("meta"):
        model = UNet(classes=2)
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.ConvTranspose2d)]
    assert len(convs) == 23
    assert max(conv.out_channels for conv in convs) == 1024


@pytest.mark.parametrize("size", [(16, 16), (32, 48), (80, 16)])
def test_every_pixel_gets_logits(size: tuple[int, int]) -> None:
    assert UNet(classes=3, base=4)(torch.rand(2, 3, *size)).shape == (2, 3, *size)


def test_depth_sets_the_multiple_of_the_sides() -> None:
    model = UNet(classes=2, base=2, depth=2)
    assert model(torch.rand(1, 3, 20, 12)).shape == (1, 2, 20, 12)
    with pytest.raises(ValueError, match=r"multiples of 4 px .* 2 times; got 18 x 20 px"):
        model(torch.rand(1, 3, 20, 18))


def test_skips_carry_full_resolution_to_the_output() -> None:
    """With the way through the depth cut, the logits still follow the input px by px."""
    torch.manual_seed(0)
    model = UNet(classes=1, base=4, norm="group")
    nn.init.zeros_(model.decoder[-1].up.weight)
    x = torch.rand(1, 3, 32, 32, requires_grad=True)
    model(x)[0, 0, 16, 16].backward()
    assert x.grad is not None
    assert x.grad[0, :, 16, 16].abs().sum() > 0


def test_symbolic_trace_computes_the_same_and_keeps_the_check() -> None:
    model = UNet(classes=2, base=4).eval()
    traced = torch.fx.symbolic_trace(model)
    x = torch.rand(1, 3, 32, 16)
    torch.testing.assert_close(traced(x), model(x))
    with pytest.raises(ValueError, match="got 20 x 16 px"):
        traced(torch.rand(1, 3, 16, 20))


@pytest.mark.parametrize(("base", "depth"), [(0, 4), (8, 0)])
def test_empty_networks_are_refused(base: int, depth: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1; got base {base}, depth {depth}"):
        UNet(classes=2, base=base, depth=depth)


def test_first_logits_are_of_order_one() -> None:
    """With fan-out initialisation those of two classes had a standard deviation of 8, and the loss started at 7."""
    torch.manual_seed(0)
    logits = UNet(classes=2)(torch.rand(1, 3, 32, 32))
    assert 0.3 < logits.std().item() < 3
