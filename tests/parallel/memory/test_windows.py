"""Windows between some places: taken from those between all, they are what they would be by themselves."""

from __future__ import annotations

import numpy as np
import pytest

from parallel.graph.partition import cut_positions
from parallel.memory.windows import Windows
from tests.helpers.random_graphs import random_graph

MATRICES = (
    "seconds",
    "param_bytes",
    "received_bytes",
    "returned_bytes",
    "entered_bytes",
    "kept_bytes",
    "peak_bytes",
)


@pytest.mark.parametrize("seed", range(10))
def test_windows_among_some_places_are_those_of_these_places(seed: int) -> None:
    graph = random_graph(seed)
    places = [0, *cut_positions(graph), len(graph.layers)]
    some = [0, *places[1:-1:2], len(graph.layers)]
    seconds = [1.0 + k for k in range(len(graph.layers))]
    among, alone = Windows(graph, seconds, places).among(some), Windows(graph, seconds, some)
    assert among.positions == alone.positions
    assert len(among) == len(alone)
    above = np.triu_indices(len(some), 1)
    for name in MATRICES:
        assert (getattr(among, name)[above] == getattr(alone, name)[above]).all(), name
