"""A model as a table, as JSON and as DOT: the same parts, edges and stages, and sums that agree with the partition."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings

from parallel.draw.graph_text import graph_dot, graph_json, graph_text
from parallel.draw.outline import Group, Level, Link, ModelView, saved_bytes
from parallel.graph.blocks import block_cuts
from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph, Op
from parallel.graph.partition import Partition, partition_at, values_across
from parallel.units import bytes_text, flops_text, seconds_text
from tests.helpers.drawn_graphs import graphs, traced
from tests.helpers.lanes import long_where


def test_table_of_a_cut_unet() -> None:
    graph = traced("unet")
    seconds = [0.001] * len(graph.layers)
    text = graph_text(
        ModelView(graph, partition=partition_at(graph, ["down_2", "decoder.2"]), forward_s=seconds, title="U-Net")
    )
    lines = text.splitlines()
    assert lines[0] == "U-Net"
    assert lines[2].split() == ["#", "part", "kind", "takes", "gives", "params", "saved", "flops", "forward"]
    names = [line.split()[:2] for line in lines if "encoder." in line]
    assert names == [[str(k + 1), f"encoder.{k}"] for k in range(5)]
    decoder = next(line for line in lines if "decoder.3" in line)
    assert " 1, 8 " in decoder  # the first skip and the level below
    cuts = [k for k, line in enumerate(lines) if line.startswith("──── cut: ")]
    # Skips of two levels, and the value on its way: 64 + 32 + 16 MiB, then 64 + 32 + 16 from below.
    assert [lines[k].strip("─ ") for k in cuts] == ["cut: 3 values, 112 MiB", "cut: 3 values, 112 MiB"]
    assert [lines[k - 1].split(":")[0] for k in cuts] == ["stage 0", "stage 1"]
    assert lines[-1].startswith("stage 2: params ")
    assert lines[-1].endswith(f"forward {len(graph.layers) - graph.position['decoder_2_up']} ms")
    assert max(map(len, lines[2:])) <= 140


@pytest.mark.parametrize(
    ("text", "number", "expected"),
    [
        *((bytes_text, n, text) for n, text in ((0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 << 19, "1.5 MiB"))),
        *((bytes_text, n, text) for n, text in ((1023.9999 * 2**20, "1 GiB"), (2**50, "1024 TiB"))),
        *((seconds_text, s, text) for s, text in ((0, "0 s"), (3e-10, "0.3 ns"), (3.21e-5, "32.1 µs"))),
        *((seconds_text, s, text) for s, text in ((0.0998, "99.8 ms"), (0.99996, "1 s"), (754, "754 s"))),
        *((flops_text, n, text) for n, text in ((0, "0"), (999.96, "1 k"), (4.12e9, "4.12 G"), (2e15, "2 P"))),
    ],
)
def test_numbers(text: Callable[[float], str], number: float, expected: str) -> None:
    assert text(number) == expected


STRING = r'"(?:[^"\\]|\\.)*"'
SET = rf"\w+=(?:{STRING}|[\w.]+)"
NODE = re.compile(rf"(\d+) \[label=({STRING})(?:, {SET})*\];")
EDGE = re.compile(rf"(\d+) -> (\d+) \[{SET}(?:, {SET})*\];")
REST = re.compile(rf"digraph model \{{|(?:node|edge) \[{SET}(?:, {SET})*\];|{SET};(?: {SET};)*|")


def parse(text: str) -> tuple[dict[int, str], list[tuple[int, int]], dict[int, str]]:
    """Read what ``graph_dot`` writes, one statement of the grammar (graphviz.org/doc/info/lang.html) in each line.

    Returns:
        number -> label of each node, edges, and the cluster of each node that is in one.
    """
    nodes, edges, cluster_of, open_blocks = dict[int, str](), list[tuple[int, int]](), dict[int, str](), ["model"]
    for line in map(str.strip, text.splitlines()):
        if line == "}":
            open_blocks.pop()
        elif cluster := re.fullmatch(r"subgraph (cluster_\d+) \{", line):
            open_blocks.append(cluster[1])
        elif node := NODE.fullmatch(line):
            assert int(node[1]) not in nodes
            nodes[int(node[1])] = json.loads(node[2])
            cluster_of |= {int(node[1]): open_blocks[-1]} if len(open_blocks) > 1 else {}
        elif edge := EDGE.fullmatch(line):
            edges.append((int(edge[1]), int(edge[2])))
        else:
            assert REST.fullmatch(line), line
    assert open_blocks == []
    return nodes, sorted(edges), cluster_of


@pytest.mark.parametrize("level", ["op", "layer", "block", "module"])
def test_nodes_edges_and_stages_agree(level: Level) -> None:
    graph = traced("unet")
    partition = partition_at(graph, ["down_2", "decoder_2_convs_0_0"])
    seconds = [1e-3] * len(graph.layers)
    view = ModelView(graph, level, partition, forward_s=seconds, title="t")
    data = graph_json(view)
    assert json.loads(json.dumps(data)) == data
    assert (data["version"], data["level"], data["title"]) == (1, level, "t")
    nodes, stages = data["nodes"], data["stages"]
    assert [node["id"] for node in nodes] == list(range(len(nodes)))
    for stage in stages:
        held = nodes[stage["first"] : stage["last"] + 1]
        assert {node["stage"] for node in held} == {stage["stage"]}
        for size in ("flops", "param_bytes"):
            assert sum(node[size] for node in held) == stage[size]
        assert stage["saved_bytes"] <= sum(node["saved_bytes"] for node in held)
        assert stage["forward_s"] == pytest.approx(1e-3 * len(partition.layers_of(stage["stage"])))
        assert stage["backward_s"] is None
        # What edges carry from stage to stage is what the partition sends.
        for sent in stage["sends"]:
            ends = stage["stage"], sent["target"]
            edges = [e for e in data["edges"] if (nodes[e["source"]]["stage"], nodes[e["target"]]["stage"]) == ends]
            values = {value for edge in edges for value in edge["values"]}
            assert sum(graph.by_name[value].output_bytes for value in values) == sent["bytes"] > 0
    assert sum(len(set(node["layers"])) for node in nodes) >= len(graph.layers)
    assert nodes[-1]["layers"] == ["output"]
    assert [sent["target"] for sent in stages[0]["sends"]] == [1, 2]
    assert [cut["before"] for cut in data["cuts"]] == ["down_2", "decoder_2_convs_0_0"]
    assert data["cuts"][0]["bytes"] == sum(sent["bytes"] for sent in stages[0]["sends"])
    dot_nodes, dot_edges, cluster_of = parse(graph_dot(replace(view, backward_s=seconds)))
    assert sorted(dot_nodes) == list(range(len(nodes)))
    assert cluster_of == {node["id"]: f"cluster_{node['stage']}" for node in nodes}
    assert dot_edges == [(edge["source"], edge["target"]) for edge in data["edges"]]
    assert f' saved, {2 * partition.starts[1]} ms"; color="#1f66b1"' in graph_dot(replace(view, backward_s=seconds))


def test_without_a_partition_there_is_one_stage() -> None:
    graph = traced("torchvision:resnet50")
    data = graph_json(ModelView(graph))
    assert data["cuts"] == []
    assert [(stage["first"], stage["last"], stage["sends"]) for stage in data["stages"]] == [(0, 19, [])]
    assert data["groups"][0] == {"first": 2, "last": 4, "label": "3 × Bottleneck"}
    lines = graph_text(ModelView(graph, level="layer")).splitlines()
    assert len(lines) == len(graph.layers) + 4
    assert lines[-1].startswith("all: params ")
    nodes, edges, cluster_of = parse(graph_dot(ModelView(graph, level="layer")))
    assert [nodes[number].split("\n")[0] for number in sorted(nodes)] == [layer.name for layer in graph.layers]
    uses = {(graph.position[value], number) for number, layer in enumerate(graph.layers) for value in layer.inputs}
    assert (edges, cluster_of) == (sorted(uses), {})


@pytest.mark.parametrize(
    ("model", "level", "labels"),
    [
        ("torchvision:resnet50", "block", [f"{count} × Bottleneck" for count in (3, 4, 6, 3)]),
        ("unet", "block", ["5 × encoder", "4 × Up"]),
        ("amoebanet(3,64)", "block", ["2 × ReductionCell"]),
        ("unet", "layer", [f"{name}.{k}" for name in ("encoder", "decoder") for k in range(5)][:9]),
    ],
)
def test_repeated_modules_are_grouped(model: str, level: Level, labels: list[str]) -> None:
    assert [group.label for group in ModelView(traced(model), level).groups] == labels


@settings(deadline=None)
@given(graphs())
def test_any_graph_whatever_its_title(graph: LayerGraph) -> None:
    view = ModelView(graph, level="layer")
    nodes, edges, _ = parse(graph_dot(replace(view, title='\\"\n{]; 0 -> 1')))
    assert len(nodes) == len(graph.layers)
    assert edges == [(link.source, link.target) for link in view.links]


MODELS = ("torchvision:resnet50", "unet", "amoebanet(3,64)", "torchvision:densenet121")
ALL_MODELS = pytest.mark.parametrize("model", long_where(MODELS, MODELS[-1]))


@ALL_MODELS
@pytest.mark.parametrize("level", ["op", "layer", "block", "module"])
def test_parts_cover_the_graph_once_and_links_carry_what_layers_use(model: str, level: Level) -> None:
    graph = traced(model)
    view = ModelView(graph, level)
    starts = [part.start for part in view.parts]
    assert starts == sorted(starts)
    held = [(number, k) for number, part in enumerate(view.parts) for k in range(part.start, part.stop)]
    assert {k for _, k in held} == set(range(len(graph.layers)))
    for size in ("flops", "param_bytes"):
        assert sum(getattr(part, size) for part in view.parts) == sum(getattr(layer, size) for layer in graph.layers)
    assert len({part.name for part in view.parts}) == len(view.parts)
    assert all(link.source < link.target for link in view.links)
    assert all(first.last < second.first for first, second in zip(view.groups, view.groups[1:], strict=False))
    if level == "op":
        return
    part_of = {graph.layers[k].name: number for number, k in held}
    used = {(part_of[value], part_of[layer.name], value) for layer in graph.layers for value in layer.inputs}
    carried = {(link.source, link.target, value) for link in view.links for value in link.values}
    assert carried == {(source, target, value) for source, target, value in used if source != target}
    for link in view.links:
        assert link.bytes == sum(graph.by_name[value].output_bytes for value in link.values)


def test_sums_of_a_part() -> None:
    graph = traced("unet")
    seconds = [0.001 * k for k in range(len(graph.layers))]
    view = ModelView(graph, "block", forward_s=seconds, backward_s=[2 * s for s in seconds])
    part = next(part for part in view.parts if part.name == "decoder.1")
    inside = range(part.start, part.stop)
    assert (part.kind, part.scope) == ("Up", "decoder.1")
    assert part.forward_s == pytest.approx(sum(seconds[k] for k in inside))
    assert part.backward_s == pytest.approx(2 * sum(seconds[k] for k in inside))
    assert part.saved_bytes == saved_bytes(graph, inside) < sum(saved_bytes(graph, [k]) for k in inside)
    assert part.output_bytes == graph.layers[part.stop - 1].output_bytes
    assert ModelView(graph, "block").parts[3].forward_s is None


def test_parts_are_split_at_cuts() -> None:
    graph = traced("torchvision:resnet50")
    cut = graph.position["layer2_0_conv3"]
    view = ModelView(graph, "block", Partition(graph, (0, cut)))
    first = next(number for number, part in enumerate(view.parts) if part.name == "layer2.0 [1/2]")
    before, after = view.parts[first : first + 2]
    assert (before.stop, after.start, after.name) == (cut, cut, "layer2.0 [2/2]")
    assert before.scope == after.scope == "layer2.0"
    assert [group.label for group in view.groups][1] == "4 × Bottleneck"


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
    view = ModelView(graph, "op")
    assert [(part.name, part.kind, part.output_bytes) for part in view.parts] == [
        ("x", "input", 64),
        ("norm [1/2]", "native_batch_norm", 64),
        ("norm [2/2]", "mul", 48),
        ("out", "output", 0),
    ]
    assert view.links == (Link(0, 1, ("x",), 64), Link(1, 2, (), 64), Link(2, 3, ("norm",), 48))
    assert view.groups == (Group(1, 2, "norm"),)
    assert [part.saved_bytes for part in view.parts] == [0, 0, 64, 0]


@ALL_MODELS
def test_block_cuts_are_allowed_and_few(model: str) -> None:
    graph = traced(model)
    cuts = block_cuts(graph)
    assert list(cuts) == sorted(set(cuts))
    assert all(2 <= cut < len(graph.layers) - 1 and graph.can_cut(cut) for cut in cuts)
    starts = [part.start for part in ModelView(graph, "block").parts]
    assert set(cuts) <= set(starts)
    assert len(cuts) == len(starts) - 3  # the model's input, its first block and its output begin no stage
    if "amoeba" in model:
        assert all(len(values_across(graph, cut)) == 2 for cut in cuts[1:-1])
    if "resnet" in model:  # none inside shared parameters
        first, second = graph.position["layer2_0_conv1"], graph.position["layer3_0_conv1"]
        shared = block_cuts(LayerGraph(graph.layers, ((first, second + 1),), graph.classes))
        assert [cut for cut in cuts if not first < cut <= second] == list(shared)


def test_wrong_requests() -> None:
    graph = traced("unet")
    with pytest.raises(ValueError, match=r"op, layer, block, module; got 'stage'"):
        ModelView(graph, "stage")  # what a user may type
