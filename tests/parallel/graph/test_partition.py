"""Partitions: cuts that are allowed, stages and what they send, and the values across each cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.graph.layers import INPUT, OUTPUT, RANDOM_STATE, Layer, LayerGraph, Op
from parallel.graph.partition import (
    Edge,
    Partition,
    bytes_across,
    equal_cost,
    partition_at,
    partition_equal,
    single_value_cuts,
    values_across,
)
from parallel.graph.scale import KNOWN, BySide, with_tiles
from parallel.trace.trace import trace
from tests.helpers.drawn_graphs import graph_of, graphs
from tests.helpers.small_nets import SkipNet


def chain(
    *inputs: tuple[int, ...], inseparable: tuple[tuple[int, int], ...] = (), random: tuple[int, ...] = ()
) -> LayerGraph:
    """Layer k of kind add, named after its position, uses the layers ``inputs[k - 1]``; v0 is the input."""
    count = len(inputs)
    return LayerGraph(
        tuple(
            Layer(
                name=f"v{k}",
                kind=INPUT if k == 0 else OUTPUT if k == count else "add",
                inputs=() if k == 0 else tuple(f"v{i}" for i in inputs[k - 1]),
                output_bytes=10 + k,
                differentiable=k != 0,
                random=k in random,
                scope="" if k in (0, count) else f"block{k // 3}.part{k}",
            )
            for k in range(count + 1)
        ),
        inseparable,
    )


SKIPS = chain((0,), (1,), (1, 2), (3,), (0, 4), (2, 5), (6,), random=(1, 3, 6))


def test_edges_go_straight_from_maker_to_user() -> None:
    partition = Partition(SKIPS, (0, 3, 5))
    assert partition.edges == (
        Edge(0, 1, RANDOM_STATE, False),
        Edge(0, 1, "v1", True),
        Edge(0, 1, "v2", True),
        Edge(0, 2, "v0", False),
        Edge(0, 2, "v2", True),
        Edge(1, 2, RANDOM_STATE, False),
        Edge(1, 2, "v4", True),
    )
    assert partition.links == {(0, 1): True, (0, 2): True, (1, 2): True}
    assert [partition.inputs_of(stage) for stage in range(3)] == [("v0",), ("v1", "v2"), ("v0", "v2", "v4")]
    assert [partition.outputs_of(stage) for stage in range(3)] == [("v0", "v1", "v2"), ("v4",), ("v7",)]
    assert partition.bytes_over(0, 1) == 11 + 12
    assert partition.bytes_over(0, 2) == 10 + 12
    assert partition.bytes_over(2, 1) == 0
    partition = Partition(SKIPS, (0, 2, 3, 4, 6))  # the random state skips stages that do not draw
    states = [(edge.source, edge.target) for edge in partition.edges if edge.value == RANDOM_STATE]
    assert states == [(0, 2), (2, 4)]
    assert partition.links[0, 2]


@given(st.data())
def test_equal_partition_is_the_best_of_all(data: st.DataObject) -> None:
    count = data.draw(st.integers(3, 9))
    inputs = [tuple(sorted(data.draw(st.sets(st.integers(0, k), min_size=1, max_size=3)))) for k in range(count)]
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    graph = chain(*inputs, inseparable=((first, last),) if first < last else ())
    # Sixteenths, so that sums are exact.
    costs = [cost / 16 for cost in data.draw(st.lists(st.integers(0, 9), min_size=count + 1, max_size=count + 1))]
    allowed = [k for k in range(2, count) if graph.can_cut(k)]
    stages = data.draw(st.integers(1, len(allowed) + 1))

    def quality(starts: tuple[int, ...]) -> tuple[float, int]:
        ends = (*starts[1:], count + 1)
        slowest = max(sum(costs[a:b]) for a, b in zip(starts, ends, strict=True))
        crossing = sum(
            graph.by_name[f"v{k}"].output_bytes
            for start in starts[1:]
            for k in range(start)
            if any(k in inputs[j - 1] for j in range(start, count + 1))
        )
        return slowest, crossing

    best = min(quality((0, *cuts)) for cuts in combinations(allowed, stages - 1))
    assert quality(partition_equal(graph, stages, costs).starts) == best


def test_cuts_by_name_or_all_that_is_wrong_with_them() -> None:
    assert partition_at(SKIPS, ["v3", "v6"]).starts == (0, 3, 6)
    assert partition_at(SKIPS, ["block1", "block1.part5"]).starts == (0, 3, 5)
    graph = chain((0,), (1,), (2,), (3,), (4,), (5,), (6,), inseparable=((2, 4),))
    with pytest.raises(ValueError) as raised:
        partition_at(graph, ["v6", "v5", "block9", "v3", "v7"])
    for words in (
        "'v5' does not come after the cut before it, 'v6'",
        "'block9' is no layer or module of the model; close are block",
        "no cut may fall before 'v3'.*from v2 to v4; the nearest places are before v2 and before v5",
        "a cut before 'v7' leaves a stage without layers; the nearest places are before v6",
    ):
        assert re.search(words, str(raised.value))
    assert partition_equal(graph, 4).depth == 4
    for stages in (0, 5):
        with pytest.raises(ValueError, match=f"into 1 to 4 stages; got {stages}"):
            partition_equal(graph, stages)


def test_cost_counts_arithmetic_and_memory() -> None:
    layers = (
        Layer("x", INPUT, (), output_bytes=500),
        Layer("a", "Conv2d", ("x",), output_bytes=250, param_bytes=250, flops=10**7),
        Layer("out", OUTPUT, ("a",), output_bytes=250),
    )
    seconds = equal_cost(LayerGraph(layers))
    assert seconds == pytest.approx([0, 3 * (1e-6 + 2e-9), 0])


@given(graphs())
def test_single_value_cuts_are_the_values_that_all_ways_pass(graph: LayerGraph) -> None:
    def reaches_output_without(value: str) -> bool:
        reached: set[str] = set()
        for layer in graph.layers:
            if layer.name != value and (layer.kind == INPUT or reached & set(layer.inputs)):
                reached.add(layer.name)
        return graph.layers[-1].name in reached

    alone = {value for position in single_value_cuts(graph) for value in values_across(graph, position)}
    assert alone == {layer.name for layer in graph.layers[:-1] if not reaches_output_without(layer.name)}
    for position, count in enumerate(bytes_across(graph)):
        assert count == sum(graph.by_name[name].output_bytes for name in values_across(graph, position))


def test_parameters_and_sizes_carry_nothing_and_a_skip_hides_what_it_spans() -> None:
    held = graph_of((0,), (), (1,), (1, 2), (3, 4), (5,), weights=(2,), sizes=(3,))
    assert single_value_cuts(held) == [1, 2, 3, 4, 5, 6]
    assert single_value_cuts(graph_of((0,), (), (1,), (1, 2), (3, 4), (5,))) == [1, 2, 6]
    skip = graph_of((0,), (1,), (2,), (1, 3), (4,))
    assert single_value_cuts(skip) == [1, 2, 5]
    assert values_across(skip, 3) == ("v1", "v2")


def traced(tiles: int) -> LayerGraph:
    return trace(SkipNet(), (tiles, 3, 64, 64)).graph


def kept(graph: LayerGraph) -> int:
    return sum(dict(piece for layer in graph.layers for piece in layer.saved).values())


def test_it_is_what_a_trace_with_more_tiles_gives() -> None:
    scaled, real = with_tiles(traced(1), 3), traced(3)
    for one, other in zip(scaled.layers, real.layers, strict=True):
        for name in ("name", "output_bytes", "flops", "param_bytes", "output_storages"):
            assert getattr(one, name) == getattr(other, name)
        forms = [[(op.convolution, op.read_bytes) for op in layer.ops if op.convolution] for layer in (one, other)]
        assert forms[0] == forms[1]
    assert kept(scaled) == pytest.approx(kept(real), rel=2e-3)
    with pytest.raises(ValueError, match="at least one tile; got 0"):
        with_tiles(traced(1), 0)


def test_copies_that_autocast_makes_of_parameters_do_not_grow() -> None:
    one, two = (with_tiles(trace(SkipNet(), (1, 3, 64, 64), autocast=torch.bfloat16).graph, n) for n in (1, 2))
    real = trace(SkipNet(), (2, 3, 64, 64), autocast=torch.bfloat16).graph
    assert kept(two) == pytest.approx(kept(real), rel=2e-3)
    assert kept(two) < 2 * kept(one)


SIDES = [64 * 2**k for k in range(KNOWN)]


def graph_at(side: int, size: Callable[[int], int]) -> LayerGraph:
    bytes_ = size(side)
    op = Op("convolution", 10**9 * side**2, 3 * bytes_ + 5, bytes_)
    layers = (
        Layer("x", "input", (), output_bytes=12 * side**2),
        Layer("y", "Conv2d", ("x",), "conv", bytes_, 640, 18 * bytes_, saved=((0, bytes_),), ops=(op,)),
        Layer("z", "output", ("y",), output_bytes=8),
    )
    return LayerGraph(layers)


def known(size: Callable[[int], int], sides: list[int] = SIDES) -> BySide[LayerGraph]:
    graphs = BySide[LayerGraph]()
    for side in sides:
        graphs.add(side, graph_at(side, size))
    return graphs


@pytest.mark.parametrize("size", [lambda side: side**2, lambda side: 4 * (side // 2 - 3) ** 2 + 7, lambda side: 40])
def test_polynomials_tell_the_sides_between(size: Callable[[int], int]) -> None:
    graphs = known(size)
    for side in range(SIDES[0], SIDES[-1] + 1, 64):
        assert graphs.at(side) == graph_at(side, size)
    assert graphs.at(SIDES[-1] + 64) is None
    fewer = known(size, SIDES[:-1])  # these tell of themselves alone
    assert fewer.at(SIDES[1]) == graph_at(SIDES[1], size)
    assert fewer.at(192) is None
    fewer.add(32, LayerGraph(graph_at(32, size).layers[:2]))  # of another form
    assert fewer.at(192) is None


@pytest.mark.parametrize(
    "size",
    [lambda side: side**4, lambda side: (-(-side // 4 // 7) * 7) ** 2, lambda side: (side // 128 * 128) ** 2],
    ids=["attention", "windows of 7", "stride 128"],
)
def test_what_is_no_polynomial_is_not_told(size: Callable[[int], int]) -> None:
    assert known(size).at(192) is None
