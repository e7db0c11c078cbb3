from __future__ import annotations

import pytest
import torch
import torch.fx
from torch import nn

from models.resnet_v2 import ResNetV2
from tests.helpers.lanes import long_where
from tests.helpers.models import parameter_count


def keras_count(depth: int, classes: int) -> int:
    """Trainable parameters of the Keras example, summed from its description layer by layer."""

    def conv(before: int, after: int, kernel: int) -> int:
        return (before * kernel**2 + 1) * after

    total, channels, width = conv(3, 16, 3) + 2 * 16, 16, 16
    for resolution in range(3):
        wide = 4 * width if resolution == 0 else 2 * width
        for block in range((depth - 2) // 9):
            if block or resolution:
                total += 2 * channels
            total += conv(channels, width, 1) + 2 * width + conv(width, width, 3) + 2 * width + conv(width, wide, 1)
            if block == 0:
                total += conv(channels, wide, 1)
            channels = wide
        width = wide
    return total + 2 * channels + (channels + 1) * classes


@pytest.mark.parametrize("depth", long_where([20, 56, 1001], 1001))
def test_parameter_count_is_that_of_the_keras_example(depth: int) -> None:
    with torch.device("meta"):
        assert parameter_count(ResNetV2(depth, classes=10)) == keras_count(depth, 10)


@pytest.mark.parametrize(("depth", "millions"), long_where([(56, 1.66), (110, 3.30), (1001, 30.35)], (1001, 30.35)))
def test_parameter_counts_of_the_networks_gems_trains(depth: int, millions: float) -> None:
    with torch.device("meta"):
        assert parameter_count(ResNetV2(depth, classes=10)) / 1e6 == pytest.approx(millions, abs=0.005)


@pytest.mark.parametrize("depth", [20, 110])
def test_depth_is_the_number_of_layers_on_the_longest_path(depth: int) -> None:
    model = ResNetV2(depth, classes=2)
    shortcuts = sum(name.endswith("shortcut") for name, _ in model.named_modules() if model.get_submodule(name))
    layers = sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules())
    assert layers - 3 == depth
    assert shortcuts == 3


def test_identity_shortcuts_let_the_input_of_a_block_through() -> None:
    block = ResNetV2(20, classes=2).layers[1]
    nn.init.zeros_(block.expand.conv.weight)
    x = torch.randn(2, 64, 5, 7)
    torch.testing.assert_close(block(x), x, rtol=0, atol=0)


@pytest.mark.parametrize("size", [(8, 8), (17, 30), (33, 21)])
def test_any_tile_size_gives_one_row_of_logits_per_tile(size: tuple[int, int]) -> None:
    assert ResNetV2(20, classes=3)(torch.rand(2, 3, *size)).shape == (2, 3)


def test_resolution_is_halved_twice() -> None:
    model = ResNetV2(20, classes=2)
    assert model.layers(model.stem(torch.rand(1, 3, 32, 64))).shape == (1, 256, 8, 16)


@pytest.mark.parametrize(("depth", "hint"), [(111, "110 and 119"), (2, "11 and 20"), (0, "11 and 20")])
def test_other_depth_is_refused_with_the_nearest(depth: int, hint: str) -> None:
    with pytest.raises(ValueError, match=f"9n\\+2.*got {depth}: the nearest are {hint}"):
        ResNetV2(depth, classes=2)
