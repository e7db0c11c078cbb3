"""Blocks of known networks are those their papers draw; branches, and the members that they are assigned to."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import Tensor, nn

from models.amoebanet import AmoebaNet
from parallel.graph.blocks import Block, find_blocks, find_modules
from parallel.graph.branches import LEAST, Branches, find_branches
from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph
from parallel.graph.partition import equal_cost
from parallel.trace.trace import trace
from tests.helpers.branched_nets import Inception, Segmenter, google
from tests.helpers.drawn_graphs import traced
from tests.helpers.lanes import long_where


def test_plain_chain_is_cut_before_each_convolution() -> None:
    graph = traced("torchvision:vgg16_bn")
    kinds = [[layer.kind for layer in graph.layers[b.start : b.stop]] for b in find_blocks(graph)]
    assert len(kinds) == 16
    assert kinds[:2] == [["Conv2d", "BatchNorm2d", "ReLU"], ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d"]]
    assert kinds[-3:] == [["Linear", "ReLU", "Dropout"], ["Linear", "ReLU", "Dropout"], ["Linear"]]


class OneForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs[0](x)
        x = torch.relu(x + self.convs[2](torch.relu(self.convs[1](x))))
        x = torch.cat((self.convs[3](x), self.convs[4](x)), 1)[:, :4]
        return self.convs[5](x)


def numbered(*counts: tuple[str, int], begin: int = 0) -> list[str]:
    return [f"{name}{k}" for name, count in counts for k in range(begin, begin + count)]


DENSE = [numbered((f"features.denseblock{k}.denselayer", n), begin=1) for k, n in enumerate((6, 12, 24, 16), 1)]
LEVELS = numbered(("encoder.", 5), ("decoder.", 4))
MIXED = [f"Mixed_{name}" for name in ("5b", "5c", "5d", "6a", "6b", "6c", "6d", "6e", "7a", "7b", "7c")]
BOTTLENECKS = numbered(*((f"layer{k}.", n) for k, n in ((1, 3), (2, 4), (3, 6), (4, 3))))
CELLS = [*numbered(("encoder.", 5)), "bottleneck", *numbered(("decoder.", 5)), ""]
KNOWN: dict[str, tuple[list[str], int, list[str] | int]] = {
    "torchvision:resnet50": (["", *BOTTLENECKS, ""], 18, ["", *numbered(("layer", 4), begin=1), ""]),
    "torchvision:densenet121": ([name for block in DENSE for name in block], 58 + 3 + 2, 1 + 4 + 3 + 1),
    "unet": ([*LEVELS, ""], 10, ["encoder", "decoder", ""]),
    "unet(5,64)": (CELLS, 12, 4),
    "amoebanet(3,64)": (["stem", *numbered(("cells.", 7)), ""], 9, ["stem", "cells", ""]),
    "torchvision:inception_v3": (MIXED, 5 + 11 + 1, 5 + 11 + 1),
}
"""Model -> its blocks or some of them, in order; how many there are; its modules, or how many."""


@pytest.mark.parametrize("name", long_where(KNOWN, "torchvision:densenet121", "torchvision:inception_v3", "unet(5,64)"))
def test_blocks_of_known_models(name: str) -> None:
    graph, (expected, count, modules) = traced(name), KNOWN[name]
    blocks = find_blocks(graph)
    scopes, of_modules = ([".".join(block.scope) for block in each] for each in (blocks, find_modules(graph)))
    assert [scope for scope in scopes if scope in expected] == expected
    assert len(blocks) == count
    assert modules in (of_modules, len(of_modules))
    # All layers but the input and the output, each once, in order.
    places = [place for block in blocks for place in range(block.start, block.stop)]
    assert places == list(range(1, len(graph.layers) - 1))


def test_cuts_fall_where_fewest_bytes_cross() -> None:
    graph = traced("unet")
    # Before pooling only the skip crosses, after it the pooled value too.
    assert [graph.layers[block.start].name for block in find_blocks(graph)[1:3]] == ["down", "down_1"]
    graph = traced("torchvision:resnet50")
    stem, *bottlenecks, head = find_blocks(graph)
    assert [layer.name for layer in graph.layers[stem.start : stem.stop]] == ["conv1", "bn1", "relu", "maxpool"]
    assert graph.layers[head.start].name == "avgpool"
    # Each ends with the activation after its addition.
    assert all(graph.layers[block.stop - 1].name.endswith("relu_2") for block in bottlenecks)
    graph = trace(OneForward(), (2, 4, 8, 8)).graph  # without modules
    held = [{layer.module for layer in graph.layers[b.start : b.stop] if layer.module} for b in find_blocks(graph)]
    assert held == [{"convs.0"}, {"convs.1", "convs.2"}, {"convs.3", "convs.4"}, {"convs.5"}]


def test_graph_that_knows_no_flops() -> None:
    kinds = [INPUT, "add", "add", "add", OUTPUT]
    graph = LayerGraph(
        tuple(Layer(f"v{k}", kind, (f"v{k - 1}",) if k else (), output_bytes=8) for k, kind in enumerate(kinds))
    )
    assert find_blocks(graph) == [Block(1, 2), Block(2, 3), Block(3, 4)]
    assert find_blocks(LayerGraph((Layer("x", INPUT, ()), Layer("y", OUTPUT, ("x",))))) == []


def found(model: nn.Module, side: int, members: int) -> Branches:
    return find_branches(trace(model, (2, 3, side, side)).graph, members)


@pytest.mark.long
def test_the_branches_of_googlenet_are_those_of_its_modules() -> None:
    branches = found(google(aux_logits=False), 64, 2)
    assert len(branches.regions) == 9
    graph = branches.graph
    for region in branches.regions:
        names = [{graph.layers[k].scope.split(".")[1] for k in branch} for branch in region.branches]
        assert names == [{"branch1"}, {"branch2"}, {"branch3"}, {"branch4"}]
        assert len(region.entering) == 1
        assert len(region.live_out) == 4
        assert graph.layers[region.stop].kind == "cat"
    held = [0, 0]  # of nine modules with one heavy branch each no member holds all of these
    for name, member in branches.member_of.items():
        held[member] += graph.by_name[name].param_bytes
    assert max(held) < 1.1 * min(held)


def test_branches_of_other_models() -> None:
    branches = found(Segmenter(), 16, 4)
    (region,) = branches.regions  # ASPP
    paths = [{branches.graph.layers[k].scope.split("convs.")[1][0] for k in branch} for branch in region.branches]
    assert paths == [{"0"}, {"1"}, {"2"}, {"3"}, {"4"}]
    assert set(region.members) == {0, 1, 2, 3}
    branches = found(AmoebaNet(3, 8, classes=2), 32, 2)
    assert len(branches.regions) == 7
    assert {len(region.entering) for region in branches.regions[1:]} == {2}


@pytest.mark.parametrize("members", [2, 3, 4])
def test_the_busiest_member_has_what_longest_processing_time_first_allows(members: int) -> None:
    """Graham 1969: less than the mean and the longest branch."""
    branches = found(Inception(), 16, members)
    seconds = equal_cost(branches.graph)
    assert len(branches.regions) == 2
    for region in branches.regions:
        costs = [sum(seconds[k] for k in branch) for branch in region.branches]
        loads = [0.0] * members
        for cost, member in zip(costs, region.members, strict=True):
            loads[member] += cost
        assert region.seconds == pytest.approx(loads)
        assert max(loads) <= sum(costs) / members + (1 - 1 / members) * max(costs)


@pytest.mark.parametrize("model", [torchvision.models.vgg11, torchvision.models.resnet18])
def test_a_model_without_branches_says_what_was_looked_for(model: type[nn.Module]) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=f"at least {LEAST:.0%}.*ASPP"):
        found(model(weights=None), 64, 2)
