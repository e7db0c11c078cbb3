"""The largest part of a rank's memory is named, and the layer whose working set it is."""

from __future__ import annotations

import pytest

from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph
from parallel.memory.rank_bytes import RankBytes
from parallel.plan.plan import limit_of, working_set

IMAGE = Layer("x", INPUT, (), differentiable=False, output_bytes=10, output_storages=((0, 10),))
FIRST = Layer("wide", "Conv2d", ("x",), output_bytes=100, saved=((0, 10),), output_storages=((1, 100),))
SECOND = Layer(
    "norm", "BatchNorm2d", ("wide",), output_bytes=100, saved=((1, 100), (2, 4)), output_storages=((3, 100),)
)
ADDED = Layer("added", "add", ("wide", "norm"), output_bytes=100, output_storages=((4, 100),))
GRAPH = LayerGraph((IMAGE, FIRST, SECOND, ADDED, Layer("output", OUTPUT, ("added",), output_bytes=100)))


def test_working_sets() -> None:
    assert working_set(GRAPH, FIRST) == 10 + 100  # the gradient of the image is not needed
    assert working_set(GRAPH, SECOND) == 104 + 2 * 100  # backward: what it keeps and two gradients
    assert working_set(GRAPH, ADDED) == 3 * 100


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (RankBytes(1 << 20, 1 << 20, 2 << 20, 1 << 20, 1 << 20, 0), "parameters, gradients, optimizer state: 4 MiB"),
        (RankBytes(1, 1, 2, 5 << 10, 1 << 10, 1 << 10), "activations kept: 6 KiB"),
        (RankBytes(1, 1, 2, 5, 1 << 20, 1), "working set of norm: 304 B"),
    ],
)
def test_the_largest_part(held: RankBytes, says: str) -> None:
    assert str(limit_of(held, GRAPH, GRAPH.layers)) == says
