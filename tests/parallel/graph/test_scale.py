"""Graphs of several tiles and of other sides are those that a trace gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from parallel.graph.layers import Layer, LayerGraph, Op
from parallel.graph.scale import KNOWN, GraphsBySide, with_tiles
from parallel.trace.trace import trace
from tests.helpers.small_nets import SkipNet


def traced(tiles: int) -> LayerGraph:
    return trace(SkipNet(), (tiles, 3, 64, 64)).graph


def kept(graph: LayerGraph) -> int:
    return sum(dict(piece for layer in graph.layers for piece in layer.saved).values())


def test_it_is_what_a_trace_with_more_tiles_gives() -> None:
    scaled, real = with_tiles(traced(1), 3), traced(3)
    for one, other in zip(scaled.layers, real.layers, strict=True):
        assert (one.name, one.output_bytes, one.flops, one.param_bytes) == (
            other.name,
            other.output_bytes,
            other.flops,
            other.param_bytes,
        )
        assert one.output_storages == other.output_storages
        assert [op.convolution for op in one.ops] == [op.convolution for op in other.ops]
        reads = [[op.read_bytes for op in layer.ops if op.convolution] for layer in (one, other)]
        assert reads[0] == reads[1]
    assert kept(scaled) == pytest.approx(kept(real), rel=2e-3)


def test_copies_that_autocast_makes_of_parameters_do_not_grow() -> None:
    one, two = (with_tiles(trace(SkipNet(), (1, 3, 64, 64), autocast=torch.bfloat16).graph, n) for n in (1, 2))
    real = trace(SkipNet(), (2, 3, 64, 64), autocast=torch.bfloat16).graph
    assert kept(two) == pytest.approx(kept(real), rel=2e-3)
    assert kept(two) < 2 * kept(one)


def test_no_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one tile; got 0"):
        with_tiles(traced(1), 0)


SIDES = [64 * 2**k for k in range(KNOWN)]


def graph_of(side: int, size: Callable[[int], int]) -> LayerGraph:
    bytes_ = size(side)
    op = Op("convolution", 10**9 * side**2, 3 * bytes_ + 5, bytes_)
    layers = (
        Layer("x", "input", (), output_bytes=12 * side**2),
        Layer("y", "Conv2d", ("x",), "conv", bytes_, 640, 18 * bytes_, saved=((0, bytes_),), ops=(op,)),
        Layer("z", "output", ("y",), output_bytes=8),
    )
    return LayerGraph(layers)


def known(size: Callable[[int], int], sides: list[int] = SIDES) -> GraphsBySide:
    graphs = GraphsBySide()
    for side in sides:
        graphs.add(side, graph_of(side, size))
    return graphs


@pytest.mark.parametrize("size", [lambda side: side**2, lambda side: 4 * (side // 2 - 3) ** 2 + 7, lambda side: 40])
def test_polynomials_tell_the_sides_between(size: Callable[[int], int]) -> None:
    graphs = known(size)
    for side in range(SIDES[0], SIDES[-1] + 1, 64):
        assert graphs.at(side) == graph_of(side, size)
    assert graphs.at(SIDES[-1] + 64) is None


def test_fewer_sides_tell_of_themselves_alone() -> None:
    graphs = known(lambda side: side**2, SIDES[:-1])
    assert graphs.at(SIDES[1]) == graph_of(SIDES[1], lambda side: side**2)
    assert graphs.at(192) is None


@pytest.mark.parametrize(
    "size",
    [lambda side: side**4, lambda side: (-(-side // 4 // 7) * 7) ** 2, lambda side: (side // 128 * 128) ** 2],
    ids=["attention", "windows of 7", "stride 128"],
)
def test_what_is_no_polynomial_is_not_told(size: Callable[[int], int]) -> None:
    assert known(size).at(192) is None


def test_graphs_of_another_form_tell_nothing() -> None:
    graphs = known(lambda side: side**2, SIDES[1:])
    graphs.add(32, LayerGraph(graph_of(32, lambda side: side**2).layers[:2]))
    assert graphs.at(192) is None
