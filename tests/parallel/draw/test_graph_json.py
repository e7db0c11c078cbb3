"""The graph as JSON: what the schema promises, and sums that agree with the partition."""

from __future__ import annotations

import json

import pytest

from parallel.draw.graph_json import graph_json
from parallel.draw.model_view import ModelView
from parallel.graph.partition import partition_at
from tests.helpers.graph_pictures import traced


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
