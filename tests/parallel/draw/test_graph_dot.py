"""DOT says of a model what its graph says: the same nodes, edges and stages, in a text that follows the grammar."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings

from parallel.draw.graph_dot import graph_dot
from parallel.draw.graph_json import graph_json
from parallel.draw.model_view import ModelView
from parallel.draw.outline import Level
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import partition_at
from tests.helpers.drawn_graphs import graphs
from tests.helpers.graph_pictures import traced

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
    assert sorted(dot.edges) == [(link.source, link.target) for link in view.outline.links]
