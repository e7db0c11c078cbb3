"""What is said of a side that was not run is what a run says of it, or nothing is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from parallel.graph.layers import Layer, LayerGraph
from parallel.graph.op import Op
from parallel.graph.sides import KNOWN, GraphsBySide

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
