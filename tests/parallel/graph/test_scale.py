"""The graph of one tile scaled against the graph traced with more of them."""

from __future__ import annotations

import pytest
import torch

from parallel.graph.layers import LayerGraph
from parallel.graph.scale import with_tiles
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
