"""torchgpipe's balances cut our models where they cut theirs: same parameters on every stage."""

from __future__ import annotations

import functools

import pytest
import torch

from benchmarks.plan_accuracy.published_balances import BALANCES, cut_places, published_cuts
from models.registry import build_model
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import partition_at
from parallel.trace.trace import trace

pytestmark = pytest.mark.long

PROJECTION = 256 * 512 + 2 * 512
"""Parameters of the shortcut of layer2.0, which runs before the first of four stages ends here and after it there."""

# Counted on the stages of torchgpipe's own models.
PARAMETERS = {
    ("unet(5,64)", 2): [47113920, 185573408],
    ("unet(5,64)", 4): [370368, 27869184, 203489280, 958496],
    ("unet(5,64)", 8): [112320, 700416, 6193152, 106168320, 106168320, 12976128, 331776, 36896],
    ("resnet101", 2): [7426112, 37123048],
    ("resnet101", 4): [406080 + PROJECTION, 7020032 - PROJECTION, 12551680, 24571368],
    ("resnet101", 8): [154944, 449792, 840192, 4864000, 4468736, 6703104, 6703104, 20365288],
    ("amoebanet(18,256)", 2): [5557248, 116912872],
    ("amoebanet(18,256)", 4): [419328, 5137920, 22586624, 94326248],
    ("amoebanet(18,256)", 8): [76160, 1019264, 1745408, 2716416, 8133888, 14452736, 46923264, 47402984],
}


@functools.cache
def graph_of(name: str) -> LayerGraph:
    with torch.device("meta"):
        unet = name.startswith("unet")
        model = build_model(name, classes=1 if unet else 1000, norm="instance" if unet else "batch")
    return trace(model, (1, 3, 64, 64)).graph


@pytest.mark.parametrize(("name", "stages"), PARAMETERS)
def test_stages_hold_the_parameters_of_torchgpipes_stages(name: str, stages: int) -> None:
    partition = partition_at(graph_of(name), published_cuts(name, stages))
    found = [sum(layer.param_bytes for layer in partition.layers_of(k)) // 4 for k in range(stages)]
    assert found == PARAMETERS[name, stages]


def test_layers_without_parameters_are_on_the_stages_they_have_there() -> None:
    partition = partition_at(graph_of("unet(5,64)"), published_cuts("unet(5,64)", 8))
    kinds = [[layer.kind for layer in partition.layers_of(k)] for k in range(8)]
    assert [stage.count("MaxPool2d") for stage in kinds] == [0, 1, 2, 2, 0, 0, 0, 0]
    assert [stage.count("Upsample") for stage in kinds] == [0, 0, 0, 0, 1, 3, 1, 0]
    assert [stage.count("cat") for stage in kinds] == [0, 0, 0, 0, 1, 2, 2, 0]


def test_every_published_balance_is_tested() -> None:
    assert {(name, stages) for name, balances in BALANCES.items() for stages in balances} == PARAMETERS.keys()


@pytest.mark.parametrize(("name", "layers"), [("unet(5,64)", 241), ("resnet101", 370), ("amoebanet(18,256)", 24)])
def test_each_of_their_layers_has_its_place_in_order(name: str, layers: int) -> None:
    places = cut_places(name)
    assert len(places) == layers
    # A cut before the first layer that has work would leave the first stage empty.
    cuts = list(dict.fromkeys(places))[2:]
    assert partition_at(graph_of(name), cuts).depth == len(cuts) + 1


@pytest.mark.parametrize(("name", "stages"), [("resnet50", 2), ("resnet101", 3)])
def test_what_was_not_published_is_refused(name: str, stages: int) -> None:
    with pytest.raises(ValueError, match=f"in 2, 4 and 8 stages; got '{name}' in {stages}"):
        published_cuts(name, stages)
