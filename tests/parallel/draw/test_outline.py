"""Outlines at every level: nothing lost, nothing twice, and what a planner may use."""

from __future__ import annotations

import pytest

from parallel.draw.outline import Group, Level, Link, coarsen, saved_bytes
from parallel.graph.blocks import block_cuts
from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph, Op
from parallel.graph.partition import values_across
from tests.helpers.graph_pictures import traced
from tests.helpers.lanes import long_where

LEVELS: tuple[Level, ...] = ("op", "layer", "block", "module")
MODELS = ("torchvision:resnet50", "torchvision:densenet121", "unet", "amoebanet(6,256)")


@pytest.mark.parametrize("model", long_where(MODELS, "torchvision:densenet121", "amoebanet(6,256)"))
@pytest.mark.parametrize("level", LEVELS)
def test_parts_cover_the_graph_once(model: str, level: Level) -> None:
    graph = traced(model)
    outline = coarsen(graph, level)
    starts = [part.start for part in outline.parts]
    assert starts == sorted(starts)
    assert {k for part in outline.parts for k in range(part.start, part.stop)} == set(range(len(graph.layers)))
    assert sum(part.flops for part in outline.parts) == sum(layer.flops for layer in graph.layers)
    assert sum(part.param_bytes for part in outline.parts) == sum(layer.param_bytes for layer in graph.layers)
    assert len({part.name for part in outline.parts}) == len(outline.parts)
    assert all(link.source < link.target for link in outline.links)
    assert all(first.last < second.first for first, second in zip(outline.groups, outline.groups[1:], strict=False))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("level", ["layer", "block", "module"])
def test_links_carry_what_layers_use(model: str, level: Level) -> None:
    graph = traced(model)
    outline = coarsen(graph, level)
    part_of = {
        graph.layers[k].name: number for number, part in enumerate(outline.parts) for k in range(part.start, part.stop)
    }
    used = {
        (part_of[value], part_of[layer.name], value)
        for layer in graph.layers
        for value in layer.inputs
        if part_of[value] != part_of[layer.name]
    }
    assert {(link.source, link.target, value) for link in outline.links for value in link.values} == used
    for link in outline.links:
        assert link.bytes == sum(graph.by_name[value].output_bytes for value in link.values)


def test_sums_of_a_part() -> None:
    graph = traced("unet")
    seconds = [0.001 * k for k in range(len(graph.layers))]
    outline = coarsen(graph, "block", forward_s=seconds, backward_s=[2 * s for s in seconds])
    part = next(part for part in outline.parts if part.name == "decoder.1")
    inside = range(part.start, part.stop)
    assert (part.kind, part.scope) == ("Up", "decoder.1")
    assert part.forward_s == pytest.approx(sum(seconds[k] for k in inside))
    assert part.backward_s == pytest.approx(2 * sum(seconds[k] for k in inside))
    assert part.saved_bytes == saved_bytes(graph, inside) < sum(saved_bytes(graph, [k]) for k in inside)
    assert part.output_bytes == graph.layers[part.stop - 1].output_bytes
    assert coarsen(graph, "block").parts[3].forward_s is None


def test_repeated_modules_are_named() -> None:
    labels = [group.label for group in coarsen(traced("torchvision:resnet50"), "block").groups]
    assert labels == ["3 × Bottleneck", "4 × Bottleneck", "6 × Bottleneck", "3 × Bottleneck"]
    assert [g.label for g in coarsen(traced("unet"), "block").groups] == ["5 × encoder", "4 × Up"]
    cells = coarsen(traced("amoebanet(6,256)"), "block").groups
    assert [g.label for g in cells] == ["2 × ReductionCell", *["2 × NormalCell"] * 3]


def test_layers_are_grouped_by_block() -> None:
    outline = coarsen(traced("unet"), "layer")
    names = [outline.parts[group.first].name for group in outline.groups]
    assert [group.label for group in outline.groups] == [f"{s}.{k}" for s in ("encoder", "decoder") for k in range(5)][
        :9
    ]
    assert names[1] == "down"


def test_parts_are_split_at_cuts() -> None:
    graph = traced("torchvision:resnet50")
    cut = graph.position["layer2_0_conv3"]
    outline = coarsen(graph, "block", cuts=(0, cut))
    first = next(number for number, part in enumerate(outline.parts) if part.name == "layer2.0 [1/2]")
    before, after = outline.parts[first : first + 2]
    assert (before.stop, after.start, after.name) == (cut, cut, "layer2.0 [2/2]")
    assert before.scope == after.scope == "layer2.0"
    assert [group.label for group in outline.groups][1] == "4 × Bottleneck"


def test_operations_follow_each_other() -> None:
    counter = Op("add_", 0, 8, 8, differentiable=False, passes_on=False)
    norm, scale = Op("native_batch_norm", 0, 64, 64), Op("mul", 0, 64, 48)
    graph = LayerGraph(
        (
            Layer("x", INPUT, (), output_bytes=64),
            Layer("norm", "Norm", ("x",), output_bytes=48, param_bytes=4, ops=(counter, norm, scale), saved=((0, 64),)),
            Layer("out", OUTPUT, ("norm",)),
        )
    )
    outline = coarsen(graph, "op")
    assert [(part.name, part.kind, part.output_bytes) for part in outline.parts] == [
        ("x", "input", 64),
        ("norm [1/2]", "native_batch_norm", 64),
        ("norm [2/2]", "mul", 48),
        ("out", "output", 0),
    ]
    assert outline.links == (Link(0, 1, ("x",), 64), Link(1, 2, (), 64), Link(2, 3, ("norm",), 48))
    assert outline.groups == (Group(1, 2, "norm"),)
    assert [part.saved_bytes for part in outline.parts] == [0, 0, 64, 0]


@pytest.mark.parametrize("model", MODELS)
def test_block_cuts_are_allowed_and_few(model: str) -> None:
    graph = traced(model)
    cuts = block_cuts(graph)
    assert list(cuts) == sorted(set(cuts))
    assert all(2 <= cut < len(graph.layers) - 1 and graph.can_cut(cut) for cut in cuts)
    starts = [part.start for part in coarsen(graph, "block").parts]
    assert set(cuts) <= set(starts)
    assert len(cuts) == len(starts) - 3  # the model's input, its first block and its output begin no stage
    if "amoeba" in model:
        assert all(len(values_across(graph, cut)) == 2 for cut in cuts[1:-1])


def test_no_cut_inside_shared_parameters() -> None:
    graph = traced("torchvision:resnet50")
    first, second = graph.position["layer2_0_conv1"], graph.position["layer3_0_conv1"]
    shared = LayerGraph(graph.layers, ((first, second + 1),), graph.classes)
    assert not [cut for cut in block_cuts(shared) if first < cut <= second]
    assert len(block_cuts(shared)) == 17 - 4


def test_wrong_requests() -> None:
    graph = traced("unet")
    with pytest.raises(ValueError, match=r"op, layer, block, module; got 'stage'"):
        coarsen(graph, "stage")  # type: ignore[arg-type]  # what a user may type
    with pytest.raises(ValueError, match=r"backward_s has one number for each of 70 layers; got 3"):
        coarsen(graph, "block", backward_s=[1.0, 2.0, 3.0])
