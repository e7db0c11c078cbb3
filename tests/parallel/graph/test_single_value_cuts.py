"""Single-value cuts against what dominators mean: without the value, nothing of the input reaches the output."""

from __future__ import annotations

from hypothesis import given

from parallel.graph.layers import INPUT, LayerGraph
from parallel.graph.single_value_cuts import bytes_across, single_value_cuts, values_across
from tests.helpers.drawn_graphs import graph_of, graphs


def reaches_output_without(graph: LayerGraph, value: str) -> bool:
    reached: set[str] = set()
    for layer in graph.layers:
        if layer.name != value and (layer.kind == INPUT or reached & set(layer.inputs)):
            reached.add(layer.name)
    return graph.layers[-1].name in reached


@given(graphs())
def test_single_value_cuts_are_the_values_that_all_ways_pass(graph: LayerGraph) -> None:
    alone = {value for position in single_value_cuts(graph) for value in values_across(graph, position)}
    assert alone == {layer.name for layer in graph.layers[:-1] if not reaches_output_without(graph, layer.name)}


@given(graphs())
def test_bytes_are_those_of_the_values(graph: LayerGraph) -> None:
    for position, count in enumerate(bytes_across(graph)):
        assert count == sum(graph.by_name[name].output_bytes for name in values_across(graph, position))


def test_parameters_and_sizes_carry_nothing() -> None:
    held = graph_of((0,), (), (1,), (1, 2), (3, 4), (5,), weights=(2,), sizes=(3,))
    assert single_value_cuts(held) == [1, 2, 3, 4, 5, 6]
    assert single_value_cuts(graph_of((0,), (), (1,), (1, 2), (3, 4), (5,))) == [1, 2, 6]


def test_a_skip_hides_what_it_spans() -> None:
    skip = graph_of((0,), (1,), (2,), (1, 3), (4,))
    assert single_value_cuts(skip) == [1, 2, 5]
    assert values_across(skip, 3) == ("v1", "v2")
