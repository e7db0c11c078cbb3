"""Branches that are found in models, and the members that they are assigned to."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from models.amoebanet import AmoebaNet
from parallel.graph.branches import LEAST, Branches, find_branches
from parallel.graph.partition import equal_cost
from parallel.trace.trace import trace
from tests.helpers.branched_nets import Inception, Segmenter, google


def found(model: nn.Module, side: int, members: int) -> Branches:
    return find_branches(trace(model, (2, 3, side, side)).graph, members)


def test_the_branches_of_googlenet_are_those_of_its_modules() -> None:
    branches = found(google(aux_logits=False), 64, 2)
    assert len(branches.regions) == 9
    graph = branches.graph
    for region in branches.regions:
        names = [{graph.layers[k].scope.split(".")[1] for k in branch} for branch in region.branches]
        assert names == [{"branch1"}, {"branch2"}, {"branch3"}, {"branch4"}]
        assert len(region.entering) == 1
        assert len(region.leaving) == 4
        assert graph.layers[region.stop].kind == "cat"


def test_the_branches_of_aspp_are_its_five_convolutions() -> None:
    branches = found(Segmenter(), 16, 4)
    (region,) = branches.regions
    paths = [{branches.graph.layers[k].scope.split("convs.")[1][0] for k in branch} for branch in region.branches]
    assert paths == [{"0"}, {"1"}, {"2"}, {"3"}, {"4"}]
    assert set(region.members) == {0, 1, 2, 3}


def test_each_cell_of_an_amoebanet_has_branches_of_two_values() -> None:
    branches = found(AmoebaNet(3, 8, classes=2), 64, 2)
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


def test_blocks_alike_go_to_other_members_in_turn() -> None:
    """Of nine modules with one heavy branch each no member holds all of these."""
    branches = found(google(aux_logits=False), 64, 2)
    held = [0, 0]
    for name, member in branches.member_of.items():
        held[member] += branches.graph.by_name[name].param_bytes
    assert max(held) < 1.1 * min(held)


@pytest.mark.parametrize("model", [torchvision.models.vgg11, torchvision.models.resnet50])
def test_a_model_without_branches_says_what_was_looked_for(model: type[nn.Module]) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=f"at least {LEAST:.0%}.*ASPP"):
        found(model(weights=None), 64, 2)
