"""A model as a table, as JSON and as DOT: the same parts, edges and stages, and sums that agree with the partition."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings

from parallel.draw.graph_text import graph_dot, graph_json, graph_text
from parallel.draw.outline import Group, Level, Link, ModelView, saved_bytes
from parallel.draw.svg_style import fitted, text_width
from parallel.graph.blocks import block_cuts
from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph, Op
from parallel.graph.partition import Partition, partition_at, values_across
from parallel.units import bytes_text, flops_text, seconds_text
from tests.helpers.drawn_graphs import graphs
from tests.helpers.graph_pictures import traced
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


def test_table_of_a_whole_model() -> None:
    graph = traced("torchvision:densenet121")
    lines = graph_text(ModelView(graph, level="block")).splitlines()
    assert "cut" not in "".join(lines)
    assert lines[-1].startswith("all: params 26.5 MiB, saved ")
    last = next(line for line in lines if "denseblock1.denselayer6" in line)
    assert " 1-6 " in last
    assert len(graph_text(ModelView(graph, level="layer")).splitlines()) == len(graph.layers) + 4


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 << 19, "1.5 MiB"),
        (1023.9999 * 2**20, "1 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_bytes(count: float, expected: str) -> None:
    assert bytes_text(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 s"), (3e-10, "0.3 ns"), (3.21e-5, "32.1 µs"), (0.0998, "99.8 ms"), (0.99996, "1 s"), (754, "754 s")],
)
def test_seconds(seconds: float, expected: str) -> None:
    assert seconds_text(seconds) == expected


@pytest.mark.parametrize(("flops", "expected"), [(0, "0"), (999.96, "1 k"), (4.12e9, "4.12 G"), (2e15, "2 P")])
def test_flops(flops: float, expected: str) -> None:
    assert flops_text(flops) == expected


def test_words_are_cut_to_fit() -> None:
    name = "features.denseblock3.denselayer24"
    assert fitted(name, 13, 1000) == name
    begin, end = fitted(name, 13, 120), fitted(name, 13, 120, keep_end=True)
    assert begin.endswith("…")
    assert end.endswith("layer24")
    assert all(80 < text_width(text, 13) <= 120 for text in (begin, end))
    assert text_width("WWW", 10) > 2 * text_width("iii", 10)


@pytest.mark.parametrize("level", ["op", "layer", "block", "module"])
def test_nodes_edges_and_stages_agree(level: str) -> None:
    graph = traced("unet")
    partition = partition_at(graph, ["down_2", "decoder_2_convs_0_0"])
    seconds = [1e-3] * len(graph.layers)
    data = graph_json(ModelView(graph, level=level, partition=partition, forward_s=seconds, title="t"))  # type: ignore[arg-type]
    assert json.loads(json.dumps(data)) == data
    assert (data["version"], data["level"], data["title"]) == (1, level, "t")
    nodes, stages = data["nodes"], data["stages"]
    assert [node["id"] for node in nodes] == list(range(len(nodes)))
    for stage in stages:
        held = nodes[stage["first"] : stage["last"] + 1]
        assert {node["stage"] for node in held} == {stage["stage"]}
        assert sum(node["flops"] for node in held) == stage["flops"]
        assert sum(node["param_bytes"] for node in held) == stage["param_bytes"]
        assert stage["saved_bytes"] <= sum(node["saved_bytes"] for node in held)
        assert stage["forward_s"] == pytest.approx(1e-3 * len(partition.layers_of(stage["stage"])))
        assert stage["backward_s"] is None
    assert sum(len(set(node["layers"])) for node in nodes) >= len(graph.layers)
    assert nodes[-1]["layers"] == ["output"]
    # What edges of the picture carry from stage to stage is what the partition sends.
    for stage in stages:
        for sent in stage["sends"]:
            values = {
                value
                for edge in data["edges"]
                if (nodes[edge["source"]]["stage"], nodes[edge["target"]]["stage"]) == (stage["stage"], sent["target"])
                for value in edge["values"]
            }
            assert sum(graph.by_name[value].output_bytes for value in values) == sent["bytes"] > 0
    assert [sent["target"] for sent in stages[0]["sends"]] == [1, 2]
    assert [cut["before"] for cut in data["cuts"]] == ["down_2", "decoder_2_convs_0_0"]
    assert data["cuts"][0]["bytes"] == sum(sent["bytes"] for sent in stages[0]["sends"])


def test_without_a_partition_there_is_one_stage() -> None:
    data = graph_json(ModelView(traced("torchvision:resnet50")))
    assert data["cuts"] == []
    assert [(stage["first"], stage["last"], stage["sends"]) for stage in data["stages"]] == [(0, 19, [])]
    assert data["groups"][0] == {"first": 2, "last": 4, "label": "3 × Bottleneck"}
    assert {node["stage"] for node in data["nodes"]} == {0}


STRING = r'"(?:[^"\\]|\\.)*"'
SET = rf"\w+=(?:{STRING}|[\w.]+)"
NODE = re.compile(rf"(\d+) \[label=({STRING})(?:, {SET})*\];")
EDGE = re.compile(rf"(\d+) -> (\d+) \[{SET}(?:, {SET})*\];")
REST = re.compile(rf"digraph model \{{|(?:node|edge) \[{SET}(?:, {SET})*\];|{SET};(?: {SET};)*|")


@dataclass
class Dot:
    """What a DOT text holds: number -> label of each node, edges, and the cluster of each node that is in one."""

    nodes: dict[int, str] = field(default_factory=dict)
    edges: list[tuple[int, int]] = field(default_factory=list)
    cluster_of: dict[int, str] = field(default_factory=dict)


def parse(text: str) -> Dot:
    """Read what ``graph_dot`` writes, one statement of the grammar (graphviz.org/doc/info/lang.html) in each line."""
    dot, open_blocks = Dot(), ["model"]
    for line in map(str.strip, text.splitlines()):
        if line == "}":
            open_blocks.pop()
        elif cluster := re.fullmatch(r"subgraph (cluster_\d+) \{", line):
            open_blocks.append(cluster[1])
        elif node := NODE.fullmatch(line):
            assert int(node[1]) not in dot.nodes
            dot.nodes[int(node[1])] = json.loads(node[2])
            dot.cluster_of |= {int(node[1]): open_blocks[-1]} if len(open_blocks) > 1 else {}
        elif edge := EDGE.fullmatch(line):
            dot.edges.append((int(edge[1]), int(edge[2])))
        else:
            assert REST.fullmatch(line), line
    assert open_blocks == []
    return dot


def test_layers_and_their_inputs_are_nodes_and_edges() -> None:
    graph = traced("unet")
    dot = parse(graph_dot(ModelView(graph, level="layer")))
    assert [dot.nodes[number].split("\n")[0] for number in sorted(dot.nodes)] == [layer.name for layer in graph.layers]
    uses = {(graph.position[value], number) for number, layer in enumerate(graph.layers) for value in layer.inputs}
    assert sorted(dot.edges) == sorted(uses)
    assert dot.cluster_of == {}


@pytest.mark.parametrize("level", ["op", "layer", "block", "module"])
def test_stages_are_clusters(level: Level) -> None:
    graph = traced("unet")
    seconds = [1e-3] * len(graph.layers)
    partition = partition_at(graph, ["down_2", "decoder_2_convs_0_0"])
    view = ModelView(graph, level=level, partition=partition, forward_s=seconds, backward_s=seconds)
    dot, data = parse(graph_dot(view)), graph_json(view)
    assert dot.cluster_of == {node["id"]: f"cluster_{node['stage']}" for node in data["nodes"]}
    assert sorted(dot.edges) == [(edge["source"], edge["target"]) for edge in data["edges"]]
    assert f' saved, {2 * partition.starts[1]} ms"; color="#1f66b1"' in graph_dot(view)


@settings(deadline=None)
@given(graphs())
def test_any_graph_whatever_its_title(graph: LayerGraph) -> None:
    view = ModelView(graph, level="layer")
    dot = parse(graph_dot(replace(view, title='\\"\n{]; 0 -> 1')))
    assert len(dot.nodes) == len(graph.layers)
    assert sorted(dot.edges) == [(link.source, link.target) for link in view.links]


LEVELS: tuple[Level, ...] = ("op", "layer", "block", "module")
MODELS = ("torchvision:resnet50", "torchvision:densenet121", "unet", "amoebanet(6,256)")


@pytest.mark.parametrize("model", long_where(MODELS, "torchvision:densenet121", "amoebanet(6,256)"))
@pytest.mark.parametrize("level", LEVELS)
def test_parts_cover_the_graph_once(model: str, level: Level) -> None:
    graph = traced(model)
    view = ModelView(graph, level)
    starts = [part.start for part in view.parts]
    assert starts == sorted(starts)
    assert {k for part in view.parts for k in range(part.start, part.stop)} == set(range(len(graph.layers)))
    assert sum(part.flops for part in view.parts) == sum(layer.flops for layer in graph.layers)
    assert sum(part.param_bytes for part in view.parts) == sum(layer.param_bytes for layer in graph.layers)
    assert len({part.name for part in view.parts}) == len(view.parts)
    assert all(link.source < link.target for link in view.links)
    assert all(first.last < second.first for first, second in zip(view.groups, view.groups[1:], strict=False))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("level", ["layer", "block", "module"])
def test_links_carry_what_layers_use(model: str, level: Level) -> None:
    graph = traced(model)
    view = ModelView(graph, level)
    part_of = {
        graph.layers[k].name: number for number, part in enumerate(view.parts) for k in range(part.start, part.stop)
    }
    used = {
        (part_of[value], part_of[layer.name], value)
        for layer in graph.layers
        for value in layer.inputs
        if part_of[value] != part_of[layer.name]
    }
    assert {(link.source, link.target, value) for link in view.links for value in link.values} == used
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


def test_repeated_modules_are_named() -> None:
    labels = [group.label for group in ModelView(traced("torchvision:resnet50"), "block").groups]
    assert labels == ["3 × Bottleneck", "4 × Bottleneck", "6 × Bottleneck", "3 × Bottleneck"]
    assert [g.label for g in ModelView(traced("unet"), "block").groups] == ["5 × encoder", "4 × Up"]
    cells = ModelView(traced("amoebanet(6,256)"), "block").groups
    assert [g.label for g in cells] == ["2 × ReductionCell", *["2 × NormalCell"] * 3]


def test_layers_are_grouped_by_block() -> None:
    view = ModelView(traced("unet"), "layer")
    names = [view.parts[group.first].name for group in view.groups]
    assert [group.label for group in view.groups] == [f"{s}.{k}" for s in ("encoder", "decoder") for k in range(5)][:9]
    assert names[1] == "down"


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


@pytest.mark.parametrize("model", MODELS)
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


def test_no_cut_inside_shared_parameters() -> None:
    graph = traced("torchvision:resnet50")
    first, second = graph.position["layer2_0_conv1"], graph.position["layer3_0_conv1"]
    shared = LayerGraph(graph.layers, ((first, second + 1),), graph.classes)
    assert not [cut for cut in block_cuts(shared) if first < cut <= second]
    assert len(block_cuts(shared)) == 17 - 4


def test_wrong_requests() -> None:
    graph = traced("unet")
    with pytest.raises(ValueError, match=r"op, layer, block, module; got 'stage'"):
        ModelView(graph, "stage")  # type: ignore[arg-type]  # what a user may type
    with pytest.raises(ValueError, match=r"backward_s has one number for each of 70 layers; got 3"):
        ModelView(graph, "block", backward_s=[1.0, 2.0, 3.0])
