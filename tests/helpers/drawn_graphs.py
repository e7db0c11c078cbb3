"""Graphs: small ones, by hand or drawn by hypothesis, and those of models by name."""

from __future__ import annotations

import functools

import torch
from hypothesis import strategies as st

from models.registry import build_model
from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph
from parallel.trace.trace import trace


def graph_of(*inputs: tuple[int, ...], weights: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> LayerGraph:
    """v0 is the input, layer k uses ``inputs[k - 1]``, the last is the output; ``weights`` are parameters, ``sizes``
    numbers."""
    count = len(inputs)
    return LayerGraph(
        tuple(
            Layer(
                name=f"v{k}",
                kind=INPUT if k == 0 else OUTPUT if k == count else "get_attr" if k in weights else "add",
                inputs=() if k == 0 else tuple(f"v{i}" for i in inputs[k - 1]),
                output_bytes=0 if k in sizes else 10 + k,
            )
            for k in range(count + 1)
        )
    )


@st.composite
def graphs(draw: st.DrawFn) -> LayerGraph:
    """Every layer depends on the input and is used."""
    count = draw(st.integers(2, 16))
    uses = [set(draw(st.sets(st.integers(0, k - 1), min_size=1, max_size=3))) for k in range(1, count + 1)]
    for k in range(count):
        if not any(k in used for used in uses):
            uses[draw(st.integers(k, count - 1))].add(k)
    return graph_of(*(tuple(sorted(used)) for used in uses))


@functools.cache
def traced(name: str) -> LayerGraph:
    """Layers of a model for a microbatch of one tile of 512 px; no memory is taken."""
    with torch.device("meta"):
        model = build_model(name, classes=2)
    return trace(model, (1, 3, 512, 512)).graph
