"""ResNets against torchvision's, and ResNet-v2 as the Keras example has it."""

import pytest
import torch
import torch.fx
import torchvision
from torch import nn

from models.resnet import BLOCKS_BY_DEPTH, ResNet, ResNetV2


@pytest.mark.parametrize("depth", BLOCKS_BY_DEPTH)
def test_parameters_are_torchvisions_in_name_shape_and_order(depth):
    with torch.device("meta"):
        ours, theirs = ResNet(depth, classes=1000), torchvision.models.get_model(f"resnet{depth}", weights=None)
    ours, theirs = ([(k, v.shape) for k, v in model.state_dict().items()] for model in (ours, theirs))
    assert ours == theirs


@pytest.mark.parametrize("depth", [18, 50])
def test_same_weights_give_torchvisions_logits_and_gradients(depth):
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


@pytest.mark.parametrize("depth", [20, 110])
def test_depth_is_the_number_of_layers_on_the_longest_path(depth):
    model = ResNetV2(depth, classes=2)
    assert sum(name.endswith("shortcut") for name, _ in model.named_modules() if model.get_submodule(name)) == 3
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) - 3 == depth
    assert model.layers(model.stem(torch.rand(1, 3, 32, 64))).shape == (1, 256, 8, 16), "resolution is halved twice"


def test_identity_shortcuts_let_the_input_of_a_block_through():
    block = ResNetV2(20, classes=2).layers[1]
    nn.init.zeros_(block.expand.conv.weight)
    x = torch.randn(2, 64, 5, 7)
    torch.testing.assert_close(block(x), x, rtol=0, atol=0)
