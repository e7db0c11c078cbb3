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
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import partition_at, partition_equal
from tests.helpers.drawn_graphs import graphs
from tests.helpers.graph_pictures import traced

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|->|[{}\[\];,=]|[\w.]+|\s+')


@dataclass
class Dot:
    """What a DOT text holds: number -> label of each node, edges, and the cluster of each node that is in one."""

    nodes: dict[int, str] = field(default_factory=dict)
    edges: list[tuple[int, int]] = field(default_factory=list)
    cluster_of: dict[int, str] = field(default_factory=dict)


def parse(text: str) -> Dot:
    """Read the part of the grammar (graphviz.org/doc/info/lang.html) that ``graph_dot`` writes; nothing else passes."""
    tokens = [match[0] for match in TOKEN.finditer(text)]
    assert "".join(tokens) == text, "a letter that no token has"
    left = [token for token in tokens if not token.isspace()][::-1]

    def take(*expected: str) -> str:
        token = left.pop()
        assert not expected or token in expected, (token, expected)
        return token

    def attributes() -> dict[str, str]:
        found = {}
        take("[")
        while True:
            name, _, value = take(), take("="), take()
            found[name] = json.loads(value) if value.startswith('"') else value
            if take(",", "]") == "]":
                return found

    dot = Dot()

    def statements(cluster: str | None) -> None:
        take("{")
        while (first := take()) != "}":
            if first == "subgraph":
                statements(take())
            elif left[-1] == "=":
                take(), take()
                take(";")
            elif left[-1] == "->":
                take()
                dot.edges.append((int(first), int(take())))
                attributes()
                take(";")
            else:
                found = attributes()
                take(";")
                if first not in ("node", "edge"):
                    assert int(first) not in dot.nodes
                    dot.nodes[int(first)] = found["label"]
                    if cluster:
                        dot.cluster_of[int(first)] = cluster

    take("digraph")
    take()
    statements(None)
    assert not left
    return dot


def test_layers_and_their_inputs_are_nodes_and_edges() -> None:
    graph = traced("unet")
    dot = parse(graph_dot(ModelView(graph, level="layer", title='a "U-Net" & its \\ layers')))
    assert [dot.nodes[number].split("\n")[0] for number in sorted(dot.nodes)] == [layer.name for layer in graph.layers]
    uses = {(graph.position[value], number) for number, layer in enumerate(graph.layers) for value in layer.inputs}
    assert sorted(dot.edges) == sorted(uses)
    assert dot.cluster_of == {}


@pytest.mark.parametrize("level", ["op", "layer", "block", "module"])
def test_stages_are_clusters(level: str) -> None:
    graph = traced("unet")
    view = ModelView(graph, level=level, partition=partition_at(graph, ["down_2", "decoder_2_convs_0_0"]))  # type: ignore[arg-type]
    dot, data = parse(graph_dot(view)), graph_json(view)
    assert dot.cluster_of == {node["id"]: f"cluster_{node['stage']}" for node in data["nodes"]}
    assert sorted(dot.edges) == [(edge["source"], edge["target"]) for edge in data["edges"]]


def test_sizes_and_times_are_said() -> None:
    graph = traced("unet")
    seconds = [1e-3] * len(graph.layers)
    view = ModelView(graph, partition=partition_at(graph, ["down_2"]), forward_s=seconds, backward_s=seconds)
    text = graph_dot(view)
    held = view.stage_sums[0]
    assert f'label="stage 0: {held.param_bytes / 2**20:.3g} MiB params' in text
    assert f'{2 * (held.stop - held.start)} ms"' in text
    assert re.search(r'0 -> 1 \[label="3 MiB", penwidth=\d\.\d\];', text)  # a tile of 512 px, float32


@settings(deadline=None)
@given(graphs())
def test_any_graph_whatever_its_names(graph: LayerGraph) -> None:
    view = ModelView(graph, level="layer", partition=partition_equal(graph, 1))
    text = graph_dot(replace(view, title='\\"\n{]'))
    dot = parse(text)
    assert len(dot.nodes) == len(graph.layers)
    assert sorted(dot.edges) == [(link.source, link.target) for link in view.outline.links]
