"""Blocks of known networks are those their papers draw."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parallel.graph.blocks import Block, find_blocks, find_modules
from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph
from parallel.trace.trace import trace
from tests.helpers.graph_pictures import traced


def scopes(blocks: list[Block]) -> list[str]:
    return [".".join(block.scope) for block in blocks]


def covered(graph: LayerGraph, blocks: list[Block]) -> bool:
    """All layers but the input and the output, each once, in order."""
    places = [place for block in blocks for place in range(block.start, block.stop)]
    return places == list(range(1, len(graph.layers) - 1))


def test_resnet50_is_a_stem_sixteen_bottlenecks_and_a_head() -> None:
    graph = traced("torchvision:resnet50")
    blocks = find_blocks(graph)
    bottlenecks = [f"layer{k}.{n}" for k, count in ((1, 3), (2, 4), (3, 6), (4, 3)) for n in range(count)]
    assert scopes(blocks) == ["", *bottlenecks, ""]
    assert [layer.name for layer in graph.layers[blocks[0].start : blocks[0].stop]] == [
        "conv1",
        "bn1",
        "relu",
        "maxpool",
    ]
    assert graph.layers[blocks[-1].start].name == "avgpool"
    # Each ends with the activation after its addition.
    assert all(graph.layers[block.stop - 1].name.endswith("relu_2") for block in blocks[1:-1])
    assert covered(graph, blocks)
    assert scopes(find_modules(graph)) == ["", "layer1", "layer2", "layer3", "layer4", ""]


@pytest.mark.long
def test_densenet_is_cut_into_its_dense_layers() -> None:
    graph = traced("torchvision:densenet121")
    found = scopes(find_blocks(graph))
    for block, count in enumerate((6, 12, 24, 16), 1):
        names = [f"features.denseblock{block}.denselayer{n}" for n in range(1, count + 1)]
        assert [name for name in found if name.startswith(f"features.denseblock{block}.")] == names
    assert [name for name in found if "transition" in name] == [f"features.transition{k}" for k in (1, 2, 3)]
    assert len(found) == 58 + 3 + 2
    assert len(find_modules(graph)) == 1 + 4 + 3 + 1


def test_unet_is_cut_into_levels_where_fewest_bytes_cross() -> None:
    graph = traced("unet")
    blocks = find_blocks(graph)
    assert scopes(blocks) == [*(f"encoder.{k}" for k in range(5)), *(f"decoder.{k}" for k in range(4)), ""]
    # Before pooling only the skip crosses, after it the pooled value too.
    assert [graph.layers[block.start].name for block in blocks[1:3]] == ["down", "down_1"]
    assert scopes(find_modules(graph)) == ["encoder", "decoder", ""]


def test_gpipe_unet_has_eleven_cells() -> None:
    found = scopes(find_blocks(traced("unet(5,64)")))
    assert found == [*(f"encoder.{k}" for k in range(5)), "bottleneck", *(f"decoder.{k}" for k in range(5)), ""]


def test_amoebanet_is_cut_into_cells_though_two_values_live() -> None:
    graph = traced("amoebanet(3,64)")
    assert scopes(find_blocks(graph)) == ["stem", *(f"cells.{k}" for k in range(7)), ""]
    assert scopes(find_modules(graph)) == ["stem", "cells", ""]


@pytest.mark.long
def test_inception_modules_stay_whole() -> None:
    graph = traced("torchvision:inception_v3")
    found = scopes(find_blocks(graph))
    assert [name for name in found if name.startswith("Mixed")] == [
        f"Mixed_{name}" for name in ("5b", "5c", "5d", "6a", "6b", "6c", "6d", "6e", "7a", "7b", "7c")
    ]
    assert len(found) == 5 + 11 + 1


def test_plain_chain_is_cut_before_each_convolution() -> None:
    graph = traced("torchvision:vgg16_bn")
    kinds = [[layer.kind for layer in graph.layers[b.start : b.stop]] for b in find_blocks(graph)]
    assert len(kinds) == 16
    assert kinds[:2] == [["Conv2d", "BatchNorm2d", "ReLU"], ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d"]]
    assert kinds[-3:] == [["Linear", "ReLU", "Dropout"], ["Linear", "ReLU", "Dropout"], ["Linear"]]


class OneForward(nn.Module):
    """Residuals and branches without a module around any."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs[0](x)
        x = torch.relu(x + self.convs[2](torch.relu(self.convs[1](x))))
        x = torch.cat((self.convs[3](x), self.convs[4](x)), 1)[:, :4]
        return self.convs[5](x)


def test_residuals_and_branches_need_no_modules() -> None:
    graph = trace(OneForward(), (2, 4, 8, 8)).graph
    held = [{layer.module for layer in graph.layers[b.start : b.stop] if layer.module} for b in find_blocks(graph)]
    assert held == [{"convs.0"}, {"convs.1", "convs.2"}, {"convs.3", "convs.4"}, {"convs.5"}]


def test_graph_that_knows_no_flops() -> None:
    kinds = [INPUT, "add", "add", "add", OUTPUT]
    graph = LayerGraph(
        tuple(Layer(f"v{k}", kind, (f"v{k - 1}",) if k else (), output_bytes=8) for k, kind in enumerate(kinds))
    )
    assert find_blocks(graph) == [Block(1, 2), Block(2, 3), Block(3, 4)]
    assert find_blocks(LayerGraph((Layer("x", INPUT, ()), Layer("y", OUTPUT, ("x",))))) == []
