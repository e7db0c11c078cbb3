from __future__ import annotations

import pytest
import torch
import torch.fx
import torchvision

from models.resnet import BLOCKS_BY_DEPTH, ResNet
from tests.helpers.models import parameter_count

# torchvision's documentation, "Num params" of each ResNet.
PUBLISHED = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


@pytest.mark.parametrize("depth", BLOCKS_BY_DEPTH)
def test_parameters_are_torchvisions_in_number_name_shape_and_order(depth: int) -> None:
    with torch.device("meta"):
        ours = ResNet(depth, classes=1000)
        theirs = torchvision.models.get_model(f"resnet{depth}", weights=None)
    assert parameter_count(ours) == PUBLISHED[depth]
    assert [(k, v.shape) for k, v in ours.state_dict().items()] == [
        (k, v.shape) for k, v in theirs.state_dict().items()
    ]


@pytest.mark.parametrize("depth", [18, 50])
def test_same_weights_give_torchvisions_logits_and_gradients(depth: int) -> None:
    torch.manual_seed(0)
    theirs = torchvision.models.get_model(f"resnet{depth}", weights=None, num_classes=5).double()
    ours = ResNet(depth, classes=5).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.rand(2, 3, 33, 48, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    for model in (ours, theirs):
        model(x).square().sum().backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-9, atol=1e-9)
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, theirs.get_buffer(name))


@pytest.mark.parametrize("size", [(33, 33), (64, 100), (129, 65)])
def test_any_tile_size_gives_one_row_of_logits_per_tile(size: tuple[int, int]) -> None:
    assert ResNet(18, classes=3)(torch.rand(2, 3, *size)).shape == (2, 3)


def test_other_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="18, 34, 50, 101, 152; got 51"):
        ResNet(51, classes=2)
